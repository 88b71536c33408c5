"""The engine's side of drafting: drafters that alternate with the target, and a worker that drafts in parallel with it.

A drafter that raises is given up with one warning: a fault costs speed, never text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.core.drafting import NO_NEEDS, TargetFeedback
from outpace.core.errors import UserError, unknown
from outpace.core.tree import UNLIMITED, TokenTree
from outpace.core.types import WORKER, Await, Draft, Drafter, DraftSource, Observation, Verdict
from outpace.drafters._tree_expander import CHUNK
from outpace.engine.sequence import TokenSequence
from outpace.planning.cost_model import READ_WITH_STEP, CostModel, DraftTimes

if TYPE_CHECKING:
    from outpace.card.worker import DraftWorker

T = TypeVar("T")
_READ = 32  # tokens of texts that draft models read in a growth at least, although others wait


class DraftRunner:
    """Runs the drafters of all sequences."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        worker: DraftWorker | None,
        costs: CostModel,
        clock: Callable[[], float],
        vocab_size: int,
    ) -> None:
        """`drafters` by the names that requests choose them by; the first is the default. A drafter that proposes a
        token outside the target's vocabulary (`vocab_size`) is given up."""
        self.drafters, self.worker, self._costs, self._clock = dict(drafters), worker, costs, clock
        self.clients: DraftWorker | None = None  # drafts requests that have a `client`
        self._vocab_size = vocab_size
        self._names = tuple(drafters)  # including those that were given up
        self._warned: set[tuple[str | None, bool]] = set()
        self._times = DraftTimes()  # since they were taken last
        models = [model for drafter in drafters.values() for model in drafter.capabilities.models]
        self.models = list(dict.fromkeys(models))  # that draft in the engine's thread

    @property
    def drafter(self) -> Drafter | None:
        return self.drafters.get(self._names[0]) if self._names else None

    @property
    def num_captures(self) -> int:
        """Number of passes that these models have captured so far."""
        return sum([model.num_captures for model in self.models])

    @property
    def cores(self) -> int:
        """Number of the target's cores that the worker's drafter uses now."""
        return self.worker.cores if self.worker is not None and self.worker.is_working else 0

    def choose(self, sequence: TokenSequence, name: str | None) -> None:
        """Set the drafter of a sequence; UserError where there is none for its method."""
        drafting, method = sequence.decoder.drafting, sequence.decoder.name
        if (drafting == "parallel" and self._worker_of(sequence) is None) or (
            drafting == "sequential" and not self._names
        ):
            raise UserError(f"method {method} needs a drafter, this engine has none to run for it")
        if drafting != "sequential":
            if name is not None:
                reason = (
                    "runs one drafter in a worker, a request cannot choose another"
                    if drafting == "parallel"
                    else "uses no drafter"
                )
                raise UserError(f"method {method} {reason}: leave out drafter {name!r}")
            return
        sequence.draft.name = self._names[0] if name is None else name
        if sequence.draft.name not in self._names:
            raise unknown("drafter of this engine", sequence.draft.name, self._names)
        drafter = self._of(sequence)
        sequence.draft.needs = drafter.capabilities.needs if drafter is not None else NO_NEEDS

    def open(self, sequence: TokenSequence) -> None:
        context = sequence.context
        if worker := self._worker_of(sequence):
            from outpace.card.cache import CandidateCache  # for the requests of a worker only

            context.candidates = CandidateCache(context.last_token, self._vocab_size, sequence.request.max_tokens)
            context.sources = (WORKER,)
            context.correct = partial(worker.correct, sequence.key)
            context.set_directives = partial(worker.set_directives, sequence.key)
            context.draft_seconds = partial(getattr, worker, "step_seconds")
            context.round_trip = partial(worker.round_trip_of, context.candidates)
            worker.open(sequence.key, sequence.request, context.candidates)
        elif (drafter := self._of(sequence)) is not None:
            sequence.draft.state = state = self.run_guarded(sequence.draft.name, drafter.open, sequence.request)
            if state is not None and sequence.draft.source is not None:
                self._call(sequence, "copy_prefix", sequence.draft.source, sequence.draft.prompt_read)
            sequence.draft.source = None
            if state is not None:
                context.sources = drafter.capabilities.sources if state.sources is None else state.sources

    def pause(self, sequence: TokenSequence) -> None:
        """Release the keys and values of a sequence's draft."""
        if sequence.draft.state is not None:
            sequence.draft.state.target_session = None
            self._call(sequence, "catch_up")
            self._call(sequence, "pause")
        if worker := self._worker_of(sequence):
            worker.pause(sequence.key)

    def resume(self, sequence: TokenSequence) -> None:
        if worker := self._worker_of(sequence):
            worker.resume(sequence.key)

    def close(self, sequence: TokenSequence) -> None:
        self._call(sequence, "catch_up")
        self._call(sequence, "close")
        if not sequence.draft.needs.prompt:
            sequence.draft.state = None
        if worker := self._worker_of(sequence):
            sequence.history.stale += worker.forget(sequence.key)

    def stored_bytes(self, texts: Sequence[tuple[TokenSequence, int]]) -> int:
        """Return the most bytes of keys and values that drafts in this process may need for sequences with texts of
        these lengths. A drafter that was given up holds none."""
        lengths = [length for sequence, length in texts if self._worker_of(sequence) is self.worker is not None]
        total = self.worker.stored_bytes(lengths) if self.worker is not None and lengths else 0
        for name, drafter in list(self.drafters.items()):
            lengths = [length for sequence, length in texts if sequence.draft.name == name]
            total += (self.run_guarded(name, drafter.capabilities.memory, lengths) or 0) if lengths else 0
        return total

    def close_drafters(self) -> None:
        if self.worker:
            self.worker.close()
        for name in list(self.drafters):
            self.run_guarded(name, self.drafters[name].capabilities.save)

    def run_drafters(self, running: Sequence[TokenSequence]) -> None:
        """Draft and wait until no decoder yields Draft or Await any more; a drafter grows the trees of all its
        sequences at once."""
        while True:
            asked: dict[tuple[str | None, DraftSource | None], list[TokenSequence]] = {}
            waiting = []
            for sequence in running:
                action = sequence.action
                if isinstance(action, Draft):
                    asked.setdefault((sequence.draft.name, action.source), []).append(sequence)
                elif isinstance(action, Await):
                    waiting.append(sequence)
            if not asked and not waiting:
                return
            for name, source in sorted(asked, key=_order) if len(asked) > 1 else asked:
                self._grow(asked[name, source], name, source, len(running))
            if waiting:
                self._wait(waiting)

    def _max_read(self, drafter: Drafter | None, requests: int) -> int:
        """Return how many tokens of texts a drafter's models may read in one growth, while other requests wait: a chunk
        for each if its time is unknown."""
        costs, sources = self._costs, () if drafter is None else drafter.capabilities.sources
        token = max([costs.reading_token_seconds(source) for source in sources if source.runs_model], default=0.0)
        return max(int(costs.reading_seconds(requests) / token), _READ) if token else requests * CHUNK

    def _wait(self, waiting: Sequence[TokenSequence]) -> None:
        """Let the worker draft for these sequences, then resume their decoders. The drafter is not awaited for the last
        token, nor after a miss if the round trip takes longer than half a pass."""
        began, max_round_trip = self._clock(), self._costs.pass_seconds(len(waiting)) / 2
        drafting = []
        for sequence in waiting:
            if (worker := self._worker_of(sequence)) is not None:
                candidates, left = sequence.context.candidates, sequence.context.tokens_left
                if left < 2 or (candidates.missed and worker.round_trip_of(candidates) > max_round_trip):
                    continue
                if worker.failure is None and isinstance(sequence.action, Await):
                    levels, depth = sequence.action
                    worker.wait(candidates, levels, min(depth, left - 1))
            drafting.append(sequence)
        for sequence in waiting:
            sequence.advance(None)
        seconds = self._clock() - began
        self._times.seconds += seconds
        self._times.expected += seconds
        if drafting:
            self._costs.record_draft(WORKER, seconds, 1, len(drafting))

    def take_times(self) -> DraftTimes:
        """Return what drafting has taken since this was called last."""
        times, self._times = self._times, DraftTimes()
        return times

    def check_worker(self) -> None:
        """Warn if the worker has failed: once while it restarts, and once when it is given up."""
        if self.worker is not None and (failure := self.worker.failure) is not None:
            self._warn(None, failure, restarts=self.worker.will_restart)

    def add_prompt(self, sequence: TokenSequence, feedback: TargetFeedback | None) -> None:
        """Give a drafter that needs it the target's output for a chunk of the prompt. Each token is given once, even if
        the prompt is read again after a pause."""
        if feedback is None:
            return
        start, end = sequence.draft.prompt_read, len(sequence.request.prompt) - 1
        new = slice(max(start - feedback.ids[0], 0), max(end - feedback.ids[0], 0))
        if some := feedback.ids[new]:
            sequence.draft.prompt_read = some[-1] + 1
            root = TokenTree(sequence.request.prompt[-1])
            self._call(sequence, "observe", Observation((), (), root, feedback.slice(new)))

    def follow(
        self,
        sequence: TokenSequence,
        tree: TokenTree,
        verdict: Verdict,
        tokens: Sequence[int],
        feedback: TargetFeedback | None = None,
    ) -> TokenTree:
        """Return the next round's root after the committed `tokens`, and note the verdict for the drafter. The drafter
        observes it when it drafts next, or at once if `PendingObservations.is_due`."""
        next_id = tree.next_id
        root = TokenTree(sequence.committed[-1], next_id, next_id + 1)
        if (state := sequence.draft.state) is not None:
            path = verdict.path if verdict.next_token is not None else verdict.path[:-1]  # a late end is the new root
            ids = tree.ids
            state.pending.add(Observation([ids[node] for node in path], tokens, root, feedback))
            if state.pending.is_due:
                self._call(sequence, "catch_up")
        return root

    def _call(self, sequence: TokenSequence, verb: str, *arguments: Any) -> None:
        """Call a method of a sequence's drafter with its state, if there is one."""
        drafter, draft = self._of(sequence), sequence.draft
        if drafter is None:
            draft.state = None  # of a drafter that was given up
        elif draft.state is not None:
            self.run_guarded(draft.name, getattr(drafter, verb), draft.state, *arguments)

    def _of(self, sequence: TokenSequence) -> Drafter | None:
        """Return the drafter that alternates with the target for this sequence, unless it was given up."""
        return None if sequence.draft.name is None else self.drafters.get(sequence.draft.name)

    def _worker_of(self, sequence: TokenSequence) -> DraftWorker | None:
        if sequence.decoder.drafting != "parallel":
            return None
        return self.worker if sequence.request.client is None else self.clients

    def _grow(
        self, sequences: Sequence[TokenSequence], name: str | None, source: DraftSource | None, requests: int
    ) -> None:
        """Grow the trees of these sequences, of all that run, once, by a source of their drafter or by all (None), then
        resume their decoders. The time for planning the next growth is recorded as part of the draft step."""
        states: list[Any] = []
        trees: list[TokenTree] = []
        began, before, drafter = self._clock(), self.num_captures, self._of(sequences[0])
        lends = drafter is not None and drafter.capabilities.needs.session
        source_name = "" if drafter is None else drafter.name if source is None else source.name
        chunks = requests * CHUNK if requests > 1 else UNLIMITED  # to read, where the text depends on when
        max_read = self._max_read(drafter, requests) if requests > 1 else UNLIMITED
        for sequence in sequences:
            state, action, traits = sequence.draft.state, sequence.action, sequence.request.rule.traits
            assert isinstance(action, Draft)
            if drafter is not None and state is not None:
                state.source, state.max_read = source, max_read if traits.same_text else chunks
                if state.pending:
                    self.run_guarded(name, drafter.catch_up, state)
                    drafter = self._of(sequence)
            if drafter is None:
                break
            if lends:
                sequence.attach_target_session()
            tree = action.tree
            tree.current_source, tree.width, tree.vocab_size = source_name, action.width, self._vocab_size
            # The target writes the last token itself, but some rules need q for it.
            tree.max_depth = sequence.context.tokens_left - (not traits.q_at_leaves)
            states.append(state)
            trees.append(tree)
        if drafter is None:  # it was given up
            for sequence in sequences:
                sequence.draft.state = None
                sequence.advance(0)
            return
        observed, sizes = self._clock(), [*map(len, trees)]
        unread = sum([state.unread for state in states])
        self.run_guarded(name, drafter.grow, states, trees)
        read = unread - sum([state.unread for state in states]) if unread else 0
        added = [*map(sub, map(len, trees), sizes)]
        grown = self._clock()
        for sequence, count in zip(sequences, added, strict=True):
            sequence.draft.seconds += grown - began
            sequence.advance(count)
        ended = self._clock()
        self._times.seconds += ended - began
        if source is not None and source.runs_model:
            has_captured, nodes = self.num_captures > before, [tree.width or 1 for tree in trees]
            self._record_growth(source, nodes, any(added), read, grown - observed, ended - grown, has_captured)
        else:
            self._times.expected += ended - began
            if source is not None:
                self._costs.record_draft(source, ended - began, 1, len(trees))

    def _record_growth(
        self,
        source: DraftSource,
        nodes: Sequence[int],
        has_grown: bool,
        read: int,
        seconds: float,
        planning: float,
        has_captured: bool,
    ) -> None:
        """Record a growth by a model that read `read` tokens of texts and, if `has_grown`, expanded `nodes` of each
        tree. Reading and the capture of a graph are not part of a draft step."""
        costs, width = self._costs, sum(nodes)
        step = costs.step_seconds(source, width) if has_grown else 0.0
        self._times.steps += has_grown
        if has_captured:
            costs.captures[source.name].record(len(nodes), max(nodes), seconds - step)
            self._times.expected += seconds + planning
            return
        costs.captures[source.name].record(len(nodes), max(nodes))
        if read > READ_WITH_STEP * len(nodes):
            costs.record_reading(source, read, seconds - step)
            self._times.expected += seconds + planning
            self._times.has_read = True
        elif has_grown:
            self._times.expected += step
            costs.record_draft(source, seconds + planning, width, len(nodes))

    def run_guarded(self, name: str | None, call: Callable[..., T], *arguments: Any) -> T | None:
        """Call a drafter; if it raises, give it up and return None."""
        try:
            return call(*arguments)
        except Exception as failure:
            self._warn(name, failure)
            self.drafters.pop(name or "", None)
            return None

    def _warn(self, name: str | None, failure: BaseException, restarts: bool = False) -> None:
        if (name, restarts) not in self._warned:
            self._warned.add((name, restarts))
            kind = type(failure).__name__
            which = f"the drafter {name}" if len(self._names) > 1 else "the drafter"
            outlook = "continuing without it until it restarts" if restarts else "continuing without it"
            warnings.warn(f"{which} failed ({kind}: {failure}); {outlook}", stacklevel=2)


def _order(asked: tuple[str | None, DraftSource | None]) -> tuple[bool, bool]:
    """Sort sources without a model first: sequences that asked them can then share a model's forward with others."""
    source = asked[1]
    return source is None, source is not None and source.runs_model
