"""Several draft steps in one graph: what is expanded next is chosen on the device, and the host waits once for all.

The first step's forward is any captured pass over the trees' frontiers. The graph turns its scores into children,
expands the best of these by a forward of the same layers, and so on. EAGLE-2 (arXiv:2406.16858) grows trees of such a
shape; in one graph every step has a fixed number of rows, and those without a node write to a slot that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.core.logits import SparseLogits, tensor_of
from outpace.core.multi_step import MAX_DEPTH, ExpandedNode, MultiStepRequest
from outpace.core.tree import PREFIX
from outpace.models.llama.cuda.captures import MOST_PENDING, WORDS, Shapes, StaticInputs
from outpace.models.llama.cuda.pool import LEAST
from outpace.models.llama.cuda.runtime import MOST_SESSIONS, GraphLlama
from outpace.models.llama.cuda.step_choice import (
    Given,
    NodeSelection,
    RootMailbox,
    RootTracker,
    StepBucket,
    StepNodes,
    proposals,
)
from outpace.models.llama.torch.attention import ExactAttention, attend_batch_exactly, tree_mask
from outpace.models.llama.torch.linear import FIXED, Linear, rows_stay
from outpace.models.llama.torch.weights import Normed


class SteppingLlama(GraphLlama):
    """Captured passes, and draft steps several at once."""

    @property
    def several_steps(self) -> bool | None:  # type: ignore[override]  # by the device
        """They save launches and waits, which only a device has."""
        return None if any(self._skipped) else not self.captures.is_eager

    def draft_steps(
        self, asked: Sequence[MultiStepRequest], scored: SparseLogits, steps: int, width: int, offered: int
    ) -> list[list[ExpandedNode]] | None:
        is_told = any(one.mail is not None for one in asked)
        sizes = StepBucket(next_power_of_two(len(asked)), width, steps, offered, is_told)
        if any(self._skipped) or offered > self.vocab_size or not _have_room(asked, sizes):
            return None
        for one in asked:
            one.session.reserve(one.session.held + sizes.taken)
            one.session.settle()
        self.pool.bring_to_front([one.session for one in asked])
        self.captures.forget_if_moved(self.pool.kv, *self._turns.tables)
        found = self._run_steps(asked, tensor_of(scored.values), sizes)  # [steps, batch, width, columns]
        return [_taken(one, found[:, one.session.place], sizes) for one in asked]

    @torch.inference_mode()
    def _run_steps(self, asked: Sequence[MultiStepRequest], scores: Tensor, sizes: StepBucket) -> np.ndarray:
        """Fills the buffers, replays the graph, and waits for what it gives."""
        most, noisy = max(one.session.held for one in asked) + sizes.taken, any(one.keys for one in asked)
        slots = min(next_power_of_two(most, LEAST), self.pool.slots)
        inputs = self._inputs(("steps", sizes), lambda: StaticInputs(_shapes(sizes), self.device))
        first, out = self._step_buffers(scores, sizes)
        self._hidden = self.captures.buffers("hidden", self._make_hidden)
        box = self._box(sizes.batch) if sizes.is_told else None
        key = ("steps", sizes, slots, noisy, scores.shape[-1])
        if not self.captures.has(key):
            inputs.begin({})
            inputs.send()
            work = partial(self._steps_pass, sizes, inputs.device, first, out, slots, noisy, box)
            self.captures.prepare(key, work, inputs.buffer, self.pool.kv, self._hidden, first, out)
        host = inputs.begin({})
        for one in asked:
            _fill(host, one.session.place, one)
        inputs.send()
        places = [one.session.place * sizes.width + node for one in asked for node in range(len(one.slots))]
        first.index_copy_(0, to_device(places, np.int64, self.device), scores)
        with _telling(asked, box):
            self.captures.replay(key)
            found: np.ndarray = out.cpu().numpy()  # the one wait
        return found

    def _step_buffers(self, scores: Tensor, sizes: StepBucket) -> tuple[Tensor, Tensor]:
        """Where the first step's scores go, and where the results come from."""
        rows, vocab = sizes.batch * sizes.width, scores.shape[-1]
        shape = (sizes.steps, sizes.batch, sizes.width, sizes.columns)
        first: Tensor = self.captures.buffers(("step scores", rows, vocab), lambda: scores.new_zeros(rows, vocab))
        out: Tensor = self.captures.buffers(
            ("step results", sizes), lambda: torch.zeros(shape, dtype=torch.float64, device=self.device)
        )
        return first, out

    def _box(self, texts: int) -> RootMailbox:
        """Where the steps fetch what the host says meanwhile: nothing yet."""
        box: RootMailbox = self.captures.buffers(
            ("step mail", texts), lambda: RootMailbox(texts, self.vocab_size - 1, self.device)
        )
        box.clear()
        return box

    def _steps_pass(
        self,
        sizes: StepBucket,
        given: Given,
        first: Tensor,
        out: Tensor,
        slots: int,
        noisy: bool,
        box: RootMailbox | None,
    ) -> None:
        """Captured: the first step's scores to all steps' proposals."""
        course = RootTracker(box, given["pending_bits"], given["below"]) if box is not None else None
        choice, below = NodeSelection(sizes, given, course), given["below"].clone()
        nodes, logits = choice.first(), first
        for step in range(sizes.steps):
            tokens, values = self._proposed(sizes, given, nodes, logits, noisy)
            origin = nodes.origin.masked_fill(~nodes.ok, -1)
            out[step].copy_(torch.cat([torch.stack([origin, nodes.tokens], -1).double(), tokens.double(), values], -1))
            if step + 1 < sizes.steps:
                choice.attach_children(step, nodes, tokens, values)
                after = torch.arange(step * sizes.width, (step + 1) * sizes.width, device=out.device)
                pending = given["pending"][:, None] + after
                nodes = choice.best(step, pending)
                logits = self._step_forward(given, nodes, pending, below, slots)

    def _proposed(
        self, sizes: StepBucket, given: Given, nodes: StepNodes, logits: Tensor, noisy: bool
    ) -> tuple[Tensor, Tensor]:
        """What is proposed below each node, and its values in float64. [batch, width, offered] both"""
        rows, words = len(nodes.depths) * sizes.width, None
        if noisy:
            at = nodes.depths.clamp(max=MAX_DEPTH - 1)[..., None].expand(-1, -1, 2)
            words = given["keys"].gather(1, at).to(torch.int32).view(rows, 2)
        of_row = (given["temperature"].view(torch.float64), given["has_noise"] > 0)
        temperature, has_noise = (part.repeat_interleave(sizes.width, output_size=rows) for part in of_row)
        tokens, values = proposals(logits, temperature, words, has_noise, sizes.offered)
        shape = (sizes.batch, sizes.width, sizes.offered)
        return tokens.view(shape), values.double().view(shape)

    def _step_forward(self, given: Given, nodes: StepNodes, pending: Tensor, below: Tensor, slots: int) -> Tensor:
        """Scores of the nodes, which become these pending ones. [batch * width, vocab]"""
        below.scatter_(1, pending.clamp(max=MOST_PENDING - 1), nodes.depths)
        lengths = given["lengths"]
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


