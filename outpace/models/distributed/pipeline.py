"""Runs a target in a pipeline: each rank holds some of the layers and sends its hidden states to the next rank.

Rank 0 holds the first layers, the embedding and the output layer, and runs the engine, the rules and the drafters; the
last rank sends its hidden states back to it. They are sent in float32, so every bit is that of the unsplit model. A
pass over a whole tree takes one trip through the ranks, which is the gain of decentralised speculative decoding
(arXiv:2511.11733).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, TargetOutput, tensor_of
from outpace.core.machine import free_bytes
from outpace.models.base import (
    Capability,
    Model,
    Part,
    Session,
    apply_keep,
    chain,
    check_forest,
    hidden_row_numbers,
    row_numbers,
)
from outpace.models.distributed import processes
from outpace.models.distributed.plan import RankFacts, layer_ranges, share_layers
from outpace.models.distributed.processes import Leader
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.weight_sources import PREFIX, source_of
from outpace.models.options import AUTO

# Only rank 0 has an embedding and an output layer. Other ranks get zeros instead, which are never read, in as many rows
# as the kernels pack together.
_BLANK_ROWS = 32
_AHEAD_ROWS = 64  # size of a receive that is posted before the number of rows is known
_TRIALS = 5  # timed passes of one layer


class StageFacts(NamedTuple):
    """What rank 0 knows about a loaded stage. `free`: bytes of free memory."""

    layers: range
    token_bytes: int
    weight_bytes: int
    is_exact: bool
    free: int


class StageSpan(NamedTuple):
    """One part of a pass: a session's number, its committed and pending nodes before the pass, the parents of the new
    nodes, and `Part.length`."""

    session: int
    committed: int
    pending: int
    parents: Sequence[int]
    length: int | None


def facts_of(model: Model) -> StageFacts:
    """Return what rank 0 needs to know about a stage."""
    assert model.stage is not None
    weights = int(model.weight_bytes or 0)
    return StageFacts(model.stage, model.token_bytes, weights, model.exact, free_bytes(model.device))


class RowChannel:
    """Sends and receives rows of hidden states, float32 [rows, width].

    gloo sends a message only after the receiver has posted a receive for it, which would add two hops to each pass. So
    after each message the receive for the next one from that rank is posted at once, for `_AHEAD_ROWS` rows; further
    rows are sent as a second message.
    """

    def __init__(self, width: int, device: Any) -> None:
        self._width, self._device = width, device
        self._most = _AHEAD_ROWS if torch.device(device).type == "cpu" else 0  # NCCL needs the exact size
        self._ahead: dict[int, tuple[Tensor, Any]] = {}

    def send(self, rows: Tensor, rank: int) -> None:
        for part in (rows[: self._most], rows[self._most :]):
            if len(part):
                dist.send(part.contiguous(), rank)

    def receive(self, count: int, rank: int) -> Tensor:
        first, found = min(count, self._most), list[Tensor]()
        if first and rank not in self._ahead:
            self._await(rank)
        rest = torch.empty(count - first, self._width, device=self._device)
        waiting = dist.irecv(rest, rank) if count > first else None
        if first:
            buffer, work = self._ahead.pop(rank)
            work.wait()
            found.append(buffer[:first])
        if waiting is not None:
            waiting.wait()
        if first:
            self._await(rank)
        return torch.cat([*found, rest])

    def _await(self, rank: int) -> None:
        buffer = torch.empty(self._most, self._width, device=self._device)
        self._ahead[rank] = buffer, dist.irecv(buffer, rank)


def build_stage(
    build: Callable[..., Model],
    plan: str,
    identity: Mapping[str, Any],
    check_fit: Callable[[LlamaConfig], None],
    config: LlamaConfig,
    fetch: Callable[[str], Any],
    *,
    head_ids: Any = None,
    progress: Callable[[str, float], None],
) -> Model:
    """Build this rank's layers with `build`. All ranks must call this at the same time.

    `identity`: values that must be equal on all ranks, by their names in errors. `check_fit` raises UserError for a
    stage that does not fit in memory. `fetch` returns a tensor of the whole model by its name.
    """
    facts, layer_bytes = RankFacts(free_bytes("cpu"), 0.0), 1
    if plan == AUTO:
        facts, layer_bytes = _time_layer(build, config, fetch)
    found = processes.gather((dict(identity), facts))
    for rank, (theirs, _) in enumerate(found):
        for name, value in found[0][0].items():
            if theirs.get(name) != value:
                raise UserError(f"rank {rank} has another {name} than rank 0: {theirs.get(name)}, not {value}")
    end_bytes = layer_bytes * config.vocab_size * (1 if config.tie_embeddings else 2) // max(1, _layer_width(config))
    counts = share_layers(plan, config.num_layers, [facts for _, facts in found], layer_bytes, end_bytes)
    layers, is_first = layer_ranges(counts)[dist.get_rank()], not dist.get_rank()
    own = config.of_layers(layers)
    check_fit(own if is_first else _blank(own))
    if is_first:
        model = build(own, lambda name: fetch(source_of(name, layers)), head_ids=head_ids, progress=progress)
    else:
        model = build(_blank(own), _without_ends(config, layers, fetch), progress=progress)
    model.stage = layers
    return model


def _blank(config: LlamaConfig) -> LlamaConfig:
    """Return the config of a stage without an embedding and an output layer."""
    return replace(config, vocab_size=_BLANK_ROWS, tie_embeddings=True)


def _layer_width(config: LlamaConfig) -> int:
    """Return the first layer's number of weights divided by the hidden size."""
    shapes = tensor_shapes(config.of_layers([0]))
    return sum(prod(shape) for name, shape in shapes.items() if name.startswith(PREFIX)) // config.hidden_size


