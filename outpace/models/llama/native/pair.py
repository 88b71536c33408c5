"""A target and its draft model, both run by the native kernels: whole rounds of drafting and verifying in one call.

After a pass of a small model the host's own code is cold, because the weights have displaced it from the caches: a
round with four draft layers took half a millisecond of Python, as long as three of these layers. The kernels do the
same work in `kernels/src/pair.cpp` and `planned_tree.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outpace.core.carried import Carried, Carrying, Forward, Growing, Layer, Reading
from outpace.core.types import Request
from outpace.models.llama.native.rope_tables import NativeRopeTable

MOST = 2**31 - 1  # the largest integer of the kernels
_NO_SHARES = -1.0  # the kernels' value for an unknown `open` of a calibration


class NativeModel(Protocol):
    """The parts of `NativeLlama` that a pair uses."""

    kernels: Any
    rope_table: NativeRopeTable
    max_positions: int
    vocab_size: int

    def model_for_thread(self) -> Any:
        """Return the kernels' model that runs this thread's passes."""

    def output_vocab(self) -> tuple[int, Any]:
        """Return the number of output rows that are known tokens, and their ids."""


class NativePair:
    """Runs rounds of two native models."""

    def __init__(self, target: NativeModel, draft: NativeModel) -> None:
        self._models = target, draft
        self._kernels, self._pair = target.kernels, target.kernels.Pair()
        self._sides: dict[tuple[int, int], Any] = {}

    def carry(
        self, growing: Growing, parts: Sequence[tuple[Carrying, Reading]], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        """Run up to `rounds` rounds of all requests and update both models' sessions.

        No round begins that would exceed `seconds`; rounds stop at a row of logits that has no order (nan) or whose
        winner is too close to call.
        """
        kernels = self._kernels
        drafted = [self._drafted(asked, reading) for asked, reading in parts]
        times = kernels.PassTimes(
            *max((asked.ask.plan.times for asked, _ in parts), key=lambda times: len(times.seconds))
        )
        grown = kernels.Growing(growing.width, growing.tree_nodes, growing.floor)
        target, draft = map(self._side, self._models)
        done = self._pair.carry_out(target, draft, grown, growing.proposed, times, drafted, rounds, seconds)
        for (asked, reading), one in zip(parts, drafted, strict=True):
            asked.session.advance_to(one.target_length)
            reading.session.advance_to(one.draft_length)
        return [_round_results(round_) for round_ in done]

    def _side(self, model: NativeModel) -> Any:
        """Return the kernels' view of a model with its current rotary table."""
        worker, table = model.model_for_thread(), model.rope_table.table
        key = id(worker), id(table)
        if key not in self._sides:
            count, ids = model.output_vocab()
            last = model.max_positions - 1, model.vocab_size - 1
            self._sides[key] = worker, table, self._kernels.Side(worker, ids, count, table, *last)
        return self._sides[key][2]

    def _drafted(self, asked: Carrying, reading: Reading) -> Any:
        tree, plan = asked.ask
        trust = reading.trust
        kernel_plan = self._kernels.Plan(
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
        left, stops = min(asked.left, MOST), [token for token in asked.stops if 0 <= token <= MOST]
        noise = self._kernels.Noise(*asked.noise)
        end = (asked.rows, plan.follows, reading.most_depth, left, stops, *reading.copied, noise, reading.adjusting)
        return self._kernels.Drafted(*sessions, reading.missing, nodes, kernel_plan, *end)

    def copies(self, longest: int, tokens: int, branches: int, places: int, window: int, least: float) -> Any:
        """Create a lookup drafter for one request, whose text it does not know yet."""
        return self._kernels.Copies(longest, tokens, branches, window, least, places=places)

    def adjusting(self, request: Request) -> Any:
        """Create what adjusts logits as `core/adjust.py` does, for a request whose text it does not know yet."""
        asked = request.adjustments
        assert asked is not None
        penalties = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        stops = [token for token in request.stop_ids if 0 <= token < self._models[0].vocab_size]
        ends = (min(asked.min_tokens, MOST), stops, len(request.prompt))
        return self._kernels.Adjusting([*dict(asked.logit_bias).items()], *penalties, *ends)


def _round_results(round_: Any) -> list[Carried]:
    """Convert a round's results, one for each request."""
    forwards = [Forward(*one) for one in round_.forwards]
    times = round_.copy_seconds, round_.target_seconds, round_.seconds
    results = []
    for one in round_.outcomes:
        nodes = (one.known, one.tokens, one.parents, one.scores, one.copied, one.picks, one.path)
        layers = [Layer(*layer) for layer in one.layers]
        results.append(Carried(*nodes, layers, one.is_trial, one.is_fewer, one.picked, one.planted, forwards, *times))
    return results
