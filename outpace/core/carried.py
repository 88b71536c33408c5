"""Whole rounds that a pair of models carries out in one call: what it is told of a request, and what it tells.

A planner says what holds for the rounds to come (`Plan`); the pair grows the tree by the draft, chooses what is
verified, verifies it, and goes on with the next round. Nothing that the host does stands between these. The numbers
are those of the slow way, in which a decoder asks for each of these steps (`decoders/auto.py`, `_planner.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from outpace.core.multi_step import ScoreCalibration
from outpace.core.tree import Role, Siblings, TokenTree


class PassTimes(NamedTuple):
    """`seconds` of rounds over 1, 2, ... rows of all requests, drafting not counted; `widest`: rows of the widest that
    was timed; `untimed`: whether a round over 1, 2, ... rows is wanted for the sake of knowing its time."""

    seconds: Sequence[float]
    widest: int
    untimed: Sequence[bool]


class Plan(NamedTuple):
    """What a planner holds of one request for the rounds to come. Seconds are priced in tokens.

    `rounds`: so many at most. `follows`: the draft has read all but what the last round wrote. Layers: `deepest` at
    most, each of which must bring more than `cost`, where `growth` by layer is what it brings for each chance at the
    leaves; `explores`: rounds that grow a first layer to see what it gives; `due`: by layer, whether it is grown as a
    trial. `price`: tokens that a second is worth. `trust` of the draft's chances, `chances` of the tree's nodes, and
    `copied`, the chance that the walk comes to a node that stood there before the draft grew. `row`: what a node must
    be worth so that one below it may pay; `least`: nodes with path scores below it are not planted, but for the best
    below each node. `most`: nodes that may be verified, the root included. `copies`: each round begins with copies.
    `drafts`: it expects to draft, so that it is worth carrying out.
    """

    rounds: int
    follows: bool
    deepest: int
    explores: int
    price: float
    cost: float
    trust: float
    row: float
    least: float
    copied: float
    growth: Sequence[float]
    due: Sequence[bool]
    chances: Sequence[float]
    times: PassTimes
    most: int
    copies: bool = False
    drafts: bool = True


def resting(rounds: int) -> Plan:
    """Plain rounds beside others' drafts, for a tree that is a root."""
    times = PassTimes((0.0,), 1, ())
    return Plan(rounds, False, 0, 0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, (1.0,), (), (1.0,), times, most=1, drafts=False)


class CarryOut(NamedTuple):
    """A coroutine asks for whole rounds, the first with this tree; it is sent what they gave, a `Carried` each, or None
    where nothing was carried out, and it is to ask for each step. It then commits round after round."""

    tree: TokenTree
    plan: Plan


class Layer(NamedTuple):
    """What a layer gave: the worth that it added to the tree, the chance at the leaves before, and whether it tells
    what such layers give."""

    worth: float
    at_leaves: float
    counts: bool


class Forward(NamedTuple):
    """One forward of the draft, of which so many requests had a share; `is_step`: it read nothing, for any of them, but
    what it had proposed."""

    seconds: float
    requests: int
    is_step: bool


class Carried(NamedTuple):
    """One request's round. The verified nodes are those that stood in its tree (`known`, as they were numbered there),
    then those that were copied (`copied`) or that the draft grew, with `parents` by their places among all of them.

    `picks`: what the target writes behind each; `path`: the walk. `is_trial`: the last layer was one; `is_fewer`: fewer
    nodes were verified than pay. `picked`: of each walked node below which the draft proposed something, the values of
    its proposals, and the number of the one that the target wrote; -1: none of them. `planted`: of each walked node the
    tokens that were copied below it, and their kinds. The others are of all requests: `forwards`, and seconds of the
    copies, of the target's pass, and of the round.
    """

    known: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    scores: Sequence[float]
    copied: Sequence[bool]
    picks: Sequence[int]
    path: Sequence[int]
    layers: Sequence[Layer]
    is_trial: bool
    is_fewer: bool
    picked: Sequence[tuple[Sequence[float], int]]
    planted: Sequence[Sequence[tuple[int, int]]]
    forwards: Sequence[Forward]
    copy_seconds: float
    target_seconds: float
    seconds: float

    def onto(self, tree: TokenTree, grower: str, copier: str) -> TokenTree:
        """The verified tree, its new nodes by these sources; `tree` is the one that the round began with, which may be
        changed."""
        if len(self.known) < len(tree):
            tree = tree.copy(self.known)
        if self.tokens:
            before = len(tree)
            tree.siblings |= dict.fromkeys(self.parents, Siblings.PICKED)
            ids = range(tree.next_id, tree.next_id + len(self.tokens))
            tree.append(self.parents, self.tokens, self.scores, [Role.PRIMARY] * len(self.tokens), ids)
            tree.sources[before:] = [copier if is_copied else grower for is_copied in self.copied]
        return tree


class Noise(NamedTuple):
    """By what a request's tokens are picked: the best by x / temperature plus the noise that `core/noise.py` keys by
    seed, choice and position, of those that the filters of `core/sampling.py` leave; at temperature 0 the best by the
    scores x alone."""

    temperature: float = 0.0
    seed: int = 0
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Carrying(NamedTuple):
    """What a pair is told of one request beside its plan: the target's session, which has all of the text but the
    root, the rows of its last pass, the tokens that may still be written, those that end it, and its noise."""

    session: Any
    ask: CarryOut
    rows: int
    left: int
    stops: Sequence[int]
    noise: Noise


class Copied(NamedTuple):
    """Who copies from the text of a request in its rounds: the kernels' own object, and the logarithms of how often
    copies come true, by their kind."""

    copies: Any = None
    log_rates: Sequence[float] = ()


NO_COPIES = Copied()


class Growing(NamedTuple):
    """How a draft expands nodes: `width` of a request in a forward, `proposed` tokens below each, of which `width` may
    become children; no tree has more than `tree_nodes`, and path scores (natural logarithms of chances) below `floor`
    are not expanded."""

    width: int
    proposed: int
    tree_nodes: int
    floor: float


class Reading(NamedTuple):
    """The draft's side of a request: its session, the committed tokens before the root that this lacks, and how deep
    below the root it may expand. `trust`: how its values become chances. `adjusting`: the kernels' own object that
    adjusts both models' scores, or None."""

    session: Any
    missing: Sequence[int]
    most_depth: int
    trust: ScoreCalibration
    copied: Copied
    adjusting: Any = None


class Carrier(Protocol):
    """Carries out rounds of one drafter's model and the target. `copied`: the names of the sources whose copies it
    makes itself."""

    copied: Collection[str]

    def settle(self, state: Any, ids: Sequence[int], carried: Carried) -> None:
        """The walked nodes of a round have these ids: what the drafter is told of them next refers to that."""

    def carry(
        self, states: Sequence[Any], asked: Sequence[Carrying], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        """Up to so many rounds of all requests, round by round, as far as they can be carried out. The
        sessions of both models then hold what was walked, and nothing is pending."""


class Carries:
    """What a drafter offers that has a model of its own."""

    def carrier(self, target: Any) -> Carrier | None:
        """Who carries out whole rounds with this target; None: nobody."""
        return None


class Pairs:
    """What a model offers that may be a target."""

    def pair_with(self, draft: Any) -> Any:
        """What carries out whole rounds with this draft, see `models/llama/native/pair.py`; None: nothing."""
        return None
