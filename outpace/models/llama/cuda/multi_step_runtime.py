"""Captured passes with several draft steps in one graph, and the exact variant of captured passes.

The first step's pass is any captured pass over the trees' frontiers. The graph turns its logits into children, expands
the best of them by a pass through the same layers, and so on, so the host waits once for all steps. EAGLE-2
(arXiv:2406.16858) grows trees of the same shape; in one graph every step has a fixed number of rows, and rows without a
node write to a padding slot.

In exact mode, a row's bits depend on its token, prefix and ancestors only, whatever the bucket. Two things make sums
depend on a bucket. Products: here every product takes `FIXED` rows, padded or in chunks, and so do the norms, whose
kernels a GPU also chooses by shape; each start checks on the device that a row's place does not matter. Attention: its
numbers are on grids in float64, where sums are exact (`ExactAttention`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.core.logits import SparseLogits, tensor_of
from outpace.core.multi_step import MAX_DEPTH, ExpandedNode, MultiStepRequest
from outpace.core.tree import PREFIX
from outpace.models.llama.cuda.captures import MOST_PENDING, WORDS, Shapes, StaticInputs
from outpace.models.llama.cuda.runtime import MOST_SESSIONS, GraphLlama
from outpace.models.llama.cuda.step_choice import NodeSelection, StepBucket, StepInputs, StepNodes, proposals
from outpace.models.llama.torch.attention import attend_batch_exactly
from outpace.models.llama.torch.linear import FIXED, Linear, pad_rows, rows_are_independent
from outpace.models.llama.torch.weights import Normed


class _StepGraph(NamedTuple):
    """A captured graph of several steps: its key, inputs with the host's arrays to fill, the first step's logits, and
    where the results are."""

    key: Hashable
    inputs: StaticInputs
    host: dict[str, np.ndarray]
    first: Tensor  # [batch * width, vocab]
    out: Tensor  # float64 [steps, batch, width, columns]


class SteppingLlama(GraphLlama):
    """A model with captured passes that can take several draft steps at once."""

    @property
    def several_steps(self) -> bool | None:  # type: ignore[override]  # depends on the device
        """Whether several steps save time: they save launches and waits, which only a GPU has."""
        return None if any(self._skipped) else not self.captures.is_eager

    def draft_steps(
        self, requests: Sequence[MultiStepRequest], scored: SparseLogits, steps: int, width: int, num_proposals: int
    ) -> list[list[ExpandedNode]] | None:
        bucket = StepBucket(next_power_of_two(len(requests)), width, steps, num_proposals)
        if any(self._skipped) or num_proposals > self.vocab_size or not _fits(requests, bucket):
            return None
        for one in requests:
            one.session.reserve(one.session.used + bucket.taken)
            one.session.settle()
        self._place([one.session for one in requests])
        found = self._run_steps(requests, tensor_of(scored.values), bucket)  # [steps, batch, width, columns]
        return [_expanded_nodes(one, found[:, one.session.place], bucket) for one in requests]

    def capture_steps(self, sizes: Sequence[tuple[int, int]], width: int, num_proposals: int) -> None:
        self._place([])
        slots = min(self.least_slots, self.pool.slots)
        for batch, steps in sizes:
            bucket = StepBucket(next_power_of_two(batch), width, steps, num_proposals)
            if bucket.batch <= self.pool.rows and bucket.taken <= min(MOST_PENDING, slots):
                for noisy in (False, True):
                    self._captured_steps(bucket, slots, noisy, self.vocab_size)

    @torch.inference_mode()
    def _run_steps(self, requests: Sequence[MultiStepRequest], scores: Tensor, bucket: StepBucket) -> np.ndarray:
        """Fill the buffers, replay the graph, and wait for its results."""
        most, noisy = max(one.session.used for one in requests) + bucket.taken, any(one.keys for one in requests)
        slots = min(next_power_of_two(most, self.least_slots), self.pool.slots)
        graph = self._captured_steps(bucket, slots, noisy, scores.shape[-1])
        for one in requests:
            _fill(graph.host, one.session.place, one)
        graph.inputs.send()
        places = [one.session.place * bucket.width + node for one in requests for node in range(len(one.slots))]
        graph.first.index_copy_(0, to_device(places, np.int64, self.device), scores.to(graph.first.dtype))
        self.captures.replay(graph.key)
        found: np.ndarray = graph.out.cpu().numpy()  # the only wait
        return found

    @torch.inference_mode()
    def _captured_steps(self, bucket: StepBucket, slots: int, noisy: bool, vocab: int) -> _StepGraph:
        """Return the graph of these steps, captured now if it was not before."""
        inputs = self._inputs(("steps", bucket), _shapes(bucket))
        rows = bucket.batch * bucket.width
        first: Tensor = self.captures.buffers(
            ("step scores", rows, vocab), lambda: self.embedding.new_zeros(rows, vocab, dtype=self.score_dtype)
        )
        shape = (bucket.steps, bucket.batch, bucket.width, bucket.columns)
        out: Tensor = self.captures.buffers(
            ("step results", bucket), lambda: torch.zeros(shape, dtype=torch.float64, device=self.device)
        )
        key = ("steps", bucket, slots, noisy, vocab)
        work = partial(self._steps_pass, bucket, inputs.device, first, out, slots, noisy)
        host = self.captures.begin(key, inputs, work, self.pool.kv, self._hidden, first, out)
        return _StepGraph(key, inputs, host, first, out)

    def _steps_pass(
        self, bucket: StepBucket, inputs: StepInputs, first: Tensor, out: Tensor, slots: int, noisy: bool
    ) -> None:
        """Captured: compute all steps' proposals from the first step's logits."""
        selection, below = NodeSelection(bucket, inputs), inputs["below"].clone()
        nodes, logits = selection.first(), first
        for step in range(bucket.steps):
            tokens, values = self._propose(bucket, inputs, nodes, logits, noisy)
            origin = nodes.origin.masked_fill(~nodes.ok, -1)
            out[step].copy_(torch.cat([torch.stack([origin, nodes.tokens], -1).double(), tokens.double(), values], -1))
            if step + 1 < bucket.steps:
                selection.attach(step, nodes, tokens, values)
                after = torch.arange(step * bucket.width, (step + 1) * bucket.width, device=out.device)
                pending = inputs["pending"][:, None] + after
                nodes = selection.best(pending)
                logits = self._step_forward(inputs, nodes, pending, below, slots)

    def _propose(
        self, bucket: StepBucket, inputs: StepInputs, nodes: StepNodes, logits: Tensor, noisy: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the proposals below each node, and their values in float64: [batch, width, num_proposals] both"""
        rows, words = len(nodes.depths) * bucket.width, None
        if noisy:
            at = nodes.depths.clamp(max=MAX_DEPTH - 1)[..., None].expand(-1, -1, 2)
            words = inputs["keys"].gather(1, at).to(torch.int32).view(rows, 2)
        by_text = (inputs["temperature"].view(torch.float64), inputs["has_noise"] > 0)
        temperature, has_noise = (part.repeat_interleave(bucket.width, output_size=rows) for part in by_text)
        tokens, values = proposals(logits, temperature, words, has_noise, bucket.num_proposals)
        shape = (bucket.batch, bucket.width, bucket.num_proposals)
        return tokens.view(shape), values.double().view(shape)

    def _step_forward(self, inputs: StepInputs, nodes: StepNodes, pending: Tensor, below: Tensor, slots: int) -> Tensor:
        """Store the nodes as these pending nodes and return their logits: [batch * width, vocab]"""
        below.scatter_(1, pending.clamp(max=MOST_PENDING - 1), nodes.depths)
        lengths = inputs["lengths"]
        self._layers_pass(
            0,
            {
                "tokens": nodes.tokens,
                "positions": (lengths[:, None] + nodes.depths).clamp(max=self.max_positions - 1),
                "slots": (lengths[:, None] + pending).masked_fill(~nodes.ok, self.pool.padding),
                "depths": nodes.depths,
                "lengths": lengths,
                "bits": nodes.bits,
                "below": below,
            },
            slots,
        )
        return self._logits(self._hidden[: nodes.tokens.numel()])