def _have_room(asked: Sequence[MultiStepRequest], sizes: StepBucket) -> bool:
    """Whether the sessions have slots for all steps, and the buffers places."""
    sessions = [one.session for one in asked]
    if len(asked) > MOST_SESSIONS or len(set(map(id, sessions))) < len(asked):
        return False
    for one, session in zip(asked, sessions, strict=True):
        slots = one.slots if one.mail is None else range(session.pending)
        depths = [*(session.pending_depths[slot] for slot in slots), *(node.depth for node in one.opened)]
        if max(depths) + sizes.steps > MAX_DEPTH or len(one.slots) > sizes.width or len(one.opened) > sizes.opened:
            return False
        if session.pending + sizes.taken > MOST_PENDING or sizes.taken > session.free:
            return False
    return True


def _shapes(sizes: StepBucket) -> Shapes:
    one, each, opened = (sizes.batch,), (sizes.batch, sizes.width), (sizes.batch, sizes.opened)
    return {
        **dict.fromkeys(("lengths", "pending", "width", "nodes", "most_nodes", "deepest"), one),
        **dict.fromkeys(("has_noise", "has_shares", "first_count", "open_count"), one),
        **dict.fromkeys(("share", "floor", "temperature", "trust", "coverage", "open"), one),
        **dict.fromkeys(("first_scores", "first_depths"), each),
        **dict.fromkeys(("open_scores", "open_tokens", "open_depths"), opened),
        "first_bits": (*each, WORDS),
        "open_bits": (*opened, WORDS),
        "below": (sizes.batch, MOST_PENDING),
        "keys": (sizes.batch, MAX_DEPTH, 2),
        **({"pending_bits": (sizes.batch, MOST_PENDING, WORDS)} if sizes.is_told else {}),
    }


def _fill(host: dict[str, np.ndarray], row: int, one: MultiStepRequest) -> None:
    """One text's numbers; those with a fraction by their bits."""
    session, trust = one.session, one.trust
    depths, seen = session.pending_depths, session.seen_bits()
    for name, value in (
        ("lengths", session.length),
        ("pending", session.pending),
        ("width", one.width),
        ("nodes", one.nodes),
        ("most_nodes", one.most_nodes),
        ("deepest", one.deepest),
        ("has_noise", bool(one.keys)),
        ("has_shares", trust.open is not None),
        ("first_count", len(one.slots)),
        ("open_count", len(one.opened)),
    ):
        host[name][row] = value
    for name, number in (
        ("share", one.share),
        ("floor", one.floor),
        ("temperature", one.temperature),
        ("trust", trust.temperature),
        ("coverage", trust.coverage),
        ("open", trust.open or 0.0),
    ):
        host[name].view(np.float64)[row] = number
    first, slots = len(one.slots), list(one.slots)
    host["below"][row, : len(depths)] = depths
    host["first_scores"].view(np.float64)[row, :first] = one.scores
    host["first_depths"][row, :first] = [depths[slot] for slot in slots]
    host["first_bits"][row, :first] = seen[slots]
    for number, node in enumerate(one.opened):
        host["open_scores"].view(np.float64)[row, number] = node.score
        host["open_tokens"][row, number], host["open_depths"][row, number] = node.token, node.depth
        host["open_bits"][row, number] = 0 if node.above == PREFIX else seen[node.above]
    if one.keys:
        host["keys"][row, : len(one.keys)] = one.keys
    if one.mail is not None:
        host["pending_bits"][row, : len(seen)] = seen


