"""Continuous batching over coroutines: each step drafts for all requests at once and verifies the whole forest at once.

The engine knows tokens, not text. Requests join and leave between steps; a prompt travels in chunks with the other
requests' trees; a coroutine that raises ends its own request only.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from outpace.candidates.base import Worker
from outpace.candidates.cache import CandidateCache
from outpace.core.errors import UserError, check_whole
from outpace.core.tree import TokenTree, depths
from outpace.core.types import (
    Await,
    Commit,
    Draft,
    Drafter,
    Observation,
    Request,
    Row,
    Verdict,
    Verify,
)
from outpace.models.base import Model, Part, chain
from outpace.rules.base import reduce_rows
from outpace.running import Running, check_request

T = TypeVar("T")


@dataclass(frozen=True)
class EngineOptions:
    """`nodes` a request's tree may have in one pass, the root included, and `rows` all trees together; `chunk` prompt
    tokens a pass; `batch` requests running at once, the others wait."""

    nodes: int = 8
    rows: int = 64
    chunk: int = 256
    batch: int = 16

    def __post_init__(self) -> None:
        check_whole("nodes", self.nodes, 1, 4096)
        check_whole("rows", self.rows, 1, 65536)
        check_whole("chunk", self.chunk, 1, 65536)
        check_whole("batch", self.batch, 1, 4096)


class Engine(AbstractContextManager["Engine"]):
    """Owns the target, the drafter that works in turn, and the worker that drafts beside it. One thread calls it."""

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        worker: Worker | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.target, self.drafter, self.worker = target, drafter, worker
        self.options = options or EngineOptions()
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._keys = itertools.count()
        self._offers = {name for name, part in (("drafter", drafter), ("worker", worker)) if part is not None}
        self._warned = False
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all requests and the worker."""
        self._is_closed = True
        for run in [*self.running, *self.waiting]:
            self.abort(run)
        if self.worker:
            self.worker.close()

    def submit(self, request: Request, decoder: ModuleType, options: Any) -> Running:
        """Takes a request in; it runs as soon as there is room. UserError where it can never run."""
        if self._is_closed:
            raise UserError("the engine is closed, requests need an open one")
        check_request(request, self.target)
        if decoder.NEEDS and decoder.NEEDS not in self._offers:
            name = decoder.__name__.rpartition(".")[2]
            raise UserError(f"method {name} needs a drafter, this engine has none to run for it")
        run = Running(request, decoder, options, next(self._keys))
        self.waiting.append(run)
        return run

    def abort(self, run: Running, reason: str = "abort") -> None:
        """Ends a request at once; what it wrote stays."""
        if run.finish_reason is None:
            run.finish_reason = reason
        if run in self.waiting:
            self.waiting.remove(run)
        if run in self.running:
            self._leave(run)

    def step(self) -> list[Running]:
        """One round of all running requests; gives those that wrote tokens or ended."""
        start = time.perf_counter()
        joined = []
        while self.waiting and len(self.running) < self.options.batch:
            joined.append(self.waiting.popleft())
            self._join(joined[-1])
        for run in self.running:
            run.budget = self._share()
        self._serve_drafts()
        chunks = self._chunks()
        trees = [(run, run.ask.tree) for run in self.running if isinstance(run.ask, Verify)]
        try:
            self._round(chunks, trees, start)
        except BaseException as error:
            self._fail([run for run, _ in [*chunks, *trees]], error)
        ended = [run for run in dict.fromkeys([*joined, *self.running]) if run.finish_reason is not None]
        for run in ended:
            self._leave(run)
        return list(dict.fromkeys([*(run for run, _ in trees), *ended]))

    def _round(
        self, chunks: Sequence[tuple[Running, Part]], trees: Sequence[tuple[Running, TokenTree]], start: float
    ) -> None:
        """One pass over prompts' chunks and requests' trees, and what follows from it for each."""
        forest = [part for _, part in chunks]
        forest += [Part(run.session, tuple(t.tokens), tuple(t.parents), range(len(t)), run.keep) for run, t in trees]
        if not forest:
            return
        rows = [Row(run.request, run.length + depth) for run, tree in trees for depth in depths(tree.parents)]
        sizes = [len(tree) for _, tree in trees]  # taken now: CARD appends late children
        began = time.perf_counter()
        picks = iter(self._pass(forest, rows))
        seconds = time.perf_counter() - began
        for run, part in chunks:
            run.prefilled += len(part.tokens)
            run.keep = range(len(part.tokens))
            if not run.is_prefilling:
                self._advance(run, None)
        for (run, _), size in zip(trees, sizes, strict=True):
            self._settle(run, list(itertools.islice(picks, size)), seconds, start)

    def _share(self) -> int:
        """Nodes that each running request may have in a pass."""
        return max(1, min(self.options.nodes, self.options.rows // len(self.running)))

    def _join(self, run: Running) -> None:
        """Opens the sessions of a request that begins; its coroutine starts after the prompt is in."""
        try:
            self._open(run)
        except BaseException as error:
            self._fail([run], error)

    def _open(self, run: Running) -> None:
        request = run.request
        capacity = min(len(request.prompt) + request.max_tokens, self.target.max_positions)
        run.session = self.target.open(capacity, max(self.options.chunk, self.options.nodes))
        if run.decoder.NEEDS == "worker" and self.worker:
            run.candidates = CandidateCache(request.prompt[-1])
            run.correct = partial(self.worker.correct, run.key)
            self.worker.open(run.key, request, run.candidates)
        elif run.decoder.NEEDS == "drafter" and self.drafter:
            run.draft_state = self._guarded(partial(self.drafter.open, request))
        run.coroutine = run.decoder.decode(run, run.options)
        self.running.append(run)
        run.budget = self._share()
        if not run.is_prefilling:
            self._advance(run, None)

    def _fail(self, runs: Sequence[Running], error: BaseException) -> None:
        """A round broke off: what its sessions hold is unknown, so all its requests end; each keeps what it wrote."""
        for run in runs:
            if run.finish_reason is None:
                run.error = error if isinstance(error, Exception) else None
                run.finish_reason = "error" if run.error else "abort"
        if not isinstance(error, Exception):  # an interrupt is the caller's
            for run in runs:
                self.abort(run)
            raise error

    def _leave(self, run: Running) -> None:
        if run in self.running:
            self.running.remove(run)
        if run.coroutine:
            run.coroutine.close()
        if run.draft_state is not None and self.drafter:
            self._guarded(partial(self.drafter.close, run.draft_state))
        if run.decoder.NEEDS == "worker" and self.worker:
            self.worker.forget(run.key)

    def _chunks(self) -> list[tuple[Running, Part]]:
        """The next piece of each prompt that is not in yet, within the pass's room for prompts."""
        room = self.options.chunk
        chunks = []
        for run in self.running:
            if run.is_prefilling and room:
                prompt = run.request.prompt[:-1]
                tokens = prompt[run.prefilled : run.prefilled + room]
                chunks.append((run, chain(run.session, tokens, keep=run.keep)))
                room -= len(tokens)
        return chunks

    def _serve_drafts(self) -> None:
        """Answers Draft and Await until every coroutine asks for Verify; the drafter sees all trees at once."""
        while True:
            drafting = [run for run in self.running if isinstance(run.ask, Draft)]
            waiting = [run for run in self.running if isinstance(run.ask, Await)]
            if not drafting and not waiting:
                return
            for run, added in zip(drafting, self._grow(drafting), strict=True):
                self._advance(run, added)
            for run in waiting:
                if self.worker and self.worker.failure is None and isinstance(run.ask, Await):
                    self.worker.wait(run.candidates, run.ask.layers)
                self._advance(run, None)

    def _grow(self, runs: Sequence[Running]) -> list[int]:
        began = time.perf_counter()
        added = None
        if runs and self.drafter:
            trees = [run.ask.tree for run in runs if isinstance(run.ask, Draft)]
            added = self._guarded(partial(self.drafter.grow, [run.draft_state for run in runs], trees))
        for run in runs:
            run.draft_seconds += time.perf_counter() - began
        return added or [0] * len(runs)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """What the drafter answers; one that raises is given up, with one warning, and decoding goes on plainly."""
        try:
            return call()
        except Exception as failure:
            self._warn(failure)
            self.drafter = None
            return None

    def _pass(self, forest: Sequence[Part], rows: Sequence[Row]) -> list[int]:
        """The target's pass and the rules' first half, with the worker's drafter beside it."""

        def target_pass() -> list[int]:
            logits = self.target.score(forest)
            return reduce_rows(logits, rows) if rows else []

        if self.worker is None:
            return target_pass()
        picks = self.worker.beside(target_pass, sum(len(part.tokens) for part in forest))
        if self.worker.failure is not None:
            self._warn(self.worker.failure)
        return picks

    def _advance(self, run: Running, answer: Any) -> None:
        """Sends a coroutine its answer and notes what it asks for next."""
        assert run.coroutine is not None
        try:
            run.ask = run.coroutine.send(answer)
        except Exception as error:
            run.error, run.finish_reason, run.ask = error, "error", None

    def _settle(self, run: Running, picks: Sequence[int], seconds: float, start: float) -> None:
        """Hands a request its picks, commits its verdict, and lets it ask again."""
        self._advance(run, picks)
        if run.finish_reason is not None:
            return
        if not isinstance(run.ask, Commit):
            run.error = TypeError(f"a decoder answers picks with Commit, not {type(run.ask).__name__}")
            run.finish_reason = "error"
            return
        tree, verdict, hit = run.ask
        rows = len(picks)
        tokens = run.commit(tree, verdict)
        run.keep = [node for node in verdict.path if node < rows]
        times = {"draft_seconds": run.draft_seconds, "target_seconds": seconds, "seconds": time.perf_counter() - start}
        run.record(tree, verdict, rows, len(tokens), hit=hit, **times)
        run.draft_seconds = 0.0
        if run.finish_reason is None:
            root = TokenTree(run.last_token, root_id=tree.next_id, next_id=tree.next_id + 1)
            self._observe(run, tree, verdict, tokens, root)
            self._advance(run, root)

    def _observe(self, run: Running, tree: TokenTree, verdict: Verdict, tokens: Sequence[int], root: TokenTree) -> None:
        if run.draft_state is not None and self.drafter:
            path = verdict.path if verdict.next_token is not None else verdict.path[:-1]  # a late end is the new root
            seen = Observation([tree.ids[node] for node in path], tokens, root)
            self._guarded(partial(self.drafter.observe, run.draft_state, seen))

    def _warn(self, failure: BaseException) -> None:
        if not self._warned:
            self._warned = True
            kind = type(failure).__name__
            warnings.warn(f"the drafter failed ({kind}: {failure}); going on by plain decoding", stacklevel=2)
