"""From logits to p: temperature, top-k, top-p and min-p, in the order of transformers and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.arrays import to_device, torch
from outpace.core.errors import check_range, check_share, check_whole

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 2**31 - 1
_NUCLEUS = 1024  # candidates sorted first; the whole row is sorted only if their mass is below top_p


@dataclass(frozen=True)
class Sampling:
    """Sampling options. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 disable a filter."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_whole("top_k", self.top_k, 0)
        check_share("top_p", self.top_p)
        check_range("min_p", self.min_p, 0.0, 1.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        return not self.is_greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def kernel_filters(self) -> tuple[int, float, float]:
        """Return top_k, top_p and min_p as the kernels take them.

        A top_k beyond their word size keeps all tokens anyway.
        """
        return (min(self.top_k, _LARGEST), self.top_p, self.min_p) if self.filters else (0, 1.0, 0.0)


GREEDY = Sampling()


def log_probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return log p of each row under its own sampling options, -inf if filtered out. [rows, vocab] to [rows, vocab]

    A row's result depends on that row only. Greedy rows are scaled by 1 and not filtered.
    """
    return torch.log_softmax(filter_logits(logits, samplings), dim=-1)


def race_winners(log_p: Tensor, race: Tensor) -> Tensor:
    """Return argmax(p / E) of each row, where `race` has E ~ Exp(1): [rows, vocab] both, to [rows]."""
    weights = torch.exp(log_p - log_p.amax(dim=-1, keepdim=True))
    return (weights / race).argmax(dim=-1)


def filter_logits(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return logits over temperature, -inf if filtered out: `log_probs` before the softmax. [rows, vocab]

    Returns `logits` itself if nothing changes.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision is too coarse for p
    if not any(s.filters or s.temperature not in (0.0, 1.0) for s in samplings):
        return logits
    temperatures = [1.0 if s.is_greedy else s.temperature for s in samplings]
    own = np.float64 if logits.dtype == torch.float64 else np.float32
    scale = to_device(temperatures, own, logits.device)
    logits = logits / scale[:, None]
    for row, sampling in enumerate(samplings):
        if sampling.filters:
            floor = _threshold(logits[row], sampling)
            logits[row].masked_fill_(logits[row] < floor, float("-inf"))
    return logits


def _threshold(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the lowest kept logit; equal logits are kept or removed together, whatever their order. [vocab] to []"""
    # On a device all are sorted: the host would have to wait to learn whether fewer suffice.
    max_count = _NUCLEUS if logits.device.type == "cpu" else len(logits)
    count = min(sampling.top_k or max_count, len(logits))
    top = torch.topk(logits, count).values  # [count], descending
    # A device sums in its own order; float64 hides the difference where the sum crosses top_p.
    wide = None if logits.device.type == "cpu" else torch.float64
    floor = top[-1] if sampling.top_k else logits.new_full((), float("-inf"))
    if sampling.top_p < 1.0:
        total = torch.logsumexp(top if sampling.top_k else logits, dim=-1)
        mass = torch.exp(top - total).cumsum(0, dtype=wide)
        if not sampling.top_k and count < len(logits) and mass[-1] < sampling.top_p:
            top = torch.sort(logits, descending=True).values
            mass = torch.exp(top - total).cumsum(0, dtype=wide)
        kept = (mass < sampling.top_p).sum().clamp(max=len(top) - 1)  # the token that crosses top_p is kept
        floor = torch.maximum(floor, top.gather(0, kept[None])[0])
    if sampling.min_p:
        floor = torch.maximum(floor, top[0] + torch.log(top.new_full((), sampling.min_p)))
    return floor
