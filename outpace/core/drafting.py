"""What drafters are built from and where they run, what they need from the engine, what they receive, and how they may
be directed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.arrays import join_rows

if TYPE_CHECKING:
    from torch import Tensor


SCHEMES = ("grpc", "grpcs")  # of the addresses of drafters and targets on other machines


def is_address(text: Any) -> bool:
    """Return whether a text is an address of another machine, by its scheme."""
    return isinstance(text, str) and text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


class BuildContext(NamedTuple):
    """The models and tokenizers that a drafter may be built from; None where there is none.

    `others` are further draft models with the target's vocabulary. In a drafting process only `draft` and
    `draft_tokenizer` are set.
    """

    draft: Any = None
    target: Any = None
    draft_tokenizer: Any = None
    tokenizer: Any = None
    others: tuple[Any, ...] = ()


class Needs(NamedTuple):
    """What a drafter needs to receive about the target's passes, beyond the verdict.

    top: the target's best tokens after each verified node. layers: the residual stream after these many layers, before
    the final norm. prompt: the same for the prompt's tokens. session: it drafts on the target's own session, with at
    most this many pending nodes.
    """

    top: int = 0
    layers: tuple[int, ...] = ()
    prompt: bool = False
    session: int = 0

    def joined(self, other: Needs) -> Needs:
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Needs(max(self.top, other.top), layers, self.prompt or other.prompt, max(self.session, other.session))


NO_NEEDS = Needs()


class TargetFeedback(NamedTuple):
    """The target's output at verified nodes, or at a chunk of the prompt, as far as a drafter needs it."""

    ids: Sequence[int]  # node ids; positions for tokens of the prompt
    tokens: Sequence[int]
    top: np.ndarray | None = None  # int64 [nodes, top], best first
    hidden: Tensor | np.ndarray | None = None  # [layers, nodes, width]

    def select(self, needs: Needs, layers: Sequence[int]) -> TargetFeedback:
        """Return the part that `needs` request; `hidden` now holds the states after `layers`."""
        top = self.top[:, : needs.top] if self.top is not None and needs.top else None
        return self._replace(top=top, hidden=pick_layers(self.hidden, layers, needs.layers))

    def slice(self, nodes: slice) -> TargetFeedback:
        top = None if self.top is None else self.top[nodes]
        hidden = None if self.hidden is None else self.hidden[:, nodes]
        return TargetFeedback(self.ids[nodes], self.tokens[nodes], top, hidden)


def join_feedback(outputs: Sequence[TargetFeedback]) -> TargetFeedback:
    """Concatenate the outputs of several rounds, oldest first."""
    if len(outputs) == 1:
        return outputs[0]
    ids = [one for output in outputs for one in output.ids]
    tokens = [one for output in outputs for one in output.tokens]
    top = [output.top for output in outputs if output.top is not None]
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    return TargetFeedback(ids, tokens, np.concatenate(top) if top else None, join_rows(hidden, 1) if hidden else None)


def pick_layers(hidden: Any, layers: Sequence[int], wanted: Sequence[int]) -> Any:
    """Select the states after the layers `wanted` from those after `layers`: [wanted, nodes, width]."""
    if hidden is None or not wanted:
        return None
    return hidden if tuple(layers) == tuple(wanted) else hidden[[list(layers).index(layer) for layer in wanted]]


LEVEL_SHARE = 1 / 8  # of the tree's free nodes that one level of a parallel drafter may use


class DraftDirectives(NamedTuple):
    """How a drafter that works in parallel with the target grows the tree below the present root; 0 means no limit.

    levels: levels to add before it rests; None: it never rests. depth: depth at which the tree stops growing. width:
    nodes per forward. outcomes: grow no best-first tree, but chains of this many tokens below the root and below each
    likely outcome of that chain's verification. floor: path probability below which no node is expanded; None: the
    drafter's own. share: largest fraction of the tree's free nodes that one forward may fill, so that the tree is not
    full before a long pass ends; at least twice the expanded nodes are always allowed. in_levels: grow whole levels,
    the best nodes of the last level only, ranked by the product of q, as CARD was published.
    """

    levels: int | None = None
    depth: int = 0
    width: int = 0
    outcomes: int = 0
    floor: float | None = None
    share: float = 1.0
    in_levels: bool = False


UNRESTRICTED = DraftDirectives()
