"""Mixtures of experts by torch: rows are grouped by expert, and a row's bits do not depend on the other rows.

The router's products are float32, and its softmax or sigmoid float64. Each row's experts are added in the order of
their numbers, whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.llama.config.experts import SIGMOID_FLOOR, SOFTMAX, SWISH_FACTOR, Experts
from outpace.models.llama.torch.linear import Linear, apply_in_chunks, pack, pad_rows
from outpace.models.llama.torch.recurrent import halved_sum

ROUTER = ".mlp.gate."  # a part of the names of a router's tensors


class ExpertProduct:
    """One matrix, and its bias, of each expert."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], is_grouped: bool) -> None:
        """`weights` [outputs, inputs] and `biases` [outputs], by expert; which may be none. `is_grouped`: one
        product computes all of them, as is fast on a GPU."""
        self._stack = self._bias = None  # type: Tensor | None
        self.linears: list[Linear] = []
        if is_grouped:
            self._stack = torch.stack([*weights]).transpose(1, 2)
            self._bias = torch.stack([*biases]) if biases else None
        else:
            self.linears = [pack(one, biases[number] if biases else None) for number, one in enumerate(weights)]

    def __call__(self, rows: Tensor, ids: Tensor, row_counts: Sequence[int]) -> Tensor:
        """Apply to each row the matrix of its expert; `ids` int64 [rows] rise."""
        if self._stack is not None:
            numbers = torch.arange(len(self._stack), device=ids.device)
            ends = torch.searchsorted(ids, numbers, right=True).int()
            product = F.grouped_mm(rows, self._stack, offs=ends)
            return product if self._bias is None else product + self._bias[ids]
        products = []
        for linear, own in zip(
            self.linears, rows.split(ids.bincount(minlength=len(self.linears)).tolist()), strict=True
        ):
            if len(own):
                products.append(apply_in_chunks(linear, pad_rows(own, row_counts), None, row_counts)[: len(own)])
        return torch.cat(products)


