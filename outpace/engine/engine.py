"""Continuous batching over coroutines: each step drafts for all requests at once and verifies the whole forest at once.

The engine knows tokens, not text. Requests join and leave between steps; a prompt travels in chunks with the other
requests' trees; a coroutine that raises ends its own request only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from outpace.candidates.base import Worker
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Drafter, Request, Row, Verify, tree_rows
from outpace.decoders._costs import Costs
from outpace.engine.admission import Admission
from outpace.engine.drafting import Drafting
from outpace.engine.memory import Memory
from outpace.engine.options import EngineOptions as EngineOptions
from outpace.engine.request import Running, Watch, check_request
from outpace.engine.sharing import share_prompt_room
from outpace.engine.timing import expect_steps, note_round
from outpace.models.base import Model, Part, chain
from outpace.rules.base import Fault, reduce_apart


class _Judged(NamedTuple):
    """One tree after the pass: the rule's reduced rows, whose they are, and, where they are reported, their scores."""

    picks: list[Any]
    rows: list[Row]
    logits: Tensor | None  # [rows, vocab]


class Engine(AbstractContextManager["Engine"]):
    """Owns the target, the drafters that work in turn, and the worker that drafts beside it.

    `submit`, `step`, `sweep` and `close` are called by one thread at a time, `abort` by any.
    """

    def __init__(
        self,
        target: Model,
        drafters: Drafter | Mapping[str, Drafter] | None = None,
        worker: Worker | None = None,
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafters`: one, or several by the names that requests choose them by, the first for those that choose none.
        `clock` gives the seconds that everything is timed by."""
        self.target = target
        self._clock = clock
        self.options = options or EngineOptions()
        self.costs = Costs()
        named = {drafters.name: drafters} if isinstance(drafters, Drafter) else drafters or {}
        self.drafting = Drafting(named, worker, self.costs, clock)
        most_kept = self.options.batch if self.options.reuse else 0
        self.memory = Memory(target, self.options.nodes, self.options.kv_memory, most_kept)
        self._admission = Admission(self.memory, self.drafting, self.options.batch, clock)
        self._keys = itertools.count()
        expect_steps(self.costs, target, named.values())
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def waiting(self) -> Sequence[Running]:
        """Requests that wait for their turn or for memory, in the order in which they came."""
        return self._admission.waiting

    @property
    def running(self) -> Sequence[Running]:
        """Requests that take part in a step, in the order in which they came."""
        return self._admission.running

    @property
    def worker(self) -> Worker | None:
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
    ) -> Running:
        """Takes a request in, to be drafted by the `drafter` of this name; it runs as soon as there is room. UserError
        where it can never run."""
        if self._is_closed:
            raise UserError("the engine is closed, requests need an open one")
        check_request(request, self.target)
        self.memory.check(request)
        run = Running(request, decoder, options, next(self._keys), self.costs, watch)
        run.history.submitted = self._clock()
        self.drafting.choose(run, drafter)
        self._admission.waiting.append(run)
        return run

    def abort(self, run: Running, reason: str = "abort") -> None:
        """Ends a request; what it wrote stays. What it holds is given back by the next `step` or `sweep`."""
        if run.finish_reason is None:
            run.finish_reason = reason

    def sweep(self) -> list[Running]:
        """Lets the requests go that are over; gives those that had begun."""
        return self._admission.sweep()

    def step(self) -> list[Running]:
        """One round of all running requests; gives those that wrote tokens or ended."""
        start = self._clock()
        self.sweep()
        joined = self._admission.join()
        self._draft()
        drafted = self._clock()
        chunks, trees = self._parts()
        try:
            self._round(chunks, trees, start)
            note_round(self.costs, chunks, trees, drafted - start, self._clock() - start)
        except BaseException as error:
            self._admission.fail([run for run, _ in [*chunks, *trees]], error)
        failed = [run for run in joined if run.finish_reason is not None]
        return list(dict.fromkeys([*(run for run, _ in trees), *failed, *self.sweep()]))

    def _draft(self) -> None:
        """Lets every request begin its round, and grows trees until all ask for the target's judgement."""
        try:
            for run in self.running:
                self._allot(run)
            for run in self.running:
                run.begin_round()
            self.drafting.serve(self.running)
        except BaseException as error:  # a coroutine that was interrupted is over
            self._admission.fail(self.running, error)

    def _round(
        self, chunks: Sequence[tuple[Running, Part]], trees: Sequence[tuple[Running, TokenTree]], start: float
    ) -> None:
        """One pass over prompts' chunks and requests' trees, and what follows from it for each."""
        forest = [part for _, part in chunks]
        forest += [Part(run.session, tuple(t.tokens), tuple(t.parents), range(len(t)), run.keep) for run, t in trees]
        if not forest:
            return
        rows: list[Row] = []  # made now: CARD appends late children
        for run, tree in trees:
            rows += tree_rows(run.request, run.committed, tree)
        began = self._clock()
        logits, picks = self._pass(forest, rows)
        seconds = self._clock() - began
        first = 0
        for run, part in chunks:
            run.read(logits[first : first + len(part.wanted)], part.tokens)
            first += len(part.wanted)
            run.is_due = run.ask is None and not run.is_prefilling
        before = first
        for (run, _), part in zip(trees, forest[len(chunks) :], strict=True):
            end = first + len(part.wanted)
            mine = slice(first - before, end - before)
            scores = logits[first:end] if run.request.logprobs else None
            run.keep = ()
            self._settle(run, _Judged(picks[mine], rows[mine], scores), seconds, start)
            first = end

    def _pass(self, forest: Sequence[Part], rows: Sequence[Row]) -> tuple[Tensor, list[Any]]:
        """The target's pass and the rules' first half, with the worker's drafter beside it."""
        before = sum(len(part.wanted) for part in forest) - len(rows)  # rows of prompts, which are reported

        def target_pass() -> tuple[Tensor, list[Any]]:
            logits = self.target.score(forest)
            return logits, reduce_apart(logits[before:] if before else logits, rows) if rows else []

        return self.drafting.beside(target_pass, sum(len(part.tokens) for part in forest))

    def _settle(self, run: Running, judged: _Judged, seconds: float, start: float) -> None:
        """Hands a request its picks and commits its verdict. A fault in its rule, its options or who watches it ends
        this request alone."""
        try:
            if isinstance(judged.picks[0], Fault):
                raise judged.picks[0].error
            self._commit(run, judged, seconds, start)
        except Exception as error:
            run.is_broken = True
            run.fail(error)

    def _commit(self, run: Running, judged: _Judged, seconds: float, start: float) -> None:
        run.advance(judged.picks)
        if run.finish_reason is not None:
            return
        if not isinstance(run.ask, Commit):
            run.fail(TypeError(f"a decoder answers picks with Commit, not {type(run.ask).__name__}"))
            return
        ask, rows = run.ask, len(judged.rows)
        tree, verdict, _ = ask
        if judged.logits is not None:
            run.note_logprobs(tree, verdict, judged.rows, judged.logits)
        tokens = run.commit(tree, verdict)
        run.keep = [node for node in verdict.path if node < rows]
        run.note_step(ask, rows, len(tokens), target_seconds=seconds, start=start, now=self._clock())
        if run.finish_reason is None:
            run.root = TokenTree(run.committed[-1], root_id=tree.next_id, next_id=tree.next_id + 1)
            run.is_due, run.ask = True, None
            self.drafting.observe(run, tree, verdict, tokens, run.root)

    def _allot(self, run: Running) -> None:
        """Tells a request how much room the load leaves it."""
        place = run.place
        place.requests = len(self.running)
        most = min(self.options.nodes, run.request.nodes or self.options.nodes)
        place.budget = max(1, min(most, self.options.rows // place.requests))
        place.rows_of_others = sum(other.rows for other in self.running) - run.rows
        place.left = run.left

    def _parts(self) -> tuple[list[tuple[Running, Part]], list[tuple[Running, TokenTree]]]:
        """Pieces of texts, and trees, that go through the pass, with slots for all of them."""
        while True:
            chunks = self._chunks()
            writing = [run for run in self.running if not run.is_prefilling and run.finish_reason is None]
            trees = [(run, run.ask.tree) for run in writing if isinstance(run.ask, Verify)]
            rows = [(run, len(part.tokens)) for run, part in chunks] + [(run, len(tree)) for run, tree in trees]
            if self._admission.fit(rows):
                return chunks, trees

    def _chunks(self) -> list[tuple[Running, Part]]:
        """The next piece of each text that is not in yet, within the pass's room for prompts."""
        reading = [run for run in self.running if run.is_prefilling and run.finish_reason is None]
        shares = share_prompt_room([run.unread for run in reading], self.options.chunk)
        chunks = []
        for run, share in zip(reading, shares, strict=True):
            if share:
                tokens = run.committed[run.prefilled : run.prefilled + share]
                wanted = range(len(tokens)) if run.reports_prompt else ()
                chunks.append((run, chain(run.session, tokens, wanted, run.keep)))
        return chunks