def _fits(requests: Sequence[MultiStepRequest], bucket: StepBucket) -> bool:
    """Return whether the sessions have slots for all steps and the buffers have room for all nodes."""
    sessions = [one.session for one in requests]
    if len(requests) > MOST_SESSIONS or len(set(map(id, sessions))) < len(requests):
        return False
    for one, session in zip(requests, sessions, strict=True):
        pending = session.pending_depths
        depths = [*(pending[slot] for slot in one.slots), *(node.depth for node in one.opened)]
        if max(depths) + bucket.steps > MAX_DEPTH or len(one.slots) > bucket.width or len(one.opened) > bucket.opened:
            return False
        if session.pending + bucket.taken > MOST_PENDING or bucket.taken > session.free:
            return False
    return True


_SIZES = ("lengths", "pending", "width", "nodes", "most_nodes", "deepest")
_INTEGERS = (*_SIZES, "has_noise", "has_shares", "first_count", "open_count")
_FLOATS = ("share", "floor", "temperature", "trust", "coverage", "open")  # by the bits of a float64


def _shapes(bucket: StepBucket) -> Shapes:
    each, opened = (bucket.batch, bucket.width), (bucket.batch, bucket.opened)
    return {
        **dict.fromkeys((*_INTEGERS, *_FLOATS), (bucket.batch,)),
        **dict.fromkeys(("first_scores", "first_depths"), each),
        **dict.fromkeys(("open_scores", "open_tokens", "open_depths"), opened),
        "first_bits": (*each, WORDS),
        "open_bits": (*opened, WORDS),
        "below": (bucket.batch, MOST_PENDING),
        "keys": (bucket.batch, MAX_DEPTH, 2),
    }


