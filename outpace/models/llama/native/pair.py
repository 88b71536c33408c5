"""A target and its draft, both by the native kernels: whole rounds of drafting and verifying in one call.

Behind a pass of a small model the host's own code is cold, for the weights have driven it out of the caches: a round
with four layers of the draft took half a millisecond of Python, as long as three of these layers. The kernels do the
same in `kernels/src/pair.cpp` and `planned_tree.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outpace.core.carried import Carried, Carrying, Forward, Growing, Layer, PassTimes, Reading
from outpace.core.types import Request
from outpace.models.llama.native.rope_tables import NativeRopeTable

MOST = 2**31 - 1  # that the kernels count to
_NO_SHARES = -1.0  # in place of what is left open


class Native(Protocol):
    """What is asked of a model of `native_runtime.py`."""

    kernels: Any
    turns: NativeRopeTable
    max_positions: int
    vocab_size: int

    def team(self) -> Any:
        """The kernels' model by which this thread's passes run."""

    def known(self) -> tuple[int, Any]:
        """How many outputs of the output layer are known tokens, and which."""


class NativePair:
    """Rounds of two models whose kernels are the same package's."""

    def __init__(self, target: Native, draft: Native) -> None:
        self._models = target, draft
        self._kernels, self._pair = target.kernels, target.kernels.Pair()
        self._sides: dict[tuple[int, int], Any] = {}

    def carry(
        self, growing: Growing, parts: Sequence[tuple[Carrying, Reading]], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        """Up to so many rounds of all requests, round by round, none of which begins when `seconds` would be exceeded,
        and none where a row of scores has no order, or a winner that is too close to call. Both models' sessions are
        told what they then hold."""
        kernels = self._kernels
        drafted = [self._drafted(asked, reading) for asked, reading in parts]
        times = kernels.PassTimes(*max((asked.ask.plan.times for asked, _ in parts), key=_reach))
        grown = kernels.Growing(growing.width, growing.tree_nodes, growing.floor)
        target, draft = map(self._side, self._models)
        done = self._pair.carry_out(target, draft, grown, growing.proposed, times, drafted, rounds, seconds)
        for (asked, reading), one in zip(parts, drafted, strict=True):
            asked.session.advance_to(one.target_length)
            reading.session.advance_to(one.draft_length)
        return [_carried(round_) for round_ in done]

    def _side(self, model: Native) -> Any:
        """A model with what its rows are read by, as it is at the moment."""
        team, turns = model.team(), model.turns.table
        key = id(team), id(turns)
        if key not in self._sides:
            held, names = model.known()
            last = model.max_positions - 1, model.vocab_size - 1
            self._sides[key] = team, turns, self._kernels.Side(team, names, held, turns, *last)
        return self._sides[key][2]

    def _drafted(self, asked: Carrying, reading: Reading) -> Any:
        tree, plan = asked.ask
        trust, noise = reading.trust, asked.noise
        given = self._kernels.Plan(
            trust.temperature,
            _NO_SHARES if trust.open is None else trust.open,
            trust.coverage,
            plan.most,
            plan.deepest,
            plan.explores,
            plan.price,
            plan.cost,
            plan.trust,
            plan.row,
            plan.least,
            plan.copied,
            plan.growth,
            plan.due,
        )
        nodes = (tree.tokens, tree.parents, tree.scores, plan.chances)
        target, draft = asked.session, reading.session
        sessions = (target.store, target.length, draft.store, draft.length)
        keyed = self._kernels.Noise(*noise)
        left, stops = min(asked.left, MOST), [token for token in asked.stops if 0 <= token <= MOST]
        end = (asked.rows, plan.follows, reading.most_depth, left, stops, *reading.copied, keyed)
        adjusting = () if reading.adjusting is None else (reading.adjusting,)  # kernels of before know none
        return self._kernels.Drafted(*sessions, reading.missing, nodes, given, *end, *adjusting)

    def copies(self, longest: int, tokens: int, branches: int, places: int, window: int, least: float) -> Any:
        """What copies from one request's text, of which it knows nothing yet."""
        made = self._kernels.Copies
        more = {"places": places} if hasattr(made, "places") else {}  # those of before look at twice the branches
        return made(longest, tokens, branches, window, least, **more)

    @property
    def adjusts(self) -> bool:
        """Whether these kernels adjust scores; those that were built before do not."""
        return hasattr(self._kernels, "Adjusting")

    def adjusting(self, request: Request) -> Any:
        """What adjusts scores as `core/adjust.py` does, of whose text it knows nothing yet."""
        asked = request.adjustments
        assert asked is not None
        penalties = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        stops = [token for token in request.stop_ids if 0 <= token < self._models[0].vocab_size]
        ends = (min(asked.min_tokens, MOST), stops, len(request.prompt))
        return self._kernels.Adjusting([*dict(asked.logit_bias).items()], *penalties, *ends)


def _reach(times: PassTimes) -> int:
    """Rows that these times tell of."""
    return len(times.seconds)


def _carried(round_: Any) -> list[Carried]:
    """What a round of the kernels gave to each request."""
    forwards = [Forward(*one) for one in round_.forwards]
    times = round_.copy_seconds, round_.target_seconds, round_.seconds
    return [_outcome(one, forwards, times) for one in round_.outcomes]


def _outcome(one: Any, forwards: Sequence[Forward], times: tuple[float, float, float]) -> Carried:
    nodes = (one.known, one.tokens, one.parents, one.scores, one.copied, one.picks, one.path)
    layers = [Layer(*layer) for layer in one.layers]
    return Carried(*nodes, layers, one.is_trial, one.is_fewer, one.picked, one.planted, forwards, *times)
