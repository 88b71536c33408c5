"""The engine's side of drafting: a drafter in turn or a worker beside the target; a fault in one costs speed only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from outpace.candidates.base import Worker
from outpace.candidates.cache import CandidateCache
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Await, Draft, Drafter, Observation, Source, Verdict
from outpace.decoders._costs import Costs
from outpace.engine.request import Running

T = TypeVar("T")


class Drafting:
    """Opens, asks, tells and closes the drafter of every request. One that raises is given up, with one warning."""

    def __init__(
        self, drafter: Drafter | None, worker: Worker | None, costs: Costs, clock: Callable[[], float]
    ) -> None:
        self.drafter, self.worker, self._costs, self._clock = drafter, worker, costs, clock
        self._offers = {name for name, part in (("drafter", drafter), ("worker", worker)) if part is not None}
        self._warned = False

    @property
    def sources(self) -> tuple[Source, ...]:
        """What a request may ask to be drafted by."""
        return self.drafter.sources if self.drafter else ()

    def check(self, run: Running) -> None:
        """UserError for a method whose drafter is not here."""
        needs = run.decoder.NEEDS
        if needs and needs not in self._offers:
            name = run.decoder.__name__.rpartition(".")[2]
            raise UserError(f"method {name} needs a drafter, this engine has none to run for it")

    def open(self, run: Running) -> None:
        """A request begins."""
        if run.decoder.NEEDS == "worker" and self.worker:
            run.place.candidates = CandidateCache(run.place.last_token)
            run.place.correct = partial(self.worker.correct, run.key)
            self.worker.open(run.key, run.request, run.place.candidates)
        elif run.decoder.NEEDS == "drafter" and self.drafter:
            run.draft.state = self._guarded(self.drafter.open, run.request)

    def close(self, run: Running) -> None:
        """A request is over."""
        if run.draft.state is not None and self.drafter:
            self._guarded(self.drafter.close, run.draft.state)
        if run.decoder.NEEDS == "worker" and self.worker:
            self.worker.forget(run.key)

    def shut(self) -> None:
        """Ends the worker."""
        if self.worker:
            self.worker.close()

    def serve(self, running: Sequence[Running]) -> None:
        """Answers Draft and Await until every coroutine asks for Verify; the drafter sees all trees at once."""
        while True:
            drafting = [run for run in running if isinstance(run.ask, Draft)]
            waiting = [run for run in running if isinstance(run.ask, Await)]
            if not drafting and not waiting:
                return
            for source in sorted({run.ask.source for run in drafting if isinstance(run.ask, Draft)}, key=_order):
                asking = [run for run in drafting if isinstance(run.ask, Draft) and run.ask.source == source]
                self._grow(asking, source)
            for run in waiting:
                if self.worker and self.worker.failure is None and isinstance(run.ask, Await):
                    self.worker.wait(run.place.candidates, run.ask.layers)
                run.advance(None)

    def beside(self, target_pass: Callable[[], T], rows: int) -> T:
        """The target's pass over `rows` rows, with the worker's drafter beside it."""
        if self.worker is None:
            return target_pass()
        result = self.worker.beside(target_pass, rows)
        if self.worker.failure is not None:
            self._warn(self.worker.failure)
        return result

    def observe(self, run: Running, tree: TokenTree, verdict: Verdict, tokens: Sequence[int], root: TokenTree) -> None:
        """Tells the drafter in turn what was committed; `root` is the next tree."""
        if run.draft.state is not None and self.drafter:
            path = verdict.path if verdict.next_token is not None else verdict.path[:-1]  # a late end is the new root
            seen = Observation([tree.ids[node] for node in path], tokens, root)
            self._guarded(self.drafter.observe, run.draft.state, seen)

    def _grow(self, runs: Sequence[Running], source: Source | None) -> None:
        """One growth of all these requests' trees by a source, which they are told."""
        added: list[int] | None = None
        if self.drafter:
            began = self._clock()
            trees = [run.ask.tree for run in runs if isinstance(run.ask, Draft)]
            added = self._guarded(self.drafter.grow_by, source, [run.draft.state for run in runs], trees)
            seconds = self._clock() - began
            self._costs.drafted(seconds, len(runs), source)
            for run in runs:
                run.draft.seconds += seconds
        for run, count in zip(runs, added or [0] * len(runs), strict=True):
            run.advance(count)

    def _guarded(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """What the drafter answers; one that raises is given up, and decoding goes on plainly."""
        try:
            return call(*arguments)
        except Exception as failure:
            self._warn(failure)
            self.drafter = None
            return None

    def _warn(self, failure: BaseException) -> None:
        if not self._warned:
            self._warned = True
            kind = type(failure).__name__
            warnings.warn(f"the drafter failed ({kind}: {failure}); going on without it", stacklevel=2)


def _order(source: Source | None) -> tuple[bool, bool]:
    """What runs no model grows first: who asked for it may then share the model's forward with the others."""
    return source is None, source is not None and source.runs_model
