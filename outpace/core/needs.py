"""What a part is built from, what it asks of the engine, and what it is then told of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Given(NamedTuple):
    """What a drafter may be built from: the models and their tokenizers, None where there is none; `others` are further
    draft models with the target's tokens. In another process the draft and its tokenizer are all there is."""

    draft: Any = None
    target: Any = None
    draft_tokenizer: Any = None
    tokenizer: Any = None
    others: tuple[Any, ...] = ()


class Needs(NamedTuple):
    """What a drafter is told of its requests' nodes beside the verdict; the default is nothing. Of a rule's needs only
    `layers` count.

    `top`: the best tokens by the target's scores after a node; `layers`: the residual stream after so many layers each,
    before the final norm. `prompt`: `Drafter.read` is told of the prompt's tokens too. `session`: it drafts on the
    target's own session, in so many pending nodes at most.
    """

    top: int = 0
    layers: tuple[int, ...] = ()
    prompt: bool = False
    session: int = 0

    def joined(self, other: Needs) -> Needs:
        """What serves both."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Needs(max(self.top, other.top), layers, self.prompt or other.prompt, max(self.session, other.session))


NOTHING = Needs()


class Seen(NamedTuple):
    """What a pass showed of nodes that it judged, or of a chunk of the prompt: as much as was asked for."""

    ids: Sequence[int]  # of the nodes; of the prompt's tokens: their positions
    tokens: Sequence[int]
    top: np.ndarray | None = None  # int64 [nodes, top], best first
    hidden: Tensor | None = None  # [layers, nodes, width]

    def only(self, needs: Needs, layers: Sequence[int]) -> Seen:
        """What `needs` ask for, of hidden states that are those after `layers`."""
        top = self.top[:, : needs.top] if self.top is not None and needs.top else None
        return self._replace(top=top, hidden=pick_layers(self.hidden, layers, needs.layers))

    def slice(self, nodes: slice) -> Seen:
        """Some of the nodes."""
        top = None if self.top is None else self.top[nodes]
        hidden = None if self.hidden is None else self.hidden[:, nodes]
        return Seen(self.ids[nodes], self.tokens[nodes], top, hidden)


def pick_layers(hidden: Tensor | None, layers: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """The hidden states after the layers that are `wanted`, in their order. [layers, nodes, width]"""
    if hidden is None or not wanted:
        return None
    return hidden if tuple(layers) == tuple(wanted) else hidden[[list(layers).index(layer) for layer in wanted]]
