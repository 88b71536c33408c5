"""Several draft steps that a model takes without the host: what it is told of a text's tree, and what it gives back.

A step expands the best unexpanded nodes of each tree, `width` at most, as `drafters/_tree_expander.py` chooses them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from outpace.core.logits import SparseLogits

MAX_STEPS = 8
MIN_COVERAGE = 0.05  # the chance that any proposal is picked is never held to be less, where they are shares
MAX_DEPTH = 128  # of a node below the root
_MORE_OPEN = 4
MAX_UPDATE_TOKENS = 4  # tokens below a known node, of which steps under way can be told


def max_open_nodes(width: int, steps: int, is_told: bool) -> int:
    """Nodes that were open before the steps and can be of use: as many as are expanded; more of them where steps that
    are told where the target went may have to leave the best ones."""
    return width * (steps - 1) * (_MORE_OPEN if is_told else 1)


class OpenNode(NamedTuple):
    """A tree node that is not expanded yet. `above`: the pending node that its parent is, PREFIX for the root's."""

    score: float
    token: int
    depth: int
    above: int


class ScoreCalibration(NamedTuple):
    """How scores on a rule's scale become chances: see `drafters/_chance.ChoiceModel`. `open` None: they are no shares,
    and the chance that any proposal is picked is `coverage`."""

    temperature: float
    coverage: float
    open: float | None


class RootUpdate(NamedTuple):
    """Where the next root is: below the pending node `slot`, whose path score is `score`, the target wrote these
    tokens, MOST_WALKED at most. The root is the last of them; with none it is that node."""

    slot: int
    score: float
    tokens: Sequence[int]


class RootUpdateChannel:
    """Tells the steps that are taken for one text where its root went. Any thread may send; what is sent before they
    are under way waits for that, what comes behind them is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._write: Callable[[RootUpdate], None] | None = None
        self._last: RootUpdate | None = None

    def begin(self, write: Callable[[RootUpdate], None]) -> None:
        """From now on steps are under way, which read what `write` is given."""
        with self._lock:
            self._write = write
            if self._last is not None:
                write(self._last)

    def end(self) -> None:
        """They are done."""
        with self._lock:
            self._write = None

    def send(self, moved: RootUpdate) -> None:
        """What was sent before does not count any more."""
        with self._lock:
            self._last = moved
            if self._write is not None:
                self._write(moved)


@dataclass
class MultiStepRequest:
    """One text's part. The nodes of the first step are scored already: `scores` are their path scores, `slots` the
    pending nodes that they are, in the order of the tree. `opened`: others that may be expanded, in that order.

    `nodes` of the tree stand, and `most_nodes` may; a step adds at most the `share` of what is left. Nodes below the
    path score `floor`, or deeper than `deepest`, are not expanded. `temperature`: by which scores are divided; `keys`,
    in halves: of the noise that is added to what is proposed below nodes of depth 0, 1, ..., empty for none. `mail`: by
    which the steps are told meanwhile where the root went, None: by nobody.
    """

    session: Any
    scores: Sequence[float]
    slots: Sequence[int]
    opened: Sequence[OpenNode]
    width: int
    nodes: int
    most_nodes: int
    share: float
    floor: float
    deepest: int
    trust: ScoreCalibration
    temperature: float = 1.0
    keys: Sequence[tuple[int, int]] = ()
    mail: RootUpdateChannel | None = None


class ExpandedNode(NamedTuple):
    """A node that a step expanded. `opened`: which of those that were open it is; else it is the child with `token` of
    the `parent`-th node expanded, or of the node that was pending before in the slot `below`, where the target wrote
    what no tree had. `slot`: the pending node that it is. Its best proposals follow, best first."""

    opened: int | None
    parent: int
    token: int
    slot: int
    tokens: list[int]
    values: list[float]
    below: int | None = None


class SupportsMultiStep:
    """What a model offers that can take several draft steps without the host between them; by default it cannot."""

    several_steps: bool | None = None  # whether that saves time; None: it cannot

    def draft_steps(
        self, asked: Sequence[MultiStepRequest], scored: SparseLogits, steps: int, width: int, offered: int
    ) -> list[list[ExpandedNode]] | None:
        """So many steps, of which the first is scored already: `scored` has the rows of its nodes, one text's after the
        other's. A step expands `width` nodes of a text at most, and `offered` tokens are proposed below each.

        What each text's steps expanded, the first step's nodes first; all of it is pending in the sessions then. None
        where this cannot be, and nothing has changed.
        """
        return None
