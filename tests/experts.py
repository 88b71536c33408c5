"""Mixtures of experts: the formula in numpy, and tiny random models, written by transformers and as GGUF files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outpace.models.llama.config.experts import SIGMOID_FLOOR, SOFTMAX, SWISH_FACTOR, Experts

Tensors = Callable[[str], np.ndarray]  # by name, after model.layers.N.


def route(x: np.ndarray, experts: Experts, tensor: Tensors) -> list[tuple[int, float]]:
    """Return the experts that a normed row chooses, in the order in which they are added, and their weights."""
    logits = tensor("mlp.gate.weight").astype(np.float64) @ x
    if experts.has_biases:
        logits = logits + tensor("mlp.gate.bias")
    shares = np.exp(logits - logits.max())
    scores = shares / shares.sum() if experts.scoring == SOFTMAX else 1 / (1 + np.exp(-logits))
    ranked = scores + tensor("mlp.gate.e_score_correction_bias") if experts.corrects_choice else scores
    chosen = np.sort(np.argsort(-ranked, kind="stable")[: experts.chosen])  # ties to the lower number
    weights = scores[chosen]
    if experts.norms_weights:
        weights = weights / (weights.sum() + (0 if experts.scoring == SOFTMAX else SIGMOID_FLOOR))
    return list(zip(chosen.tolist(), weights * experts.scale, strict=True))


def apply_expert(x: np.ndarray, experts: Experts, tensor: Tensors, part: str) -> np.ndarray:
    """Apply one expert, or the shared one, to a normed row."""
    biases = [0.0] * 3
    if experts.has_biases:
        biases = [tensor(f"{part}.{name}_proj.bias") for name in ("gate", "up", "down")]
    gate, up = (
        tensor(f"{part}.{name}_proj.weight").astype(np.float64) @ x + bias
        for name, bias in zip(("gate", "up"), biases, strict=False)
    )
    if experts.limit:
        gate, up = np.minimum(gate, experts.limit), np.clip(up, -experts.limit, experts.limit)
        inner = gate / (1 + np.exp(-SWISH_FACTOR * gate)) * (up + 1)
    else:
        inner = gate / (1 + np.exp(-gate)) * up
    return tensor(f"{part}.down_proj.weight") @ inner + biases[2]


def mixture(x: np.ndarray, experts: Experts, tensor: Tensors) -> np.ndarray:
    """Compute the mixture of experts of one row, which is normed: [hidden]"""
    total = np.zeros(len(x))
    for number, weight in route(x, experts, tensor):
        total += weight * apply_expert(x, experts, tensor, f"mlp.experts.{number}")
    if experts.shared_width:
        shared = apply_expert(x, experts, tensor, "mlp.shared_expert")
        gate = float(tensor("mlp.shared_expert_gate.weight")[0] @ x) if experts.gates_shared else np.inf
        total += shared / (1 + np.exp(-gate))
    return total
