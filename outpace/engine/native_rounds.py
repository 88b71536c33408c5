"""Whole rounds of all requests, carried out by the models' own kernels where these can, and committed one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outpace.core.carried import Carried, Carrier, Carrying, CarryOut
from outpace.core.types import Commit
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import TokenSequence, isolate
from outpace.engine.timing import note_carried
from outpace.models.base import Model
from outpace.planning.cost_model import CostModel

_MOST = 8  # rounds in a step
_FEW = 4  # requests: of more, seldom all draft, and each would plan in vain
_LONGEST_REST = 64  # steps without whole rounds where these are tried in vain


class NativeRounds:
    """Who carries out rounds, by the name of the drafter. All requests of a step are carried, or none."""

    def __init__(
        self,
        target: Model,
        admission: Scheduler,
        drafting: DraftRunner,
        costs: CostModel,
        burst: float,
        clock: Callable[[], float],
    ) -> None:
        """`burst`: seconds that several rounds in one step may take."""
        self._target, self._admission, self._drafting, self._costs = target, admission, drafting, costs
        self._burst, self._clock = burst, clock
        self._failures = self._rest = 0  # calls in a row that gave nothing; steps that go without one
        found = {name: drafter.carrier(target) for name, drafter in drafting.drafters.items()}
        self._by_name: dict[str | None, Carrier] = {name: one for name, one in found.items() if one is not None}

    def may_carry(self, running: Sequence[TokenSequence]) -> Collection[str] | None:
        """Whether requests that write together may ask for whole rounds: a few, by one drafter, none while a text is
        read. The sources whose copies are made in these; None: they may not."""
        if (
            self._rest
            or not self._by_name
            or not 0 < len(running) <= _FEW
            or running[0].draft.name not in self._by_name
        ):
            return None
        name = running[0].draft.name
        for run in running:
            is_ready = run.draft.name == name and run.draft.state is not None and not run.is_prefilling
            if not is_ready or run.noise is None or not run.is_bare:
                return None
        return self._by_name[name].copied if name in self._drafting.drafters else None

    def step(self, start: float) -> list[TokenSequence]:
        """One step that began at `start`, where all requests ask for whole rounds, somebody is to draft in these, and
        they can be carried out: those that wrote. Else none, and nobody asks for whole rounds any more."""
        self._rest = max(self._rest - 1, 0)
        running = [run for run in self._admission.running if run.finish_reason is None]
        asks = [(run, run.ask) for run in running if isinstance(run.ask, CarryOut)]
        if not asks:
            return []
        try:
            drafts = any(ask.plan.drafts for _, ask in asks)
            if drafts and len(asks) == len(running) and self.may_carry(running) is not None:
                slots = [(run, ask.plan.most) for run, ask in asks]
                if self._admission.fit(slots) and (done := self._tried(asks)):
                    self._commit(running, done, start)
                    return running
            asking = [run for run, _ in asks if run in self._admission.running]  # one that was paused asks later
            for run in asking:
                run.advance(None)
            self._drafting.serve(asking)
        except BaseException as error:
            self._admission.fail(running, error)
        return []

    def _tried(self, asks: Sequence[tuple[TokenSequence, CarryOut]]) -> list[list[Carried]]:
        """As `_carry`. What gives nothing, as where every row is too close to call, is tried again ever later, and its
        time is none of a pass's."""
        began = self._clock()
        done = self._carry(asks)
        if done:
            self._failures = 0
        else:
            self._drafting.spent += self._clock() - began
            self._failures += 1
            self._rest = min(2**self._failures - 1, _LONGEST_REST)
        return done

    def _carry(self, asks: Sequence[tuple[TokenSequence, CarryOut]]) -> list[list[Carried]]:
        """What these requests ask for, round by round; none where it cannot be carried out."""
        self._target.limit_threads(leave=0)
        asked, states, rounds = [], [], _MOST
        for run, ask in asks:
            run.storage.settle()
            self._drafting.tell(run)
            goes_on = run.history.first_token and run.may_go_on() and not self._admission.may_join
            rounds = min(rounds, ask.plan.rounds if goes_on else 1)
            assert run.noise is not None  # or it may not be carried
            stops = list(run.request.stop_ids)
            asked.append(Carrying(run.storage.session, ask, run.place.rows, run.left, stops, run.noise))
            states.append(run.draft.state)
        name = asks[0][0].draft.name
        return self._drafting.guarded(name, self._by_name[name].carry, states, asked, rounds, self._burst) or []

    def _commit(self, asking: Sequence[TokenSequence], done: Sequence[Sequence[Carried]], start: float) -> None:
        """Writes what was carried out since `start`, round after round; each has its share of the time that was none of
        theirs."""
        before = [len(run.history.steps) for run in asking]
        share = (self._clock() - start - sum(row[0].seconds for row in done)) / len(done)
        for run, mine in zip(asking, zip(*done, strict=True), strict=True):
            run.advance(mine)
        for number, row in enumerate(done, 1):
            for run, carried in zip(asking, row, strict=True):
                if run.finish_reason is None:
                    isolate(run, self._write, run, carried, carried.seconds + share, number == len(done))
        for run in asking:
            run.storage.is_broken = run.storage.is_broken or run.error is not None
            if run.finish_reason is not None:  # what a stop or the limit cut off is not kept
                session = run.storage.session
                session.truncate(min(session.length, len(run.committed)))
        note_carried(self._costs, asking, done, before, self._clock() - start)

    def _write(self, run: TokenSequence, carried: Carried, seconds: float, is_last: bool) -> None:
        """Carries out a request's verdict on a round, and lets its coroutine go on to the next one."""
        ask, now = run.ask, self._clock()
        if not isinstance(ask, Commit):
            raise TypeError(f"a decoder answers rounds with Commit, not {type(ask).__name__}")
        tree, verdict, _ = ask
        tokens = run.commit(tree, verdict, len(verdict.path) - 1)
        run.draft.seconds += carried.copy_seconds + sum([forward.seconds for forward in carried.forwards])
        run.note_step(ask, len(carried.picks), len(tokens), carried.target_seconds, now - seconds, now)
        if run.finish_reason is not None:
            return
        carrier, ids = self._by_name[run.draft.name], [tree.ids[node] for node in verdict.path]
        carrier.settle(run.draft.state, ids, carried)
        root = self._drafting.follow(run, tree, verdict, tokens)
        if is_last:
            run.root, run.is_due, run.ask = root, True, None
        else:
            run.advance(root)
