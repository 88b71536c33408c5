"""Continuous batching over coroutines: each step drafts for all requests at once and verifies the whole forest at once.

The engine knows tokens, not text. Requests join and leave between steps; a prompt travels in chunks with the other
requests' trees; a coroutine that raises ends its own request only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import reduce
from types import ModuleType
from typing import Any

from outpace.card.worker import DraftWorker
from outpace.core import setups
from outpace.core.drafting import NO_NEEDS, Needs
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Drafter, Request, Verify
from outpace.decoders.base import BatchRows
from outpace.engine.answer_cache import AnswerCache
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.kv_memory import KVMemory
from outpace.engine.native_rounds import NativeRounds
from outpace.engine.options import EngineOptions as EngineOptions
from outpace.engine.prefill import PrefillCostModel, Span, Unread, split_prefill_budget
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import TokenSequence, Watch, check_request, check_rule_needs, isolate
from outpace.engine.target_runner import TargetRunner, VerifyOutput, note_logprobs
from outpace.engine.timing import expect_steps, note_round
from outpace.models.base import Model, Part, chain, check_needs
from outpace.planning.cost_model import CostModel
from outpace.rules.base import FailedRow


class Engine(AbstractContextManager["Engine"]):
    """Owns the target, the drafters that work in turn, and the worker that drafts beside it.

    `submit`, `step`, `sweep` and `close` are called by one thread at a time, `abort` by any.
    """

    def __init__(
        self,
        target: Model,
        drafters: Drafter | Mapping[str, Drafter] | None = None,
        worker: DraftWorker | None = None,
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
        needs: Needs = NO_NEEDS,
    ) -> None:
        """`drafters`: one, or several by the names that requests choose them by, the first for those that choose none.
        `clock` gives the seconds that everything is timed by. `needs` are those of the rules that requests may have.
        """
        self.target = target
        self._clock = clock
        self.options = options or EngineOptions()
        self.costs = CostModel()
        named = {drafters.name: drafters} if isinstance(drafters, Drafter) else drafters or {}
        self.drafting = DraftRunner(named, worker, self.costs, clock)
        self.needs = reduce(Needs.joined, (drafter.needs for drafter in named.values()), needs)
        check_needs(target, self.needs)
        self._passes = TargetRunner(target, self.needs.layers)
        self._reading = PrefillCostModel(
            learns=target.exact
        )  # without exact mode a text's cuts may show in its near ties
        most_kept = self.options.batch if self.options.reuse else 0
        drafts = self.drafting.stored_bytes
        self.memory = KVMemory(target, drafts, self.options.nodes, self.options.kv_memory, most_kept)
        self._recall = AnswerCache() if self.options.reuse else None
        self._admission = Scheduler(self.memory, self.drafting, self.options.batch, clock, self._recall)
        self._carriers = NativeRounds(target, self._admission, self.drafting, self.costs, self.options.burst, clock)
        self._keys = itertools.count()
        expect_steps(self.costs, target, named.values())
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def waiting(self) -> Sequence[TokenSequence]:
        """Requests that wait for their turn or for memory, in the order in which they came."""
        return self._admission.waiting

    @property
    def running(self) -> Sequence[TokenSequence]:
        """Requests that take part in a step, in the order in which they came."""
        return self._admission.running

    @property
    def worker(self) -> DraftWorker | None:
        """What drafts beside the target."""
        return self.drafting.worker

    def close(self) -> None:
        """Ends all requests and the worker."""
        self._is_closed = True
        for run in [*self.running, *self.waiting]:
            self.abort(run)
        self.sweep()
        self.drafting.shut()

    def submit(
        self,
        request: Request,
        decoder: ModuleType,
        options: Any,
        watch: Watch | None = None,
        drafter: str | None = None,
    ) -> TokenSequence:
        """Takes a request in, to be drafted by the `drafter` of this name; it runs as soon as there is room. UserError
        where it can never run."""
        if self._is_closed:
            raise UserError("the engine is closed, requests need an open one")
        check_request(request, self.target)
        check_rule_needs(request, self.needs)
        if self._recall is not None and not request.prediction and (recalled := self._recall.find(request)):
            request = replace(request, recalled=recalled)
        run = TokenSequence(request, decoder, options, next(self._keys), self.costs, watch)
        run.history.submitted = self._clock()
        self.drafting.choose(run, drafter)
        self.memory.check(run)
        self._admission.waiting.append(run)
        return run

    def abort(self, run: TokenSequence, reason: str = "abort") -> None:
        """Ends a request; what it wrote stays. What it holds is given back by the next `step` or `sweep`."""
        if run.finish_reason is None:
            run.finish_reason = reason

    def sweep(self) -> list[TokenSequence]:
        """Lets the requests go that are over; gives those that had begun."""
        return self._admission.sweep()

    def step(self) -> list[TokenSequence]:
        """One round of all running requests; gives those that wrote tokens or ended."""
        start = self._clock()
        self._admission.sweep()
        joined = self._admission.join()
        self.drafting.spent = 0.0
        self._draft()
        wrote = self._carriers.step(start) or self._judge(start)
        failed = [run for run in joined if run.finish_reason is not None] if joined else joined
        return list(dict.fromkeys([*wrote, *failed, *self._admission.sweep()]))

    def _judge(self, start: float) -> list[TokenSequence]:
        """One pass over all trees and what is to be read of texts: those that wrote."""
        drafting = self.drafting.spent  # planning is no part of it: it costs as rows do, a round that has them
        before = setups.count
        chunks, trees = self._parts()
        try:
            passes = self._round(chunks, trees, start)
            if setups.count == before:
                note_round(self.costs, chunks, trees, drafting, self._clock() - start, passes)
        except BaseException as error:
            self._admission.fail([run for run, _ in [*chunks, *trees]], error)
        return [run for run, _ in trees]

    def _draft(self) -> None:
        """Lets every request begin its round, and grows trees until all ask for the target's judgement."""
        try:
            running, load = self._admission.running, BatchRows()
            carries = self._carriers.may_carry(running)
            for run in running:
                self._allot(run, load, len(running))
                run.place.carries = carries
            for run in running:
                run.begin_round()
            self.drafting.serve(running)
        except BaseException as error:  # a coroutine that was interrupted is over
            self._admission.fail(self.running, error)

    def _round(
        self,
        chunks: Sequence[tuple[TokenSequence, Part]],
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        start: float,
    ) -> int:
        """One pass over prompts' chunks and requests' trees, and what follows from it for each; or as many passes as it
        says, where all write plainly."""
        if not chunks and not trees:
            return 0
        # A prompt is far more for the target to read than for the drafter: the target has all cores meanwhile.
        self.target.limit_threads(leave=0 if chunks else self.drafting.cores)
        began, before = self._clock(), setups.count
        reads, judged = self._passes.run(chunks, trees, self.drafting.beside)
        passes = 1
        if self.options.burst and (most := self._most_more(chunks, trees, self._clock() - began)):
            passes += self._passes.go_on(trees, judged, most)
        seconds = self._clock() - began
        if chunks and setups.count == before:
            spans = [Span(len(part.tokens), run.storage.session.length) for run, part in chunks]
            self._reading.learn([*spans, *(Span(len(tree), len(run.committed)) for run, tree in trees)], seconds)
        for (run, part), read in zip(chunks, reads, strict=True):
            self.drafting.read(run, read.seen)
            run.read(read.logits, part.tokens)
            run.is_due = run.ask is None and not run.is_prefilling
        asking = []
        for (run, _), its in zip(trees, judged, strict=True):
            run.storage.keep = ()
            isolate(run, self._hand, run, its)
            asking.append(run)
        self.drafting.serve(asking)
        for its in judged:
            if its.logits is not None:
                note_logprobs(asking, judged)
                break
        for run, its in zip(asking, judged, strict=True):
            if isinstance(run.ask, Commit):
                isolate(run, self._commit, run, its, passes, seconds, start)
            elif run.ask is not None and not isinstance(run.ask, Verify):  # which asks for another pass
                run.fail(TypeError(f"a decoder answers picks with Commit, not {type(run.ask).__name__}"))
        return passes

    def _most_more(
        self,
        chunks: Sequence[tuple[TokenSequence, Part]],
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        seconds: float,
    ) -> int:
        """How many plain passes may follow this one, which took so long: within `burst`, where all write plainly and
        nobody waits for a first token, or for every one."""
        most = int(self.options.burst / seconds) - 1 if seconds else 0
        for run, _ in trees:
            if most < 1 or not isinstance(run.ask, Verify) or not run.ask.more:  # as in every round with drafts
                return 0
            if not run.history.first_token or not (run.picks_by_score and run.may_go_on()):
                return 0
            session = run.storage.session
            most = min(most, run.ask.more, run.left - 1, session.slots - session.length - session.pending)
        return 0 if chunks or self.worker is not None or self._admission.may_join else most

    @staticmethod
    def _hand(run: TokenSequence, judged: VerifyOutput) -> None:
        """Hands a request its picks."""
        if isinstance(judged.picks[0], FailedRow):
            raise judged.picks[0].error
        run.advance(judged.picks)

    def _commit(self, run: TokenSequence, judged: VerifyOutput, passes: int, seconds: float, start: float) -> None:
        """Carries out a request's verdict, of so many passes: of several where all of them were plain."""
        ask, rows = run.ask, len(judged.picks)
        assert isinstance(ask, Commit)
        tree, verdict, _ = ask
        tokens = run.commit(tree, verdict, len(verdict.path) - 1 if passes == 1 else 0)
        path = verdict.path  # a late node has no keys yet
        run.storage.keep = path if path[-1] < rows else [node for node in path if node < rows]
        if passes > 1:
            run.note_plain(len(tokens), passes, target_seconds=seconds, start=start, now=self._clock())
        else:
            run.note_step(ask, rows, len(tokens), target_seconds=seconds, start=start, now=self._clock())
        if run.finish_reason is None:
            run.root = self.drafting.follow(run, tree, verdict, tokens, judged.seen)
            run.is_due, run.ask = True, None

    def _allot(self, run: TokenSequence, load: BatchRows, requests: int) -> None:
        """Tells a request how much room there is for it beside the others, and counts it with the load."""
        place, options = run.place, self.options
        most = min(options.nodes, run.request.nodes or options.nodes)
        place.budget = max(1, min(most, options.rows // requests))
        place.requests, place.load, place.rows, place.left = requests, load, run.rows, run.left
        load.rows += place.rows

    def _parts(self) -> tuple[list[tuple[TokenSequence, Part]], list[tuple[TokenSequence, TokenTree]]]:
        """Pieces of texts, and trees, that go through the pass, with slots for all of them."""
        while True:
            chunks = self._chunks()
            counts = {run: len(part.tokens) for run, part in chunks} if chunks else {}
            trees, rows = [], []
            for run in self._admission.running:
                if run.finish_reason is None and isinstance(run.ask, Verify) and not run.is_prefilling:
                    trees.append((run, run.ask.tree))
                    rows.append((run, len(run.ask.tree)))
                elif run in counts:
                    rows.append((run, counts[run]))
            if self._admission.fit(rows):
                return chunks, trees

    def _chunks(self) -> list[tuple[TokenSequence, Part]]:
        """The next piece of each text that is not in yet, within the pass's room for prompts."""
        running = [run for run in self._admission.running if run.finish_reason is None]
        reading = [run for run in running if run.is_prefilling]
        if not reading:
            return []
        is_awaited = any(not run.is_prefilling and not run.history.first_token for run in running)
        unread = [Unread(run.unread, run.prefilled) for run in reading]
        slope = self._reading.slope if len(running) > 1 else 0.0  # alone it keeps nobody waiting
        shares = split_prefill_budget(unread, self.options.chunk, slope, is_awaited)
        chunks = []
        for run, share in zip(reading, shares, strict=True):
            if share:
                tokens = run.committed[run.prefilled : run.prefilled + share]
                wanted = range(len(tokens)) if run.reports_prompt else ()
                chunks.append((run, chain(run.storage.session, tokens, wanted, run.storage.keep)))
        return chunks
