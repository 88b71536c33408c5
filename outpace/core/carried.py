"""Whole rounds that a target and its draft model run in one native call: their inputs and outputs.

A planner states what holds for the next rounds (`Plan`). The pair of models grows the tree with the draft, chooses what
to verify, verifies it, and continues with the next round, without the host in between. The arithmetic is that of the
Python path, in which a decoder takes each of these steps (`decoders/auto.py`, `planning/planner.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from outpace.core.multi_step import ScoreCalibration
from outpace.core.tree import Role, Siblings, TokenTree


class PassTimes(NamedTuple):
    """Expected times of passes by rows.

    `seconds` of rounds over 1, 2, ... rows of all requests, without drafting; `widest`: rows of the widest timed pass;
    `untimed`: whether a round over 1, 2, ... rows is wanted only to time it.
    """

    seconds: Sequence[float]
    widest: int
    untimed: Sequence[bool]


class Plan(NamedTuple):
    """What a planner decides for the next rounds of one request. Seconds are priced in tokens.

    rounds: most rounds. follows: the draft model has read all but the last round's tokens. deepest: most layers; each
    must gain more than `cost`, where `growth` by layer is its gain per probability at the leaves. explores: rounds that
    grow a first layer to measure its gain; due: by layer, whether it is grown as a trial. price: tokens that a second
    is worth. trust: exponent of the draft's probabilities. chances: acceptance of the tree's nodes; copied: the
    probability that the walk reaches a node that was in the tree before the draft grew. row: least value of a node for
    a node below it to pay; least: children with lower path scores are not added, except the best below each node. most:
    most verified nodes, the root included. copies: each round begins with copies from the text. drafts: drafting is
    expected to pay at all.
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
    """Return the plan of a request that decodes plainly while others draft."""
    times = PassTimes((0.0,), 1, ())
    return Plan(rounds, False, 0, 0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, (1.0,), (), (1.0,), times, most=1, drafts=False)


class CarryOut(NamedTuple):
    """Yielded by a decoder to run whole rounds, the first with this tree.

    It receives a list of `Carried`, one per round, which it then commits one after another; or None if nothing was run,
    and the decoder has to take each step itself.
    """

    tree: TokenTree
    plan: Plan


class Layer(NamedTuple):
    """One grown layer: the expected tokens that it added, the probability at the leaves before it, and whether it is a
    valid sample of the gain of such layers.
    """

    worth: float
    at_leaves: float
    counts: bool


class Forward(NamedTuple):
    """One forward of the draft model, shared by `requests` requests.

    `is_step`: its input was nothing but what it had proposed, for every request.
    """

    seconds: float
    requests: int
    is_step: bool


class Carried(NamedTuple):
    """One request's round. The verified nodes are those of its tree (`known`, by their numbers there), then those that
    were copied (`copied`) or grown by the draft, with `parents` by index among all of them.

    `picks`: the target's token after each; `path`: the walk. `is_trial`: the last layer was a trial; `is_fewer`: fewer
    nodes were verified than would pay. `picked`: for each walked node below which the draft proposed tokens, the values
    of the proposals and the index of the target's token, -1 for none. `planted`: for each walked node, the tokens
    copied below it and their kinds. The other fields concern all requests: `forwards`, and the seconds of the copies,
    of the target's pass and of the round.
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
        """Return the verified tree, with its new nodes attributed to these sources; `tree`, which the round began with,
        may be changed.
        """
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
    """How the kernels pick a request's tokens.

    By x / temperature plus the noise that `core/noise.py` keys by seed, choice and position, among the tokens that the
    filters of `core/sampling.py` keep; at temperature 0 by the scores x alone.
    """

    temperature: float = 0.0
    seed: int = 0
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Carrying(NamedTuple):
    """One request's input, in addition to its plan.

    The target's session, which has all tokens but the root, the rows of its last pass, the number of tokens still to
    write, the tokens that end it, and its noise.
    """

    session: Any
    ask: CarryOut
    rows: int
    left: int
    stops: Sequence[int]
    noise: Noise


class Copied(NamedTuple):
    """Copies from the text of a request: the kernels' object, and the log of how often copies are accepted, by kind."""

    copies: Any = None
    log_rates: Sequence[float] = ()


NO_COPIES = Copied()


class Growing(NamedTuple):
    """How a draft model expands nodes.

    `width` nodes of a request per forward, `proposed` tokens below each, at most `width` of them as children; at most
    `tree_nodes` per tree; nodes with path scores (log) below `floor` are not expanded.
    """

    width: int
    proposed: int
    tree_nodes: int
    floor: float


class Reading(NamedTuple):
    """The draft model's side of a request.

    Its session, the committed tokens before the root that the session lacks, and how deep below the root it may expand.
    `trust`: how its values become probabilities. `adjusting`: the kernels' object that adjusts both models' scores, or
    None.
    """

    session: Any
    missing: Sequence[int]
    most_depth: int
    trust: ScoreCalibration
    copied: Copied
    adjusting: Any = None


class Carrier(Protocol):
    """Runs whole rounds of one drafter's model and the target. `copied`: the sources whose copies it makes itself."""

    copied: Collection[str]

    def settle(self, state: Any, ids: Sequence[int], carried: Carried) -> None:
        """Assign ids to the walked nodes of a round; later observations refer to them."""

    def carry(
        self, states: Sequence[Any], asked: Sequence[Carrying], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        """Run up to `rounds` rounds of all requests, as far as possible.

        Afterwards the sessions of both models hold what was accepted, and nothing is pending.
        """


class Carries:
    """The part of a drafter that can run whole rounds."""

    def carrier(self, target: Any) -> Carrier | None:
        """Return what runs whole rounds with this target; None if nothing can."""
        return None


class Pairs:
    """The part of a model that can be the target of whole rounds."""

    def pair_with(self, draft: Any) -> Any:
        """Return what runs whole rounds with this draft model, see `models/llama/native/pair.py`.

        None if nothing can.
        """
        return None