def _fill(host: dict[str, np.ndarray], row: int, one: MultiStepRequest) -> None:
    """Write one text's inputs; fractions are stored by their bits."""
    session, trust = one.session, one.trust
    depths, visible = session.pending_depths, session.visible_bits()
    sizes = (session.length, session.pending, one.width, one.nodes, one.most_nodes, one.deepest)
    counts = (bool(one.keys), trust.open is not None, len(one.slots), len(one.opened))
    floats = (one.share, one.floor, one.temperature, trust.temperature, trust.coverage, trust.open or 0.0)
    for name, value in zip(_INTEGERS, (*sizes, *counts), strict=True):
        host[name][row] = value
    for name, number in zip(_FLOATS, floats, strict=True):
        host[name].view(np.float64)[row] = number
    first, slots = len(one.slots), list(one.slots)
    host["below"][row, : len(depths)] = depths
    host["first_scores"].view(np.float64)[row, :first] = one.scores
    host["first_depths"][row, :first] = [depths[slot] for slot in slots]
    host["first_bits"][row, :first] = visible[slots]
    for number, node in enumerate(one.opened):
        host["open_scores"].view(np.float64)[row, number] = node.score
        host["open_tokens"][row, number], host["open_depths"][row, number] = node.token, node.depth
        host["open_bits"][row, number] = 0 if node.above == PREFIX else visible[node.above]
    if one.keys:
        host["keys"][row, : len(one.keys)] = one.keys


def _expanded_nodes(one: MultiStepRequest, found: np.ndarray, bucket: StepBucket) -> list[ExpandedNode]:
    """Convert a text's results [steps, width, columns], and add the expanded nodes to its session.

    A row without a node becomes a pending node that no other node sees.
    """
    before, num_proposals = one.session.pending, bucket.num_proposals
    expanded: list[ExpandedNode] = []
    numbers: dict[int, int] = {}  # of expanded nodes, by slot
    parents: list[int] = []
    # the slot of each row; the first step has as many nodes as were scored
    slots = [*one.slots, *[PREFIX] * (bucket.width - len(one.slots)), *range(before, before + bucket.taken)]
    for row, (origin, token, *offers) in enumerate(found.reshape(-1, found.shape[-1]).tolist()):
        origin, is_first, above, opened = int(origin), row < bucket.width, PREFIX, None
        if origin >= bucket.opened and not is_first:
            above = slots[origin - bucket.opened]
        elif origin >= 0 and not is_first:
            opened, above = origin, one.opened[origin].above
        if not is_first:
            parents.append(above)
        if origin < 0:
            continue
        parent = numbers.get(above, PREFIX) if opened is None else PREFIX
        numbers[slots[row]] = len(expanded)
        tokens, values = [int(one) for one in offers[:num_proposals]], offers[num_proposals:]
        expanded.append(ExpandedNode(opened, parent, int(token), slots[row], tokens, values))
    one.session.extend(parents)
    return expanded


class ExactGraphLlama(SteppingLlama):
    """Captured passes in exact mode. Keys and values are float64, unless they are stored in fewer bits."""

    exact_where = f"whose products of {FIXED} rows give a row other bits at another place"

    def _mask(self, inputs: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        """Return True for hidden slots."""
        return super()._mask(inputs, slots, window) < 0

    def _attend_batch(self, query: Tensor, stored: Tensor, mask: Tensor) -> Tensor:
        return pad_rows(attend_batch_exactly(query, stored[0], stored[1], mask).to(self.dtype), (FIXED,))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm(piece, weight) for piece in x.split(FIXED)])

    def _norm_heads(self, qkv: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm_heads(piece, weight) for piece in qkv.split(FIXED)])

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        def with_norm(normed: Normed) -> Linear:
            return lambda x, residual=None: normed.linear(self._norm(x, normed.norm), residual)

        layer = self._layers[0]
        normed = [(with_norm(one), self.config.hidden_size) for one in (layer.qkv, layer.gate_up, self._head)]
        alike = rows_are_independent([*normed, *self._linears()[2:]], FIXED, self.dtype, self.device)
        return ((FIXED,), (FIXED,)) if alike else ((), ())
