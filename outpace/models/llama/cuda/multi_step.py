"""Several draft steps in one captured graph, so that the host waits once for all of them.

The first step's logits are those of the trees' roots, from any captured pass. The graph turns them into children,
expands the best of these by a pass through the model's layers, and so on. EAGLE-2 (arXiv:2406.16858) grows trees of the
same shape; in one graph every step has a fixed number of rows, and rows without a node write to a padding slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.core.errors import UserError
from outpace.core.logits import stable_top_k
from outpace.core.noise import gumbel_from_words
from outpace.core.tree import PREFIX
from outpace.models.llama.cuda.captures import MAX_PENDING, WORDS, Shapes
from outpace.models.llama.cuda.pool import GraphSession
from outpace.models.llama.cuda.runtime import MAX_NODES, MAX_SESSIONS, GraphLlama

_NONE = float("-inf")


class RootNode(NamedTuple):
    """The root of a text's tree, the only pending node of its session.

    `temperature` divides the logits. `keys` int32 [steps, 2]: those of the noise that is added to proposals below nodes
    of depth 0, 1, ...; None for none.
    """

    session: GraphSession
    temperature: float
    keys: np.ndarray | None


class ExpandedNode(NamedTuple):
    """A node that a step expanded, with its best proposals, best first. Its pending node is its number.

    It is the child with `token` of the `parent`-th node of the text; the root has the parent PREFIX. None instead of a
    node: the step had too few.
    """

    parent: int
    token: int
    tokens: list[int]
    values: list[float]


class _Candidates(NamedTuple):
    """Nodes that may be expanded: their path scores, tokens, depths and parents, [batch, nodes] each, and the pending
    nodes that their parents see, [batch, nodes, WORDS]."""

    scores: Tensor
    tokens: Tensor
    depths: Tensor
    parents: Tensor
    bits: Tensor

    def at(self, places: Tensor) -> _Candidates:
        bits = self.bits.gather(1, places[..., None].expand(-1, -1, WORDS))
        flat = [part.gather(1, places) for part in self[:4]]
        return _Candidates(flat[0], flat[1], flat[2], flat[3], bits)

    def joined(self, others: _Candidates) -> _Candidates:
        return _Candidates(*(torch.cat(pair, 1) for pair in zip(self, others, strict=True)))


@dataclass(frozen=True)
class MultiStepGraph:
    """`steps` draft steps of a model: the first expands the root of each tree, each later one at most `width` nodes,
    which get at most `width` children out of `num_proposals` tokens each."""

    model: GraphLlama
    steps: int
    width: int
    num_proposals: int

    def __post_init__(self) -> None:
        """Raise UserError for more nodes than a captured pass has space for."""
        if self.num_nodes > MAX_PENDING or self.width > MAX_NODES:
            max_nodes = min(MAX_NODES, (MAX_PENDING - 1) // (self.steps - 1))
            raise UserError(f"width is {self.width}, {self.steps} steps in one graph take at most {max_nodes}")

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the steps may expand in a tree."""
        return 1 + self.width * (self.steps - 1)

    def run(self, roots: Sequence[RootNode], logits: Tensor) -> list[list[ExpandedNode | None]]:
        """Take the steps below roots with these logits [roots, vocab]; return the expanded nodes of each, in order,
        which are then pending in its session."""
        found = []
        for start in range(0, len(roots), MAX_SESSIONS):
            block = roots[start : start + MAX_SESSIONS]
            for root in block:
                root.session.reserve(root.session.used + self.num_nodes - 1)
                root.session.apply_moves()
            self.model._place([root.session for root in block])
            rows = self._replay(block, logits[start : start + MAX_SESSIONS])
            found += [_extended(root.session, rows[root.session.place], self.num_proposals) for root in block]
        return found

    @torch.inference_mode()
    def _replay(self, roots: Sequence[RootNode], logits: Tensor) -> np.ndarray:
        """Fill the buffers, replay the graph, captured now if it was not before, and wait for its results: float64
        [batch, nodes, 2 + 2 * num_proposals]"""
        model, batch = self.model, next_power_of_two(len(roots))
        longest = max(root.session.used for root in roots)
        slots = min(next_power_of_two(longest + self.num_nodes, model.min_slots), model.pool.slots)
        has_noise = any(root.keys is not None for root in roots)
        key = ("steps", batch, *self._sizes, slots, has_noise, logits.shape[1])
        inputs = model._inputs(("steps", batch, self.steps), self._shapes(batch))
        first = model.captures.buffers(
            ("step scores", batch, logits.shape[1]), lambda: logits.new_zeros(batch, logits.shape[1])
        )
        shape = (batch, self.num_nodes, 2 + 2 * self.num_proposals)
        out = model.captures.buffers(
            ("step results", *shape), lambda: torch.zeros(shape, dtype=torch.float64, device=model.device)
        )
        work = partial(self._steps_pass, inputs.device, first, out, slots, has_noise)
        host = model.captures.begin(key, inputs, work, model.pool.kv, model._hidden, first, out)
        for root in roots:
            row = root.session.place
            host["lengths"][row] = root.session.length
            host["temperature"].view(np.float64)[row] = root.temperature
            if root.keys is not None:
                host["has_noise"][row], host["keys"][row] = 1, root.keys
        inputs.send()
        first.index_copy_(0, to_device([root.session.place for root in roots], np.int64, model.device), logits)
        model.captures.replay(key)
        found: np.ndarray = out.cpu().numpy()  # the only wait
        return found

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.steps, self.width, self.num_proposals

    def _shapes(self, batch: int) -> Shapes:
        """Return the shapes of the inputs; a temperature is stored by the bits of a float64."""
        return dict.fromkeys(("lengths", "temperature", "has_noise"), (batch,)) | {"keys": (batch, self.steps, 2)}

    def _steps_pass(self, inputs: dict[str, Tensor], first: Tensor, out: Tensor, slots: int, has_noise: bool) -> None:
        """Captured: compute all steps' proposals from the first step's logits."""
        batch, width = len(first), self.width
        zeros = inputs["lengths"].new_zeros(batch, 1)
        below = zeros.repeat(1, MAX_PENDING)  # depths of the pending nodes
        nodes = _Candidates(zeros.double(), zeros, zeros, zeros - 1, zeros[..., None].repeat(1, 1, WORDS))
        bits, logits, rows = _own_bit(zeros), first, []  # the root sees itself, pending node 0
        candidates: _Candidates | None = None
        for step in range(self.steps):
            tokens, values = self._propose(inputs, nodes.depths, logits, has_noise)
            exists = nodes.scores > _NONE
            parents = nodes.parents.masked_fill(~exists, -2)
            rows.append(torch.cat([torch.stack([parents, nodes.tokens], -1).double(), tokens.double(), values], -1))
            if step + 1 == self.steps:
                break
            number = _numbers(step, width, zeros)  # of the step's nodes
            children = self._children(nodes, bits, number, tokens, values)
            candidates = children if candidates is None else candidates.joined(children)
            best, places = candidates.scores.sort(dim=1, descending=True, stable=True)
            best, places = best[:, :width], places[:, :width]
            nodes = candidates.at(places)
            candidates.scores.scatter_(1, places, _NONE)
            number = _numbers(step + 1, width, zeros)
            bits = nodes.bits | _own_bit(number)
            below.scatter_(1, number.expand(batch, -1), nodes.depths)
            logits = self._forward(inputs, nodes, number, bits, below, slots)
        out.copy_(torch.cat(rows, 1))

    def _children(
        self, nodes: _Candidates, bits: Tensor, number: Tensor, tokens: Tensor, values: Tensor
    ) -> _Candidates:
        """Return the `width` likeliest children of each node. A child's chance is the share of its value among the
        proposals' values."""
        shape, width = (*nodes.tokens.shape, self.width), self.width
        scores = nodes.scores[..., None] + torch.log_softmax(values, -1)[..., :width]
        return _Candidates(
            torch.nan_to_num(scores, nan=_NONE).flatten(1),
            tokens[..., :width].flatten(1),
            (nodes.depths + 1)[..., None].expand(shape).flatten(1),
            number[..., None].expand(shape).flatten(1),
            bits[:, :, None].expand(*shape, WORDS).flatten(1, 2),
        )

    def _propose(
        self, inputs: dict[str, Tensor], depths: Tensor, logits: Tensor, has_noise: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the best tokens below each node and their values on the rule's scale, in float64: [batch, nodes,
        num_proposals] both"""
        count = depths.shape[1]
        temperature, noisy = (
            inputs[name].repeat_interleave(count, output_size=depths.numel()) for name in ("temperature", "has_noise")
        )
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scale = torch.log_softmax(wide / temperature.view(torch.float64).to(wide.dtype)[:, None], dim=-1)
        if has_noise:
            words = inputs["keys"].gather(1, depths[..., None].expand(-1, -1, 2)).to(torch.int32).view(-1, 2)
            scale = torch.where(noisy[:, None] > 0, scale + gumbel_from_words(words, scale.shape[-1]), scale)
        tokens, values = stable_top_k(scale, self.num_proposals)
        shape = (*depths.shape, self.num_proposals)
        return tokens.view(shape), values.double().view(shape)

    def _forward(
        self, inputs: dict[str, Tensor], nodes: _Candidates, number: Tensor, bits: Tensor, below: Tensor, slots: int
    ) -> Tensor:
        """Store the nodes as pending nodes `number` and return their logits: [batch * width, vocab]"""
        model, lengths = self.model, inputs["lengths"]
        own = {
            "tokens": nodes.tokens,
            "positions": (lengths[:, None] + nodes.depths).clamp(max=model.max_positions - 1),
            "slots": (lengths[:, None] + number).masked_fill(nodes.scores == _NONE, model.pool.padding),
            "depths": nodes.depths,
            "lengths": lengths,
            "bits": bits,
            "below": below,
        }
        model._layers_pass(0, own, slots)
        return model._logits(model._hidden[: nodes.tokens.numel()])


def _numbers(step: int, width: int, like: Tensor) -> Tensor:
    """Return the numbers of a step's nodes: [1, nodes]"""
    first = 1 + (step - 1) * width
    return torch.arange(first, first + width, device=like.device)[None] if step else like[:1]


def _own_bit(numbers: Tensor) -> Tensor:
    """Return the bit of each pending node in a visibility mask: int64 [..] to [.., WORDS]"""
    words = torch.arange(WORDS, device=numbers.device)
    return (words == (numbers // 64)[..., None]).long() << (numbers % 64)[..., None]


def _extended(session: GraphSession, rows: np.ndarray, num_proposals: int) -> list[ExpandedNode | None]:
    """Convert a text's results, and add the expanded nodes to its session. A row without a node becomes a pending node
    that no other node sees."""
    nodes: list[ExpandedNode | None] = []
    for parent, token, *offers in rows.tolist():
        tokens, values = [int(one) for one in offers[:num_proposals]], offers[num_proposals:]
        nodes.append(ExpandedNode(int(parent), int(token), tokens, values) if parent >= PREFIX else None)
    session.extend([PREFIX if node is None else node.parent for node in nodes[1:]])
    return nodes
