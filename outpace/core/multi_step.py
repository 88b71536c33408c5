"""Several draft steps that a model takes without the host in between: the request, and the result.

A step expands the best unexpanded nodes of each tree, at most `width`, as `drafters/_tree_expander.py` chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from outpace.core.logits import SparseLogits

MAX_STEPS = 8
MIN_COVERAGE = 0.05  # least assumed probability that any proposal is picked, if the scores are probabilities
MAX_DEPTH = 128  # of a node below the root


def max_open_nodes(width: int, steps: int) -> int:
    """Return the number of open nodes that the steps can use: they expand no more than this."""
    return width * (steps - 1)


class OpenNode(NamedTuple):
    """A tree node that is not expanded yet.

    `above` is the pending node of its parent, PREFIX for the root's children.
    """

    score: float
    token: int
    depth: int
    above: int


class ScoreCalibration(NamedTuple):
    """How scores on a rule's scale become probabilities: see `drafters/_calibration.PickModel`.

    If `open` is None, the scores are no probabilities, and `coverage` is the probability that any proposal is picked.
    """

    temperature: float
    coverage: float
    open: float | None


@dataclass
class MultiStepRequest:
    """One text's input. The nodes of the first step are scored already.

    `scores` are their path scores, `slots` their pending nodes, in the order of the tree; `opened` are the other nodes
    that may be expanded, in that order. The tree has `nodes` nodes and may have `most_nodes`; a step adds at most the
    fraction `share` of the rest. Nodes with a path score below `floor`, or deeper than `deepest`, are not expanded.
    Scores are divided by `temperature`; `keys` are, as word pairs, those of the noise that is added to proposals below
    nodes of depth 0, 1, ..., empty for none.
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


class ExpandedNode(NamedTuple):
    """A node that a step expanded, with its best proposals, best first.

    `opened`: its index among the open nodes; else it is the child with `token` of the `parent`-th expanded node. `slot`
    is its own pending node.
    """

    opened: int | None
    parent: int
    token: int
    slot: int
    tokens: list[int]
    values: list[float]


class SupportsMultiStep:
    """The part of a model that can take several draft steps without the host; by default it cannot."""

    several_steps: bool | None = None  # whether it saves time; None: unsupported

    def draft_steps(
        self, requests: Sequence[MultiStepRequest], scored: SparseLogits, steps: int, width: int, num_proposals: int
    ) -> list[list[ExpandedNode]] | None:
        """Take `steps` steps; the first one is scored already.

        Return the expanded nodes of each text, in order.

        `scored` has the rows of the first step's nodes, one text after another. A step expands at most `width` nodes
        per text and proposes `num_proposals` tokens below each. Afterwards all expanded nodes are pending in the
        sessions.
        Returns None, with nothing changed, if this is not possible.
        """
        return None

    def capture_steps(self, sizes: Sequence[tuple[int, int]], width: int, num_proposals: int) -> None:
        """Capture what `draft_steps` runs for short texts, for these numbers of texts and steps, so that no round waits
        for it."""