@dataclass(frozen=True)
class ExpertWeights:
    """A layer's experts, each with its gates and ups side by side. The router is a product of its own.

    `norm` [hidden] is that of `Normed`, for all experts. `correction` [experts] is added to the scores for the choice
    only; `scales` [experts] are factors of weights. `shared`: the shared expert's gates and ups, its output, and the
    gate of its output if it has one.
    """

    sizes: Experts
    norm: Tensor | None
    gate_up: ExpertProduct
    down: ExpertProduct
    correction: Tensor | None = None
    scales: Tensor | None = None
    shared: tuple[Linear, Linear, Linear | None] | None = None

    def linears(self, hidden: int) -> list[tuple[Linear, int]]:
        """Return the products of one expert and of the shared one, with their input widths."""
        found = [(self.gate_up.linears[0], hidden), (self.down.linears[0], self.sizes.width)]
        if self.shared is not None:
            gate_up, down, gate = self.shared
            found += [(gate_up, hidden), (down, self.sizes.shared_width), *([(gate, hidden)] if gate else [])]
        return found

    def apply(
        self, logits: Tensor, normed: Tensor, row_counts: Sequence[int], wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute the mixture of the first rows of `normed`, one for each row of the router's `logits`.

        Returns [rows, hidden] in float32, and the chosen experts [rows, chosen]. `wide`: the type in which activations
        are computed.
        """
        ids, weights = choose(logits, self.sizes, self.correction)
        weights = weights if self.scales is None else weights * self.scales[ids]
        order = ids.flatten().argsort(stable=True)
        sorted_ids, places = ids.flatten()[order], torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        inner = self._activate(self.gate_up(normed[order // self.sizes.chosen], sorted_ids, row_counts), wide)
        outputs = self.down(inner, sorted_ids, row_counts)
        total = outputs.new_zeros(len(logits), outputs.shape[1], dtype=torch.float32)
        for rank, own in enumerate(places.view(ids.shape).unbind(1)):  # rising expert numbers
            total += outputs[own].float() * weights[:, rank, None]
        return total, ids

    def add_shared(self, total: Tensor, normed: Tensor, row_counts: Sequence[int], wide: torch.dtype) -> Tensor:
        """Add the shared expert's output to the mixture: [rows, hidden] in float32"""
        if self.shared is None:
            return total
        gate_up, down, gate = self.shared

        def product(linear: Linear, rows: Tensor) -> Tensor:
            return apply_in_chunks(linear, rows, None, row_counts)

        output = product(down, self._activate(product(gate_up, normed), wide)).to(wide)
        if gate is not None:
            output = output * product(gate, normed).to(wide).sigmoid()
        return total + output[: len(total)].float()

    def _activate(self, gate_up: Tensor, wide: torch.dtype) -> Tensor:
        gate, up = gate_up.to(wide).chunk(2, dim=-1)
        if self.sizes.is_gelu:
            return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
        if not self.sizes.limit:
            return (gate * gate.sigmoid() * up).to(gate_up.dtype)
        gate, up = gate.clamp(max=self.sizes.limit), up.clamp(-self.sizes.limit, self.sizes.limit)
        return (gate * (SWISH_FACTOR * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


def choose(logits: Tensor, sizes: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose each row's experts from float32 logits [rows, experts].

    Returns their numbers, int64 [rows, chosen] in rising order, and their weights, float32. Ties go to lower numbers.
    """
    wide = logits.double()
    scores = (wide - wide.amax(-1, keepdim=True)).exp() if sizes.scoring == SOFTMAX else wide.sigmoid()
    ranked = logits if correction is None else scores + correction
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : sizes.chosen].sort(-1).values
    weights = scores.gather(1, ids)
    if sizes.norms_weights:
        floor = 0.0 if sizes.scoring == SOFTMAX else SIGMOID_FLOOR
        weights = weights / (halved_sum(weights, -1) + floor)[:, None]
    elif sizes.scoring == SOFTMAX:
        weights = weights / halved_sum(scores, -1)[:, None]
    return ids, (weights * sizes.scale).float()


def load_experts(sizes: Experts, prefix: str, norm: Tensor, fetch: Callable[[str], Tensor]) -> ExpertWeights:
    """Load a layer's experts, whose names begin with `prefix`. `norm` [hidden]: the weights of the norm before them,
    times sqrt(hidden)."""
    first = fetch(f"{prefix}experts.0.gate_proj.weight")
    is_folded, on_gpu = first.dtype == torch.float32, first.is_cuda

    def fold(weight: Tensor) -> Tensor:
        return weight * norm if is_folded else weight

    def gate_up(part: str, end: str) -> Tensor:
        return torch.cat([fetch(f"{prefix}{part}.{name}_proj.{end}") for name in ("gate", "up")])

    parts = [f"experts.{number}" for number in range(sizes.count)]
    biased = parts if sizes.has_biases else []
    shared = None
    if sizes.shared_width:
        gate = pack(fold(fetch(f"{prefix}shared_expert_gate.weight"))) if sizes.gates_shared else None
        down = pack(fetch(f"{prefix}shared_expert.down_proj.weight"))
        shared = pack(fold(gate_up("shared_expert", "weight"))), down, gate
    return ExpertWeights(
        sizes,
        None if is_folded else norm,
        ExpertProduct(
            [fold(gate_up(part, "weight")) for part in parts], [gate_up(part, "bias") for part in biased], on_gpu
        ),
        ExpertProduct(
            [fetch(f"{prefix}{part}.down_proj.weight") for part in parts],
            [fetch(f"{prefix}{part}.down_proj.bias") for part in biased],
            on_gpu,
        ),
        fetch(f"{prefix}gate.e_score_correction_bias").double() if sizes.corrects_choice else None,
        fetch(f"{prefix}gate.expert_scale").float() if sizes.beside_mlp else None,
        shared,
    )
