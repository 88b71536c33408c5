"""Orders to a drafter beside the target: how to grow the tree below its present root, until the next order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Orders(NamedTuple):
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


FREE = Orders()


class TakesOrders:
    """What a worker asks of a drafter beside its verb."""

    shares_time = False  # a growth may do the work of others, or have its own done: see `amortised`

    def heed(self, state: Any, orders: Orders) -> None:
        """How wide and where to draft for a request from now on; whoever cannot, drafts as ever."""

    def begin_concurrent(self) -> None:
        """It works beside the target from now on, so that `hear` may be called while it grows."""

    def hear(self, state: Any, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        """Another thread says where the target went while the tree is perhaps being grown: the nodes that it walked, by
        id, what it wrote behind each, and the root from now on. `observe` will say the same; whoever cannot use it
        before, waits for that."""

    def amortised(self, seconds: float) -> float:
        """What the growth that took so long is held to have taken, where it also did others' work, or had its done."""
        return seconds

    def share_cores(self, most: int) -> None:
        """Its models take at most so many CPU threads in what this thread runs."""
