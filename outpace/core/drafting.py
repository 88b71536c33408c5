"""What a part is built from, what it asks of the engine, and what it is then told of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class BuildContext(NamedTuple):
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


NO_NEEDS = Needs()


class TargetFeedback(NamedTuple):
    """What a pass showed of nodes that it judged, or of a chunk of the prompt: as much as was asked for."""

    ids: Sequence[int]  # of the nodes; of the prompt's tokens: their positions
    tokens: Sequence[int]
    top: np.ndarray | None = None  # int64 [nodes, top], best first
    hidden: Tensor | None = None  # [layers, nodes, width]

    def only(self, needs: Needs, layers: Sequence[int]) -> TargetFeedback:
        """What `needs` ask for, of hidden states that are those after `layers`."""
        top = self.top[:, : needs.top] if self.top is not None and needs.top else None
        return self._replace(top=top, hidden=pick_layers(self.hidden, layers, needs.layers))

    def slice(self, nodes: slice) -> TargetFeedback:
        """Some of the nodes."""
        top = None if self.top is None else self.top[nodes]
        hidden = None if self.hidden is None else self.hidden[:, nodes]
        return TargetFeedback(self.ids[nodes], self.tokens[nodes], top, hidden)


def pick_layers(hidden: Tensor | None, layers: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """The hidden states after the layers that are `wanted`, in their order. [layers, nodes, width]"""
    if hidden is None or not wanted:
        return None
    return hidden if tuple(layers) == tuple(wanted) else hidden[[list(layers).index(layer) for layer in wanted]]


class DraftDirectives(NamedTuple):
    """`layers`: it adds so many more and then rests, None: it goes on. For the others 0 stands for no bound: `depth`,
    it stops where its tree is so deep; `width`, nodes a forward, of those that it may. `outcomes`: it expands no best
    nodes, but grows chains of so many tokens, below the root and below each likely outcome of that chain's
    verification. `floor`: nodes that the target is expected to reach less often are not expanded; None: the drafter's
    own. `share`: a forward adds at most this share of the nodes that the tree has room for, so that it does not fill
    up in a long pass; twice as many as it expands in any case."""

    layers: int | None = None
    depth: int = 0
    width: int = 0
    outcomes: int = 0
    floor: float | None = None
    share: float = 1.0


UNRESTRICTED = DraftDirectives()


class TakesOrders:
    """What a worker asks of a drafter beside its verb."""

    shares_work = False  # a growth may do the work of others, or have its own done: see `amortized`

    def configure(self, state: Any, orders: DraftDirectives) -> None:
        """How wide and where to draft for a request from now on; whoever cannot, drafts as ever."""

    def begin_concurrent(self) -> None:
        """It works beside the target from now on, so that `on_root_moved` may be called while it grows."""

    def on_root_moved(self, state: Any, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        """Another thread says where the target went while the tree is perhaps being grown: the nodes that it walked, by
        id, what it wrote behind each, and the root from now on. `observe` will say the same; whoever cannot use it
        before, waits for that."""

    def amortized(self, seconds: float) -> float:
        """What the growth that took so long is held to have taken, where it also did others' work, or had its done."""
        return seconds

    def limit_threads(self, most: int) -> None:
        """Its models take at most so many CPU threads in what this thread runs."""