def _taken(one: MultiStepRequest, found: np.ndarray, sizes: StepBucket) -> list[ExpandedNode]:
    """A text's results [steps, width, columns], and its session with what was expanded: a row that stood for no node
    is a pending node that nobody sees."""
    before, offered = one.session.pending, sizes.offered
    expanded: list[ExpandedNode] = []
    numbers: dict[int, int] = {}  # of what was expanded, by slot
    parents: list[int] = []
    # of each row; the first step has as many nodes as were scored
    slots = [*one.slots, *[PREFIX] * (sizes.width - len(one.slots)), *range(before, before + sizes.taken)]
    for row, (origin, token, *offers) in enumerate(_rows(found)):
        is_first = row < sizes.width
        if not is_first:
            parents.append(PREFIX)
        if origin < 0:
            continue
        number, opened, parent, below = len(expanded), None, PREFIX, None
        slot = slots[row]
        if origin >= sizes.below:
            parents[-1] = int(origin) - sizes.below
            parent = numbers.get(parents[-1], PREFIX)
            below = None if parent != PREFIX else parents[-1]
        elif not is_first:
            opened = int(origin) if origin < sizes.opened else None
            parents[-1] = slots[int(origin) - sizes.opened] if opened is None else one.opened[opened].above
            parent = numbers[parents[-1]] if opened is None else PREFIX
        numbers[slot] = number
        tokens, values = [int(one) for one in offers[:offered]], offers[offered:]
        expanded.append(ExpandedNode(opened, parent, int(token), slot, tokens, values, below))
    one.session.extend(parents)
    return expanded


@contextmanager
def _telling(asked: Sequence[MultiStepRequest], box: RootMailbox | None) -> Iterator[None]:
    """What is sent to the texts meanwhile goes to where the steps fetch it."""
    if box is None:
        yield
        return
    told = [(one.mail, one.session.place) for one in asked if one.mail is not None]
    try:
        for mail, place in told:
            mail.begin(partial(box.write, place))
        yield
    finally:
        for mail, _ in told:
            mail.end()


def _rows(found: np.ndarray) -> Iterator[list[Any]]:
    """[steps, width, columns]"""
    yield from found.reshape(-1, found.shape[-1]).tolist()


class ExactGraphLlama(SteppingLlama):
    """As GraphLlama. Keys and values are float64, unless they are held in fewer bits."""

    exact_where = f"whose products of {FIXED} rows give a row other bits at another place"

    def _mask(self, given: dict[str, Tensor], slots: int, window: int | None) -> Tensor:
        """True where a slot is hidden."""
        return tree_mask(given["bits"], given["lengths"], given["depths"], given["below"], slots, window) < 0

    def _attend_all(self, number: int, query: Tensor, held: Tensor, mask: Tensor) -> Tensor:
        attention = self._attention[number]
        assert isinstance(attention, ExactAttention)
        if not self._holding.is_own:
            held = attention.rounded(held)
        keys, values = held
        mixed = attend_batch_exactly(query, keys, values, mask).to(self.dtype)
        missing = -len(mixed) % FIXED
        return torch.cat([mixed, mixed.new_zeros(missing, mixed.shape[1])]) if missing else mixed

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm(piece, weight) for piece in x.split(FIXED)])

    def _norm_heads(self, mixed: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([super(ExactGraphLlama, self)._norm_heads(piece, weight) for piece in mixed.split(FIXED)])

    def _probe(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layer, hidden, config = self._layers[0], self.config.hidden_size, self.config
        narrow = [(self._tried(normed), hidden) for normed in (layer.qkv, layer.gate_up, self._head)]
        wide = [(layer.output, config.num_heads * config.head_dim), (layer.down, config.intermediate_size)]
        if not config.sandwich_norms:
            wide = [(partial(_added, linear, hidden), inputs) for linear, inputs in wide]
        alike = rows_stay([*narrow, *wide], FIXED, self.dtype, self.device)
        return ((FIXED,), (FIXED,)) if alike else ((), ())

    def _tried(self, normed: Normed) -> Linear:
        return lambda x, residual=None: normed.linear(self._norm(x, normed.norm), residual)


def _added(linear: Linear, hidden: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """As the forward calls it, with a residual: that is another kernel on a CPU."""
    return linear(x, x.new_ones(len(x), hidden))
