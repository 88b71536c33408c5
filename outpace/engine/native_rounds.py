"""Native rounds: the models' kernels run whole rounds of all requests in one call, and the engine commits them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outpace.core.carried import Carried, Carrier, Carrying, CarryOut
from outpace.core.types import Commit
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import State, TokenSequence, isolate
from outpace.models.base import Model
from outpace.planning.cost_model import CostModel

_MOST = 8  # rounds in a step
_FEW = 4  # requests: with more it is rare that all draft, and each would plan in vain
_LONGEST_REST = 64  # steps without native rounds after many failed attempts


class NativeRounds:
    """Runs native rounds where the drafter's model and the target support them; for all requests of a step or none."""

    def __init__(
        self,
        target: Model,
        scheduler: Scheduler,
        drafting: DraftRunner,
        costs: CostModel,
        burst: float,
        clock: Callable[[], float],
    ) -> None:
        """`burst`: seconds that several rounds in one step may take."""
        self._target, self._scheduler, self._drafting, self._costs = target, scheduler, drafting, costs
        self._burst, self._clock = burst, clock
        self._failures = self._rest = 0  # failed attempts in a row; steps until the next attempt
        found = {name: drafter.carrier(target) for name, drafter in drafting.drafters.items()}
        self._by_name: dict[str | None, Carrier] = {name: one for name, one in found.items() if one is not None}

    def lookup_sources(self, running: Sequence[TokenSequence]) -> Collection[str] | None:
        """Return the names of the lookup sources that native rounds include, or None where native rounds are not
        possible: they need a few requests of one drafter that have all read their texts."""
        if (
            self._rest
            or not self._by_name
            or not 0 < len(running) <= _FEW
            or running[0].draft.name not in self._by_name
        ):
            return None
        name = running[0].draft.name
        for sequence in running:
            is_ready = sequence.draft.name == name and sequence.draft.state is not None and sequence.unread <= 0
            if not is_ready or sequence.noise is None or not sequence.needs_only_tokens:
                return None
        return self._by_name[name].copied if name in self._drafting.drafters else None

    def step(self, start: float) -> list[TokenSequence]:
        """Run the step that began at `start` natively if every decoder asked for it and at least one will draft. Return
        the sequences that wrote, or [] after telling the decoders to fall back."""
        self._rest = max(self._rest - 1, 0)
        running = [sequence for sequence in self._scheduler.running if sequence.state is not State.DONE]
        asks = [(sequence, sequence.action) for sequence in running if isinstance(sequence.action, CarryOut)]
        if not asks:
            return []
        try:
            drafts = any(ask.plan.drafts for _, ask in asks)
            if drafts and len(asks) == len(running) and self.lookup_sources(running) is not None:
                slots = [(sequence, ask.plan.most) for sequence, ask in asks]
                if self._scheduler.reserve(slots) and (done := self._try(asks)):
                    self._commit(running, done, start)
                    return running
            asking = [sequence for sequence, _ in asks if sequence in self._scheduler.running]  # not paused ones
            for sequence in asking:
                sequence.advance(None)
            self._drafting.run_drafters(asking)
        except BaseException as error:
            self._scheduler.fail(running, error)
        return []

    def _try(self, asks: Sequence[tuple[TokenSequence, CarryOut]]) -> list[list[Carried]]:
        """Run native rounds. A call without result, as where every row is too close to call, does not count as time of
        a pass, and the next attempt waits longer after each."""
        began = self._clock()
        done = self._run(asks)
        if done:
            self._failures = 0
        else:
            self._drafting.spent += self._clock() - began
            self._failures += 1
            self._rest = min(2**self._failures - 1, _LONGEST_REST)
        return done

    def _run(self, asks: Sequence[tuple[TokenSequence, CarryOut]]) -> list[list[Carried]]:
        """Return the rounds of these requests, round by round; none where they are not supported."""
        self._target.limit_threads(leave=0)
        inputs, states, rounds = [], [], _MOST
        for sequence, ask in asks:
            sequence.kv.settle()
            self._drafting.notify(sequence)
            continues = (
                sequence.history.first_token and sequence.allows_several_rounds() and not self._scheduler.may_admit
            )
            rounds = min(rounds, ask.plan.rounds if continues else 1)
            assert sequence.noise is not None  # checked by `lookup_sources`
            stops, rows = list(sequence.request.stop_ids), sequence.context.rows
            inputs.append(Carrying(sequence.kv.session, ask, rows, sequence.tokens_left, stops, sequence.noise))
            states.append(sequence.draft.state)
        name = asks[0][0].draft.name
        return self._drafting.guarded(name, self._by_name[name].carry, states, inputs, rounds, self._burst) or []

    def _commit(self, sequences: Sequence[TokenSequence], done: Sequence[Sequence[Carried]], start: float) -> None:
        """Commit the rounds run since `start` one by one, sharing equally the time outside of the native call."""
        before = [len(sequence.history.steps) for sequence in sequences]
        share = (self._clock() - start - sum(row[0].seconds for row in done)) / len(done)
        for sequence, its in zip(sequences, zip(*done, strict=True), strict=True):
            sequence.advance(its)
        for number, row in enumerate(done, 1):
            for sequence, carried in zip(sequences, row, strict=True):
                if sequence.state is not State.DONE:
                    seconds = carried.seconds + share
                    isolate(sequence, self._commit_round, sequence, carried, seconds, number == len(done))
        for sequence in sequences:
            sequence.kv.is_broken = sequence.kv.is_broken or sequence.error is not None
            if sequence.state is State.DONE:  # drop what a stop or the limit cut off
                session = sequence.kv.session
                session.truncate(min(session.length, len(sequence.committed)))
        self._record_times(sequences, done, before, self._clock() - start)

    def _commit_round(self, sequence: TokenSequence, carried: Carried, seconds: float, is_last: bool) -> None:
        """Commit a sequence's verdict on a round and advance its decoder to the next round."""
        ask, now = sequence.action, self._clock()
        if not isinstance(ask, Commit):
            raise TypeError(f"a decoder answers rounds with Commit, not {type(ask).__name__}")
        tree, verdict, _ = ask
        tokens = sequence.commit(tree, verdict, len(verdict.path) - 1)
        sequence.draft.seconds += carried.copy_seconds + sum([forward.seconds for forward in carried.forwards])
        sequence.record_round(ask, len(carried.picks), len(tokens), carried.target_seconds, now - seconds, now)
        if sequence.state is State.DONE:
            return
        carrier, ids = self._by_name[sequence.draft.name], [tree.ids[node] for node in verdict.path]
        carrier.settle(sequence.draft.state, ids, carried)
        root = self._drafting.follow(sequence, tree, verdict, tokens)
        if is_last:
            sequence.end_round(root)
        else:
            sequence.advance(root)

    def _record_times(
        self,
        sequences: Sequence[TokenSequence],
        done: Sequence[Sequence[Carried]],
        before: Sequence[int],
        seconds: float,
    ) -> None:
        """Record the costs of these rounds, which took `seconds` together; `before` are the numbers of rounds that each
        sequence had. Rounds after one in which a request ended early are not recorded."""
        share = (seconds - sum(row[0].seconds for row in done)) / len(done)
        recorded = 0
        for number, row in enumerate(done):
            rows = tokens = 0
            for sequence, carried, first in zip(sequences, row, before, strict=True):
                steps = sequence.history.steps
                if sequence.error is not None or first + number >= len(steps):
                    return
                rows, tokens = rows + len(carried.picks), tokens + steps[first + number].emitted
            if 0 in before and not number and self._costs.is_timed(rows, 1):
                continue  # caches are cold in an answer's first round
            drafting = row[0].copy_seconds + sum(forward.seconds for forward in row[0].forwards)
            round_seconds = row[0].seconds + share
            self._costs.record_round(len(sequences), rows, tokens, round_seconds, drafting, is_first=not recorded)
            recorded += 1
