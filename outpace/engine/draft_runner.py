"""The engine's side of drafting: drafters in turn or a worker beside the target; a fault in one costs speed only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from outpace.card.cache import CandidateCache
from outpace.card.worker import DraftWorker
from outpace.core import setups
from outpace.core.drafting import NO_NEEDS, TargetFeedback
from outpace.core.errors import UserError, unknown
from outpace.core.tree import TokenTree
from outpace.core.types import Await, Draft, Drafter, Observation, Source, Verdict
from outpace.engine.sequence import TokenSequence
from outpace.planning.cost_model import CostModel

T = TypeVar("T")


class DraftRunner:
    """Opens, asks, tells and closes the drafter of every request. One that raises is given up, with one warning."""

    def __init__(
        self, drafters: Mapping[str, Drafter], worker: DraftWorker | None, costs: CostModel, clock: Callable[[], float]
    ) -> None:
        """`drafters` by name, as requests ask for them; the first is for those that name none."""
        self.drafters, self.worker, self._costs, self._clock = dict(drafters), worker, costs, clock
        self._names = tuple(drafters)  # those too that were given up
        self._warned: set[str | None] = set()
        self.spent = 0.0  # seconds of growing and of waiting for a worker, since the last step began

    @property
    def drafter(self) -> Drafter | None:
        """The one for requests that name none."""
        return self.drafters.get(self._names[0]) if self._names else None

    def choose(self, run: TokenSequence, name: str | None) -> None:
        """Notes by which drafter a request is to be drafted; UserError where there is none for its method."""
        needs = run.decoder.needs
        method = run.decoder.__name__.rpartition(".")[2]
        if (needs == "worker" and self.worker is None) or (needs == "drafter" and not self._names):
            raise UserError(f"method {method} needs a drafter, this engine has none to run for it")
        if needs != "drafter":
            if name is not None:
                own = "has its worker's drafter" if needs == "worker" else "uses no drafter"
                raise UserError(f"method {method} {own}, leave out drafter {name!r}")
            return
        run.draft.name = self._names[0] if name is None else name
        if run.draft.name not in self._names:
            raise unknown("drafter of this engine", run.draft.name, self._names)
        drafter = self._of(run)
        run.draft.needs = drafter.needs if drafter is not None else NO_NEEDS

    def open(self, run: TokenSequence) -> None:
        """A request begins."""
        if run.decoder.needs == "worker" and self.worker:
            run.place.candidates = CandidateCache(run.place.last_token)
            run.place.correct = partial(self.worker.correct, run.key)
            run.place.order = partial(self.worker.order, run.key)
            run.place.step_seconds = partial(getattr, self.worker, "turn_seconds")
            self.worker.open(run.key, run.request, run.place.candidates)
        elif (drafter := self._of(run)) is not None:
            run.place.sources = drafter.sources_for(run.request)
            run.draft.state = self.guarded(run.draft.name, drafter.open, run.request)

    def pause(self, run: TokenSequence) -> None:
        """A request gives its keys and values back until there is room for them."""
        self.tell(run)
        drafter = self._of(run)
        if run.draft.state is not None and drafter is not None:
            run.draft.state.base = None
            self.guarded(run.draft.name, drafter.pause, run.draft.state)
        if run.decoder.needs == "worker" and self.worker:
            self.worker.pause(run.key)

    def resume(self, run: TokenSequence) -> None:
        """It goes on."""
        if run.decoder.needs == "worker" and self.worker:
            self.worker.resume(run.key)

    def close(self, run: TokenSequence) -> None:
        """A request is over."""
        self.tell(run)
        drafter = self._of(run)
        if run.draft.state is not None and drafter is not None:
            self.guarded(run.draft.name, drafter.close, run.draft.state)
        run.draft.state = None
        if run.decoder.needs == "worker" and self.worker:
            self.worker.forget(run.key)
            run.history.stale += run.place.candidates.counts["dead parent"]

    def stored_bytes(self, texts: Sequence[tuple[TokenSequence, int]]) -> int:
        """The most bytes of keys and values that drafts hold in this process for these requests, whose texts have so
        many tokens each. A drafter that was given up holds none."""
        beside = [length for run, length in texts if run.decoder.needs == "worker"]
        total = self.worker.stored_bytes(beside) if self.worker and beside else 0
        for name, drafter in list(self.drafters.items()):
            lengths = [length for run, length in texts if run.draft.name == name]
            total += (self.guarded(name, drafter.stored_bytes, lengths) or 0) if lengths else 0
        return total

    def shut(self) -> None:
        """Ends the worker and the drafters."""
        if self.worker:
            self.worker.close()
        for name in list(self.drafters):
            self.guarded(name, self.drafters[name].end)

    def serve(self, running: Sequence[TokenSequence]) -> None:
        """Answers Draft and Await until no coroutine asks for them; a drafter sees all its trees at once."""
        while True:
            asked: dict[tuple[str | None, Source | None], list[TokenSequence]] = {}
            waiting = []
            for run in running:
                if isinstance(run.ask, Draft):
                    if run.draft.state is not None:
                        run.draft.state.has_other_requests = len(running) > 1
                    asked.setdefault((run.draft.name, run.ask.source), []).append(run)
                elif isinstance(run.ask, Await):
                    waiting.append(run)
            if not asked and not waiting:
                return
            for name, source in sorted(asked, key=_order) if len(asked) > 1 else asked:
                self._grow(asked[name, source], name, source)
            for run in waiting:
                began = self._clock()
                if self.worker and self.worker.failure is None and isinstance(run.ask, Await):
                    self.worker.wait(run.place.candidates, *run.ask)
                self.spent += self._clock() - began
                run.advance(None)

    @property
    def cores(self) -> int:
        """Of those that the target could use, how many the worker's drafter takes at the moment."""
        return self.worker.cores if self.worker is not None and self.worker.is_working else 0

    def beside(self, target_pass: Callable[[], T], rows: int) -> T:
        """The target's pass over `rows` rows, with the worker's drafter beside it."""
        if self.worker is None:
            return target_pass()
        result = self.worker.beside(target_pass, rows)
        if self.worker.failure is not None:
            self._warn(None, self.worker.failure)
        return result

    def read(self, run: TokenSequence, seen: TargetFeedback | None) -> None:
        """Tells a drafter that needs it of a chunk of the prompt, once: the text of a request that had to give its
        session back is read again."""
        drafter = self._of(run)
        if seen is None or drafter is None or run.draft.state is None:
            return
        start, end = run.draft.told, len(run.request.prompt) - 1
        mine = slice(max(start - seen.ids[0], 0), max(end - seen.ids[0], 0))
        if some := seen.ids[mine]:
            run.draft.told = some[-1] + 1
            self.guarded(run.draft.name, drafter.read, run.draft.state, seen.slice(mine))

    def follow(
        self,
        run: TokenSequence,
        tree: TokenTree,
        verdict: Verdict,
        tokens: Sequence[int],
        seen: TargetFeedback | None = None,
    ) -> TokenTree:
        """The next round's root, behind the `tokens` that were written. The verdict is noted for the drafter in turn,
        which is told when it is asked next; at once where it is shown what was `seen` in the pass."""
        draft, root = run.draft, TokenTree(run.committed[-1], root_id=tree.next_id, next_id=tree.next_id + 1)
        if draft.state is None:
            return root
        if self._of(run) is None:
            draft.state = None  # of a drafter that was given up
            return root
        path = verdict.path if verdict.next_token is not None else verdict.path[:-1]  # a late end is the new root
        draft.untold.add(Observation([*map(tree.ids.__getitem__, path)], tokens, root, seen))
        if seen is not None:
            self.tell(run)
        return root

    def tell(self, run: TokenSequence) -> None:
        """Tells a drafter what was written since it was told last."""
        if (drafter := self._of(run)) is not None and (seen := run.draft.untold.take()) is not None:
            self.guarded(run.draft.name, drafter.observe, run.draft.state, seen)

    def _of(self, run: TokenSequence) -> Drafter | None:
        """A request's drafter in turn, unless it was given up."""
        return None if run.draft.name is None else self.drafters.get(run.draft.name)

    def _grow(self, runs: Sequence[TokenSequence], name: str | None, source: Source | None) -> None:
        """One growth of all these requests' trees by a source of their drafter, which they are told."""
        added: list[int] | None = None
        for run in runs:
            self.tell(run)
        drafter = self._of(runs[0])
        if drafter is not None:
            began, before = self._clock(), setups.count
            states, trees = [], []
            for run in runs:
                assert isinstance(run.ask, Draft)
                if drafter.needs.session:
                    run.lend()
                run.ask.tree.current_source = drafter.name if source is None else source.name
                states.append(run.draft.state)
                trees.append(run.ask.tree)
            added = self.guarded(name, drafter.grow_by, source, states, trees)
            seconds = self._clock() - began
            self.spent += seconds
            if source is not None and setups.count > before:
                self._costs.reads(source)  # this growth was no mere step
            share = drafter.amortized(seconds) if drafter.shares_work else seconds
            self._costs.drafted(share, len(runs), source)
            for run in runs:
                run.draft.seconds += seconds
        for run, count in zip(runs, added or [0] * len(runs), strict=True):
            run.advance(count)

    def guarded(self, name: str | None, call: Callable[..., T], *arguments: Any) -> T | None:
        """What a drafter answers; one that raises is given up, and decoding goes on plainly."""
        try:
            return call(*arguments)
        except Exception as failure:
            self._warn(name, failure)
            self.drafters.pop(name or "", None)
            return None

    def _warn(self, name: str | None, failure: BaseException) -> None:
        if name not in self._warned:
            self._warned.add(name)
            kind = type(failure).__name__
            which = f"the drafter {name}" if len(self._names) > 1 else "the drafter"
            warnings.warn(f"{which} failed ({kind}: {failure}); going on without it", stacklevel=2)


def _order(asked: tuple[str | None, Source | None]) -> tuple[bool, bool]:
    """What runs no model grows first: who asked for it may then share the model's forward with the others."""
    source = asked[1]
    return source is None, source is not None and source.runs_model
