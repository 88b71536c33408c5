"""Which attention and MLP sublayers a draft leaves out of its target, as text and as numbers; and how well it then
agrees with what the target wrote.

Self-speculative decoding, arXiv:2309.08168: the residual stream passes by a sublayer that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.core.types import Request, Row
from outpace.models.base import Extra, Model, Part, lacking
from outpace.rules.base import best_rows


class Sublayers(NamedTuple):
    """Layers, numbered from 0, rising: those whose attention is left out, and those whose MLP is."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.attention) + len(self.mlp)

    def check(self, num_layers: int) -> None:
        """UserError for a set that leaves out nothing, everything, or a layer that a model of so many has not."""
        for name, layers in (("skip_attention", self.attention), ("skip_mlp", self.mlp)):
            beyond = next((layer for layer in layers if layer >= num_layers), None)
            if beyond is not None:
                raise UserError(f"{name} names layer {beyond}, the target has layers 0 to {num_layers - 1}")
        if not self.size:
            raise UserError(
                "skip_attention and skip_mlp name no layer: a draft that leaves out nothing costs as much as the target"
            )
        if self.size == 2 * num_layers:
            raise UserError(
                f"skip_attention and skip_mlp name all {num_layers} layers: at least one attention or MLP must stay"
            )

    def __str__(self) -> str:
        return f"--skip-attention {written(self.attention)} --skip-mlp {written(self.mlp)}"


def check_target(model: Model) -> None:
    """UserError for a model that cannot draft without some of its sublayers."""
    for extra in (Extra.WITHOUT, Extra.LENGTH):
        if extra not in model.extras:
            raise lacking(model, extra)


def read(name: str, text: str | None) -> tuple[int, ...]:
    """Layers as "3,5-8" has them, rising; UserError for any other text. None: none."""
    found: set[int] = set()
    for part in (text or "").replace(" ", "").split(",") if text and text.strip() else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or part.endswith("-"):
            raise UserError(f"{name} is {text!r:.200}, it must be layers such as 3,5-8, numbered from 0")
        if int(last or first) < int(first) or int(last or first) > 9999:
            raise UserError(f"{name} has {part!r:.40}, a range rises and ends below 10000")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def written(layers: Sequence[int]) -> str:
    """Layers as `read` reads them; "" for none."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)
    return shown or '""'


def inner(num_layers: int) -> range:
    """The layers that a search may leave out: all but the first and the last. UserError where there is none."""
    if num_layers < 3:
        raise UserError(
            f"the target has {num_layers} layers, of which a search keeps the first and the last: name what is left out"
            " with skip_attention or skip_mlp"
        )
    return range(1, num_layers - 1)


def evenly(num_layers: int, ratio: float) -> Sublayers:
    """Attention and MLP of such a share of all layers, one at least, spread evenly between the first and the last."""
    layers = inner(num_layers)
    count = min(max(round(ratio * num_layers), 1), len(layers))
    chosen = tuple(layers[number * len(layers) // count] for number in range(count))
    return Sublayers(chosen, chosen)


def agreements(model: Model, session: Any, request: Request, text: Sequence[int], count: int) -> list[bool]:
    """Whether a model proposes, after each of the text's `count` tokens before the last, the token that stands there.

    One forward in pending slots of the target's session, which holds all tokens but the last: behind the tokens before
    those `count`, so nothing that is stored of them is read, and nothing is changed.
    """
    start = len(text) - 1 - count
    part = Part(session, text[start:-1], range(PREFIX, count - 1), range(count), length=start)
    held = model.score_held([part])
    session.keep(())
    rows = [Row(request, text[: start + place + 1]) for place in range(count)]
    offers = best_rows(held, rows, 1)
    return [offer[0][:1] == [token] for offer, token in zip(offers, text[start + 1 :], strict=True)]
