"""Continuous batching over coroutines: each step drafts for all requests at once and verifies all trees in one pass.

The engine knows tokens, not text. Requests join and leave between steps; prompts are read in chunks, in the same passes
that verify other requests' trees; a coroutine that raises ends its own request only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from outpace.core.drafting import NO_NEEDS, Needs
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Drafter, Request, Verify
from outpace.decoders.base import Decoder
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.earlier_texts import AnswerCache
from outpace.engine.kv_memory import KVMemory
from outpace.engine.options import EngineOptions as EngineOptions
from outpace.engine.scheduler import PrefillCostModel, Scheduler, Span, Unread, split_prefill_budget
from outpace.engine.sequence import State, StopCheck, TokenSequence, check_request, check_rule_needs, run_guarded
from outpace.engine.target_runner import PrefillOutput, TargetRunner, VerifyOutput, record_logprobs
from outpace.models.base import Model, Part, chain, check_needs
from outpace.planning.cost_model import CostModel, DraftTimes
from outpace.planning.sources import BatchRows
from outpace.rules.base import FailedRow

if TYPE_CHECKING:
    from outpace.card.worker import DraftWorker

_UNTIMED = 16  # prompt tokens in a pass with requests that write, until passes were timed
_INTERRUPTED = "the answer was cut off because its round was interrupted (Ctrl-C): send the request again"


class Batch(NamedTuple):
    """The content of one target pass: chunks of prompts, and trees to verify."""

    chunks: list[tuple[TokenSequence, Part]]
    trees: list[tuple[TokenSequence, TokenTree]]

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for sequence, _ in [*self.chunks, *self.trees]]


class BatchOutput(NamedTuple):
    """The output of a target pass that took `seconds`."""

    prefilled: list[PrefillOutput]
    verified: list[VerifyOutput]
    seconds: float
    has_captured: bool  # a CUDA graph was captured, so that the time is not that of a usual pass
    experts: float  # `Model.distinct_experts`


class Engine(AbstractContextManager["Engine"]):
    """Owns the target, the drafters that alternate with it, and the worker that drafts in parallel.

    `submit`, `step`, `sweep` and `close` must not be called concurrently; `abort` may be called by any thread.
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
        """`drafters`: one, or several by the names that requests choose them by, the first as default. `clock` returns
        the seconds by which everything is timed. `needs` are those of the rules that requests may use."""
        self.target = target if worker is None else worker.wrap_target(target)
        self._clock = clock
        self.options = options = options or EngineOptions()
        on_gpu = str(target.device).startswith("cuda")
        self._max_rows = options.rows or (512 if on_gpu else 64)
        self._chunk = options.chunk or target.chunk or (2048 if on_gpu else 256)
        self.costs = CostModel()
        named = {drafters.name: drafters} if isinstance(drafters, Drafter) else drafters or {}
        self.drafting = DraftRunner(named, worker, self.costs, clock, target.vocab_size)
        self.needs = reduce(Needs.joined, (drafter.capabilities.needs for drafter in named.values()), needs)
        check_needs(self.target, self.needs)
        self._runner = TargetRunner(self.target, self.needs.layers)
        # Without exact mode, chunk boundaries change the last bits of logits and may flip near-ties: chunk sizes must
        # not depend on measured times.
        is_whole = not target.exact and (on_gpu or options.chunk is not None)
        self._prefill_costs = PrefillCostModel(learns=target.exact, untimed=self._chunk if is_whole else _UNTIMED)
        drafts = self.drafting.stored_bytes
        self._max_kept = options.batch if options.reuse else 0
        self.memory = KVMemory(self.target, drafts, options.nodes, options.kv_memory, self._max_kept)
        self._answers = AnswerCache() if self.options.reuse else None
        self._scheduler = Scheduler(self.memory, self.drafting, self.options.batch, clock, self._answers)
        self._keys = itertools.count()
        self.costs.expect_draft_steps(self.target, named.values())
        self._is_closed = self._is_in_round = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def waiting(self) -> Sequence[TokenSequence]:
        """Sequences that wait for a place in the batch or for memory, in order of arrival."""
        return self._scheduler.waiting

    @property
    def running(self) -> Sequence[TokenSequence]:
        """Sequences that take part in a step, in order of arrival."""
        return self._scheduler.running

    @property
    def worker(self) -> DraftWorker | None:
        """The worker that drafts in parallel with the target."""
        return self.drafting.worker

    def close(self) -> None:
        """End all requests and the worker. Call it again if it was interrupted."""
        self._is_closed = True
        with ExitStack() as stack:
            stack.callback(self.drafting.close_drafters)
            for sequence in [*self.running, *self.waiting]:
                self.abort(sequence)
            self.sweep()

    def submit(
        self,
        request: Request,
        decoder: type[Decoder],
        options: Any,
        watch: StopCheck | None = None,
        drafter: str | None = None,
    ) -> TokenSequence:
        """Queue a request, to be drafted by the drafter of this name. UserError if it can never run."""
        sequence = self.create(request, decoder, options, watch, drafter)
        try:
            self.enqueue(sequence)
            return sequence
        except BaseException:
            self.abort(sequence)
            raise

    def create(
        self,
        request: Request,
        decoder: type[Decoder],
        options: Any,
        watch: StopCheck | None = None,
        drafter: str | None = None,
    ) -> TokenSequence:
        """Create the sequence of a request, which `enqueue` queues; see `submit`."""
        if self._is_closed:
            raise UserError("the engine is closed, requests need an open one")
        check_request(request, self.target)
        check_rule_needs(request, self.needs)
        if self._answers is not None and not request.prediction and (recalled := self._answers.find(request)):
            request = replace(request, recalled=recalled)
        if request.max_tokens > (max_tokens := self.target.max_length(num_read := len(request.prompt)) - num_read):
            request = replace(request, max_tokens=max_tokens)
        source = self.target.source_length(num_read)
        sequence = TokenSequence(request, decoder(), options, next(self._keys), self.costs, watch, source)
        sequence.history.submitted = self._clock()
        self.drafting.choose(sequence, drafter)
        self.memory.check(sequence)
        return sequence

    def enqueue(self, sequence: TokenSequence) -> None:
        """Queue a sequence from `create`. If this is interrupted, abort the sequence."""
        self._scheduler.enqueue(sequence)

    def abort(self, sequence: TokenSequence) -> None:
        """End a request; its tokens stay. Its resources are released by the next `step` or `sweep`."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"

    def sweep(self) -> list[TokenSequence]:
        """Release finished requests, and all running ones after an interrupted round; return those that had been
        started."""
        if self._is_in_round:
            self._scheduler.fail(self.running, UserError(_INTERRUPTED), "abort")
            self._is_in_round = False
        return self._scheduler.sweep()

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[TokenSequence]:
        """Run one round of all running requests. Return the requests that wrote tokens or ended.

        `meanwhile` is called after the target's pass was launched, if the step has one; a device that computes
        asynchronously runs the pass in parallel with it. It may submit and abort requests, and must not raise.

        An interrupt ends the running requests, because the content of their sessions is unknown afterwards. Waiting
        requests are served by the next step.
        """
        self.sweep()
        self._is_in_round = True
        try:
            wrote = self._run_round(meanwhile)
            self._is_in_round = False
        finally:
            swept = self.sweep()
        return list(dict.fromkeys([*wrote, *swept]))

    def _run_round(self, meanwhile: Callable[[], None] | None) -> list[TokenSequence]:
        """Run one round; return the requests that wrote tokens or could not be started."""
        start = self._clock()
        self.costs.begin_round(start if self.running else None)
        admitted = self._scheduler.admit()
        self.drafting.take_times()
        try:
            self._resume_decoders()
            self.drafting.run_drafters(self.running)  # grows trees until every decoder wants to verify
        except Exception as error:
            self._scheduler.fail(self.running, error)
        # Only the drafting before the pass: learning after it takes longer with more rows and is charged to them.
        drafting = self.drafting.take_times()
        batch = self._build_batch()
        if not (sequences := batch.sequences):
            return [sequence for sequence in admitted if sequence.state is State.DONE]
        try:
            output = self._verify(batch, meanwhile)
            self._add_chunks(batch, output)
            self._commit(batch, output, start)
            self._record_times(batch, output, drafting, start)
        except Exception as error:
            self._scheduler.fail(sequences, error)
        wrote = [sequence for sequence, _ in batch.trees]
        return [*wrote, *(sequence for sequence in admitted if sequence.state is State.DONE)]

    def _resume_decoders(self) -> None:
        """Give each sequence its share of the batch, then start the next round of each decoder."""
        running = self._scheduler.running
        if not running:
            return
        share = max(1, min(self.options.nodes, self._max_rows // len(running)))
        for sequence in running:
            context, left = sequence.context, sequence.tokens_left
            context.rows, context.tokens_left = sequence.last_rows, left
            # The last token needs no draft.
            context.budget = min(sequence.request.nodes or share, share) if left > 1 else 1
        BatchRows.of([sequence.context for sequence in running])
        for sequence in running:
            sequence.resume()

    def _build_batch(self) -> Batch:
        """Collect chunks of unread text and trees, and reserve slots for them, pausing requests where memory ends."""
        while True:
            chunks = self._chunks()
            counts = {sequence: len(part.tokens) for sequence, part in chunks} if chunks else {}
            trees, rows = [], []
            for sequence in self._scheduler.running:
                if sequence.state is State.VERIFYING:
                    assert isinstance(sequence.action, Verify)
                    trees.append((sequence, sequence.action.tree))
                    rows.append((sequence, len(sequence.action.tree)))
                elif sequence in counts:
                    rows.append((sequence, counts[sequence]))
            if self._scheduler.reserve(rows):
                return Batch(chunks, trees)

    def _chunks(self) -> list[tuple[TokenSequence, Part]]:
        """Return the next piece of each unread text, within the pass's prefill budget."""
        reading = [sequence for sequence in self._scheduler.running if sequence.state is State.PREFILLING]
        if not reading:
            return []
        running = [sequence for sequence in self._scheduler.running if sequence.state is not State.DONE]
        is_awaited = any(s.state is not State.PREFILLING and not s.history.first_token for s in running)
        unread = [Unread(sequence.unread, sequence.prefilled) for sequence in reading]
        slope = self._prefill_costs.slope if len(running) > 1 else 0.0  # if it runs alone, no other request waits
        budget = self._chunk
        if writing := sum([s.context.rows for s in running if s.state is not State.PREFILLING]):
            budget = min(budget, self._prefill_costs.rows_within(self.costs.reading_seconds(writing)))
        shares = split_prefill_budget(unread, budget, slope, is_awaited)
        chunks = []
        for sequence, share in zip(reading, shares, strict=True):
            if share:
                tokens = sequence.committed[sequence.prefilled : sequence.prefilled + share]
                logit_rows = range(len(tokens)) if sequence.needs_prompt_logprobs else ()
                chunks.append((sequence, chain(sequence.kv.session, tokens, logit_rows, sequence.kv.keep)))
        return chunks

    def _verify(self, batch: Batch, meanwhile: Callable[[], None] | None) -> BatchOutput:
        """Run the target over the batch."""
        # Reading a prompt is far more work for the target than for the drafter: the target gets all cores for it.
        self.target.limit_threads(leave=0 if batch.chunks else self.drafting.cores)
        began, before = self._clock(), self.target.num_captures
        prefilled, verified = self._runner.run(batch.chunks, batch.trees, meanwhile)
        self.drafting.check_worker()
        seconds, has_captured = self._clock() - began, self.target.num_captures > before
        return BatchOutput(prefilled, verified, seconds, has_captured, self.target.distinct_experts)

    def capture_passes(self) -> None:
        """Make room for a full batch of short texts, and capture the passes that rounds are likely to need, so that no
        request waits for them. Other sizes are captured when they first occur."""
        batches = [1 << power for power in range((min(self.options.batch, 32) - 1).bit_length() + 1)]
        counts = [1 << power for power in range(9)]  # of nodes, and of a prompt's tokens
        trees = [count for count in counts if count < 2 * self.options.nodes]
        sizes = [(batch, count) for batch in batches for count in trees if batch * count <= self._max_rows]
        reading = [(batch, count) for batch in batches[:4] for count in counts if count not in trees]
        self.target.reserve_sessions(self.options.batch + self._max_kept, self.memory.budget // 2)
        self.target.capture_passes([*sizes, *reading], self.needs.layers)
        drafted = [(batch, count) for batch in batches for count in counts if count <= 8 or batch <= 8]
        for model in self.drafting.models:
            model.reserve_sessions(self.options.batch, self.memory.budget // 8)
            model.capture_passes(drafted)

    def _add_chunks(self, batch: Batch, output: BatchOutput) -> None:
        """Hand the output for prompts to the sequences and their drafters, and learn how long reading takes."""
        if batch.chunks and not output.has_captured:
            spans = [Span(len(part.tokens), sequence.kv.session.length) for sequence, part in batch.chunks]
            spans += [Span(len(tree), len(sequence.committed)) for sequence, tree in batch.trees]
            self._prefill_costs.learn(spans, output.seconds)
        for (sequence, part), prefilled in zip(batch.chunks, output.prefilled, strict=True):
            self.drafting.add_prompt(sequence, prefilled.feedback)
            sequence.add_chunk(prefilled.logits, part.tokens)
            self.memory.take_snapshot(sequence)

    def _commit(self, batch: Batch, output: BatchOutput, start: float) -> None:
        """Send the decoders their picks, commit their verdicts, and feed these back to the drafters."""
        sequences = [sequence for sequence, _ in batch.trees]
        for sequence, verified in zip(sequences, output.verified, strict=True):
            sequence.kv.keep = ()
            if isinstance(failed := verified.picks[0], FailedRow):
                sequence.kv.is_broken = True
                sequence.fail(failed.error)
            else:
                sequence.advance(verified.picks)
        self.drafting.run_drafters(sequences)
        if any(verified.logits is not None for verified in output.verified):
            record_logprobs(sequences, output.verified)
        measured = output.seconds, output.experts, start, self._clock()
        for sequence, verified in zip(sequences, output.verified, strict=True):
            if isinstance(sequence.action, Commit):
                run_guarded(sequence, self._commit_one, sequence, sequence.action, verified, measured)
            elif not isinstance(sequence.action, Verify | None):  # Verify: it wants another pass
                sequence.fail(TypeError(f"a decoder answers picks with Commit, not {type(sequence.action).__name__}"))

    def _commit_one(
        self,
        sequence: TokenSequence,
        commit: Commit,
        verified: VerifyOutput,
        measured: tuple[float, float, float, float],
    ) -> None:
        """Commit a sequence's verdict on a pass, and let its drafter follow; `measured` as of `record_round`."""
        (tree, verdict, *_), rows = commit, len(verified.picks)
        path = verdict.path
        tokens = sequence.commit(tree, verdict, len(path) - 1)
        sequence.kv.keep = (
            path if path[-1] < rows else [node for node in path if node < rows]
        )  # a late node has no keys
        sequence.record_round(commit, rows, len(tokens), *measured)
        if sequence.finish_reason is None:
            sequence.end_round(self.drafting.follow(sequence, tree, verdict, tokens, verified.feedback))

    def _record_times(self, batch: Batch, output: BatchOutput, drafting: DraftTimes, start: float) -> None:
        """Record the time of a step with trees alone or prompts alone, and how long the capture of a graph took."""
        end = self._clock()
        seconds, sizes, costs = end - start, [len(tree) for _, tree in batch.trees], self.costs
        if batch.chunks:
            if not sizes and not output.has_captured:
                costs.record_prefill(sum(len(part.tokens) for _, part in batch.chunks), seconds)
        elif output.has_captured:
            more = seconds - drafting.seconds - costs.pass_seconds(sum(sizes))
            costs.captures[""].record(len(sizes), max(sizes), more)
        else:
            costs.captures[""].record(len(sizes), max(sizes))
            if not drafting.has_read:
                costs.end_round(len(sizes), sum(sizes), drafting, seconds, end)
            self._record_round(batch, seconds, drafting.seconds)

    def _record_round(self, batch: Batch, seconds: float, drafting: float) -> None:
        """Record the time of a round, unless a decoder wants another pass for it."""
        rows = tokens = 0
        for sequence, _ in batch.trees:
            steps = sequence.history.steps
            if not steps or (sequence.action is not None and sequence.state is not State.DONE):
                return
            rows, tokens = rows + steps[-1].verified_rows, tokens + steps[-1].emitted
        self.costs.record_round(len(batch.trees), rows, tokens, seconds, drafting)