def _unread_width(config: LlamaConfig) -> int:
    """Return the same for the weights of the first layer that a row does not read."""
    experts = config.experts
    return 3 * experts.width * (experts.count - experts.chosen) if experts and config.has_experts(0) else 0


def _without_ends(config: LlamaConfig, layers: Sequence[int], fetch: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a source of these layers' weights, with zeros for the embedding, which is never read."""

    def fetch_stage(name: str) -> Any:
        if name == "model.norm.weight":
            return torch.ones(config.hidden_size)
        if name == "model.embed_tokens.weight":
            return torch.zeros(_BLANK_ROWS, config.hidden_size)
        return fetch(source_of(name, layers))

    return fetch_stage


def _time_layer(build: Callable[..., Model], config: LlamaConfig, fetch: Callable[[str], Any]) -> tuple[RankFacts, int]:
    """Load and time the first layer; return this rank's facts and the bytes of a layer."""
    free = free_bytes("cpu")
    model = build(_blank(config.of_layers([0])), _without_ends(config, [0], fetch))
    free = free_bytes(model.device) if str(model.device) != "cpu" else free
    session, times = model.open(_TRIALS, 1), []
    part = chain(session, [0])._replace(hidden_rows=(0,), inputs=torch.zeros(1, config.hidden_size))
    for _ in range(_TRIALS):
        start = time.perf_counter()
        _float_rows(model.score_hidden([part], (1,))).sum().item()
        times.append(time.perf_counter() - start)
    whole, read = _layer_width(config), int(model.weight_bytes or 1)  # of a mixture, a row reads the chosen experts
    return RankFacts(free, statistics.median(times)), read * whole // (whole - _unread_width(config))


def _float_rows(output: TargetOutput) -> Tensor:
    """Return the hidden states of a pass: float32 [layers, rows, width]"""
    assert output.hidden is not None
    return tensor_of(output.hidden).float()


class PipelineSession:
    """One request's sessions in all stages. Changes are made on every rank; attributes are those on rank 0."""

    def __init__(self, own: Session, lead: Leader) -> None:
        self.own, self._lead = own, lead
        self.number = lead.number(self)
        lead.queue("open", self.number, own.capacity, own.max_pending)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    @property
    def capacity(self) -> int:
        return self.own.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self.own.capacity = capacity
        self._lead.queue("limit", self.number, capacity)

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        self._change("keep", tuple(path), tuple(live))

    def truncate(self, length: int) -> None:
        self._change("truncate", length)

    def reserve(self, slots: int, exact: bool = False) -> None:
        self._change("reserve", slots, exact)

    def trim(self, exact: bool = False) -> None:
        self._change("trim", exact)

    def start_from(self, other: PipelineSession, length: int) -> None:
        self.own.start_from(other.own, length)
        self._lead.queue("start_from", self.number, other.number, length)

    def _change(self, name: str, *arguments: Any) -> None:
        getattr(self.own, name)(*arguments)
        self._lead.queue("change", self.number, name, *arguments)


class PipelineStage:
    """The layers of a rank other than 0, which performs the operations that rank 0 sends."""

    def __init__(self, model: Model, channel: RowChannel, rank: int, is_last: bool) -> None:
        self.model, self.channel, self.rank, self._is_last = model, channel, rank, is_last
        self.sessions: dict[int, Session] = {}

    def perform(self, name: str, *arguments: Any) -> None:
        getattr(self, f"do_{name}")(*arguments)

    def do_open(self, number: int, capacity: int, max_pending: int) -> None:
        self.sessions[number] = self.model.open(capacity, max_pending)

    def do_close(self, number: int) -> None:
        self.sessions.pop(number, None)

    def do_limit(self, number: int, capacity: int) -> None:
        self.sessions[number].capacity = capacity

    def do_change(self, number: int, name: str, *arguments: Any) -> None:
        getattr(self.sessions[number], name)(*arguments)

    def do_start_from(self, number: int, other: int, length: int) -> None:
        self.sessions[number].start_from(self.sessions[other], length)

    def do_pass(
        self, spans: Sequence[StageSpan], logit_rows: Sequence[int], layers: Sequence[int], hidden_rows: Sequence[int]
    ) -> None:
        """Apply this rank's layers to rows from the rank before, and send them to the next rank; the last rank sends
        `logit_rows` to rank 0. Those of `layers` (numbers in the whole model) that are here also send it
        `hidden_rows`."""
        ends = list(itertools.accumulate(len(span.parents) for span in spans))
        rows = self.channel.receive(ends[-1], self.rank - 1)
        parts = []
        for span, end in zip(spans, ends, strict=True):
            session, count = self.sessions[span.session], len(span.parents)
            if (session.length, session.pending) != (span.committed, span.pending):
                raise RuntimeError(
                    f"a session holds {session.length} and {session.pending} nodes here,"
                    f" {span.committed} and {span.pending} on rank 0"
                )
            inputs = rows[end - count : end]
            parts.append(Part(session, [0] * count, span.parents, (), None, range(count), span.length, None, inputs))
        assert self.model.stage is not None
        first, count = self.model.stage.start, len(self.model.stage)
        asked = [layer for layer in layers if layer in range(first + 1, first + count + 1)]
        local = sorted({count, *(layer - first for layer in asked)})
        hidden = _float_rows(self.model.score_hidden(parts, local))  # [layers, rows, width]
        if self._is_last:
            self.channel.send(hidden[-1][list(logit_rows)], 0)
        else:
            self.channel.send(hidden[-1], self.rank + 1)
        for layer in asked:
            self.channel.send(hidden[local.index(layer - first)][list(hidden_rows)], 0)


class PipelineModel(Model):
    """A model whose first layers are here, in `first`, and whose other layers are on other ranks."""

    capabilities = frozenset({Capability.HIDDEN, Capability.LENGTH, Capability.INPUTS, Capability.PROJECT})
    is_pipeline = True

    def __init__(self, first: Any, stages: Sequence[StageFacts], lead: Leader, channel: RowChannel) -> None:
        """`stages`: those of all ranks, in order."""
        self.first, self.config, self.stages, self.lead = first, first.config, list(stages), lead
        for name in ("vocab_size", "max_positions", "device", "dtype", "draft_window", "row_counts"):
            setattr(self, name, getattr(first, name))
        self.notice, self.mask_token = first.notice, first.mask_token
        self.num_layers = sum(len(stage.layers) for stage in stages)
        self.exact = all(stage.is_exact for stage in stages)
        self.channel = channel
        self._thread = ThreadPoolExecutor(1, "outpace-pipeline")  # Ctrl-C does not interrupt its exchanges
        own = stages[0]
        self._share = max(stage.token_bytes * max(1.0, own.free / max(stage.free, 1)) for stage in stages)

    @property
    def precision(self) -> str:
        return self.first.precision

    @property
    def token_bytes(self) -> int:
        """Bytes per slot on the rank whose memory is full first, scaled to the free memory of rank 0."""
        return int(self._share)

    def session_bytes(self, slots: int) -> int:
        return int(self.first.session_bytes(slots) * self._share / self.stages[0].token_bytes)

    @property
    def weight_bytes(self) -> int:
        return sum(stage.weight_bytes for stage in self.stages)

    @property
    def instruction_set(self) -> str | None:
        return self.first.instruction_set

    def limit_threads(self, max_threads: int | None = None, leave: int = 0) -> None:
        self.first.limit_threads(max_threads, leave)

    def open(self, capacity: int, max_pending: int) -> PipelineSession:
        return PipelineSession(self.first.open(capacity, max_pending), self.lead)

    def project(self, hidden: Any) -> SparseLogits:
        return self.first.project(hidden)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        check_forest(self, forest)
        return self.project(self._run(apply_keep(forest), ())[0])

    def _score(self, forest: Sequence[Part]) -> Any:
        return tensor_of(self.project(self._run(forest, ())[0]).to_dense())

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Return logits, and hidden states in the type of the first stage: [layers, hidden rows, width]"""
        rows, states = self._run(forest, layers)
        hidden = torch.stack([states[layer] for layer in layers]).to(self.dtype or torch.float32) if layers else None
        is_host = self.dtype is None and hidden is not None
        return TargetOutput(self.project(rows).to_dense(), hidden.numpy() if is_host else hidden)  # type: ignore[union-attr]

    def _run(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Run all layers; return the last layer's output at the logit rows, and hidden states after each of `layers`.

        float32 [logit rows, width] and [hidden rows, width]
        """
        logit_rows, hidden_rows = row_numbers(forest), hidden_row_numbers(forest)
        spans = [
            StageSpan(part.session.number, part.session.length, part.session.pending, list(part.parents), part.length)
            for part in forest
            if part.tokens
        ]
        own = [
            part._replace(session=part.session.own, logit_rows=(), hidden_rows=range(len(part.tokens)), best=0)
            for part in forest
            if part.tokens
        ]
        if not own:
            empty = torch.empty(0, self.config.hidden_size, device=self.device)
            return empty, dict.fromkeys(layers, empty)
        count = len(self.stages[0].layers)
        local = sorted({count, *(layer for layer in layers if layer <= count)})
        hidden = _float_rows(self.first.score_hidden(own, local))
        found = {layer: hidden[local.index(layer)][hidden_rows] for layer in local if layer in layers}
        # Finalizers may queue further operations during the exchange: this pass must come before them.
        self.lead.queue("pass", spans, logit_rows or [0], tuple(layers), hidden_rows)
        exchange = partial(self._exchange, max(1, len(logit_rows)), tuple(layers), len(hidden_rows))
        rows, others = self._thread.submit(exchange, hidden[-1]).result()
        return rows[: len(logit_rows)], found | others

    def _exchange(
        self, num_logit_rows: int, layers: Sequence[int], num_hidden_rows: int, rows: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Send rows to rank 1, and receive the last rank's output and the hidden states after `layers`."""
        self.lead.send()
        found, last = {}, len(self.stages) - 1
        try:
            self.channel.send(rows, 1)
            result = None
            for rank, stage in enumerate(self.stages[1:], 1):
                if rank == last:
                    result = self.channel.receive(num_logit_rows, last)
                for layer in layers:
                    if layer - 1 in stage.layers:
                        found[layer] = self.channel.receive(num_hidden_rows, rank)
        except RuntimeError as error:  # of torch: the connection to a rank has ended
            raise self.lead.loss() from error
        assert result is not None
        return result, found


def load_pipeline(load: Callable[[], Any]) -> tuple[Any, PipelineModel]:
    """Load this rank's stage and return it with the whole model. Only rank 0 returns: the other ranks follow it until
    it ends, then exit. `load` returns a `Loaded` whose model was built by `build_stage`."""
    rank = processes.join_processes()
    try:
        loaded = processes.run_everywhere(load)
        model = loaded.model
        stages = processes.gather(facts_of(model))
    except BaseException:
        processes.leave_processes()
        raise
    if rank:
        stage = PipelineStage(model, RowChannel(model.config.hidden_size, model.device), rank, rank == len(stages) - 1)
        processes.follow_and_exit(stage.perform)
    lead = processes.connect_followers()
    whole = PipelineModel(model, stages, lead, RowChannel(model.config.hidden_size, model.device))
    finalize(whole, lead.end)  # at the latest when the program ends
    return loaded, whole
