"""Rules that decide how many drafted patches are kept, and draw the patch after them.

p and q are the densities of target and draft. The exact rule uses only `sample` and `log_prob`, so it works with any
density.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from outpace.core.errors import UserError, check_range

_MAX_VALUES = 1 << 22  # values that are drawn at once to find a patch of the residual
_MAX_DRAWS = 1 << 20  # then the last draw from p is taken: the error is below 1 / (e _MAX_DRAWS) in total variation


class PatchVerdict(NamedTuple):
    """The number of accepted drafts of each row, [rows], and the patch that follows them, [rows, points]."""

    accepted: Tensor
    patch: Tensor


class PatchRule(ABC):
    """Judges K drafted patches of each row."""

    lossless: bool

    @abstractmethod
    def verify(self, drafts: Tensor, q: Sequence[Distribution], p: Distribution) -> PatchVerdict:
        """Judge drafts [rows, K, points]; draft i was drawn from the last position of `q[i]` (batch [rows, positions]),
        and `p` has batch [rows, K + 1]."""


class ExactRule(PatchRule):
    """Keeps p: accept x with min(1, p(x) / q(x)); after a rejection draw from the residual, proportional to (p - q)+;
    after full acceptance draw from p.

    The residual is drawn by thinning: t ~ p is kept with probability (1 - q(t) / p(t))+. If p and q are Gaussian with
    equal scales, the rejected draft is reflected instead (the reflection coupling; Bou-Rabee et al., arXiv:1805.00452).
    """

    lossless = True

    def verify(self, drafts: Tensor, q: Sequence[Distribution], p: Distribution) -> PatchVerdict:
        """Judge by the whole ratio of densities, with its normalising constants."""
        fresh = p.sample()  # [rows, K + 1, points]; the bonus patch, or the first candidate of the residual
        log_ratio = _log_density(p, "target", drafts, fresh) - _draft_log_density(q, drafts)
        accepted = _count_leading(torch.rand(log_ratio.shape).log() < log_ratio)
        rows = torch.arange(len(drafts))
        patch = fresh[rows, accepted].clone()
        rejected = accepted < len(q)
        for position in accepted[rejected].unique().tolist():
            at = accepted == position
            reflected = _reflect(drafts[:, position], q[position], p, position)
            if reflected is not None:
                patch[at & reflected[1]] = reflected[0][at & reflected[1]]
                rejected &= ~(at & reflected[1])
        self._draw_residual(patch, rejected, accepted, q, p, fresh)
        return PatchVerdict(accepted, patch)

    def _draw_residual(
        self,
        patch: Tensor,
        rejected: Tensor,
        accepted: Tensor,
        q: Sequence[Distribution],
        p: Distribution,
        fresh: Tensor,
    ) -> None:
        """Write a draw from the residual into each rejected row of `patch`."""
        rows, missing, candidates, drawn = torch.arange(len(patch)), rejected.clone(), fresh[None], 1
        max_samples = max(1, _MAX_VALUES // fresh.numel())
        while missing.any():
            log_p = _log_density(p, "target", candidates[..., :-1, :], candidates)
            kept = torch.rand(log_p.shape) < -torch.expm1(_draft_log_density(q, candidates) - log_p)
            here = kept[:, rows, accepted.clamp(max=len(q) - 1)]  # [draws, rows]
            first, found = here.int().argmax(0), here.any(0) & missing
            if drawn >= _MAX_DRAWS:
                found = missing
            patch[found] = candidates[first, rows, accepted][found]
            missing &= ~found
            candidates = p.sample(torch.Size([min(drawn, max_samples)]))
            drawn += len(candidates)


@dataclass(frozen=True)
class StrideRule(PatchRule):
    """STRIDE as published (arXiv:2511.18191); lossy: the forecasts follow neither p nor q.

    The ratio has no normalising constants, is multiplied by `bias`, and a draft whose mean squared distance from p's
    mean is at most `tolerance` is accepted in any case. After a rejection it draws from p itself.
    """

    bias: float = 1.0
    tolerance: float = 0.0
    lossless = False

    def __post_init__(self) -> None:
        """Raise UserError for a parameter out of range."""
        check_range("bias", self.bias, 1.0)
        check_range("tolerance", self.tolerance, 0.0)

    def verify(self, drafts: Tensor, q: Sequence[Distribution], p: Distribution) -> PatchVerdict:
        """Judge by the ratio of the densities, each relative to its own at its mean."""
        fresh, centre = p.sample(), p.mean
        exponent = _log_density(p, "target", drafts, fresh) - _log_density(p, "target", centre[:, :-1], centre)
        own = _draft_log_density(q, drafts) - _draft_log_density(q, torch.stack([one.mean[:, -1] for one in q], 1))
        is_accepted = torch.rand(own.shape).log() < exponent - own + math.log(self.bias)
        distance = (drafts - centre[:, :-1]).square().mean(-1)
        accepted = _count_leading(is_accepted | (distance <= self.tolerance if self.tolerance else False))
        return PatchVerdict(accepted, fresh[torch.arange(len(drafts)), accepted])


def check_finite(values: Tensor, what: str) -> None:
    """Raise UserError if a sampled value is not finite."""
    if not values.isfinite().all():
        position = (~values.isfinite()).any(-1).nonzero()[0, -1].item()
        raise UserError(f"the {what} draws a value that is not finite for patch {position + 1} of a round")


def _log_density(p: Distribution, what: str, values: Tensor, fresh: Tensor) -> Tensor:
    """Return log p of values [..., K, points] as [..., K]; p has one position more, which `fresh` fills."""
    log_p: Tensor = p.log_prob(torch.cat([values, fresh[..., -1:, :]], dim=-2))[..., :-1]
    return _checked(log_p, what)


def _draft_log_density(q: Sequence[Distribution], values: Tensor) -> Tensor:
    """Return log q of values [..., K or more, points] as [..., K]."""
    log_q = torch.stack([one.log_prob(values[..., at, None, :])[..., -1] for at, one in enumerate(q)], dim=-1)
    return _checked(log_q, "draft")


def _checked(log_density: Tensor, what: str) -> Tensor:
    """Raise UserError for an infinite or NaN density; a density of 0 is allowed."""
    bad = log_density.isnan() | (log_density == math.inf)
    if bad.any():
        *_, row, position = bad.nonzero()[0].tolist()
        value = log_density[bad][0].exp().item()
        raise UserError(f"the density of the {what} is {value} at patch {position + 1} of a round, in row {row}")
    return log_density


def _count_leading(is_accepted: Tensor) -> Tensor:
    """Return how many drafts of each row are accepted before the first rejection."""
    return is_accepted.long().cumprod(-1).sum(-1)


def _reflect(drafts: Tensor, q: Distribution, p: Distribution, position: int) -> tuple[Tensor, Tensor] | None:
    """Return drafts reflected at the plane halfway between the means, and which rows have equal scales; None unless p
    and q are Gaussian."""
    if not all(isinstance(one, Independent) and isinstance(one.base_dist, Normal) for one in (p, q)):
        return None
    mean, scale = p.base_dist.loc[:, position], p.base_dist.scale[:, position]  # type: ignore[attr-defined]
    own = q.base_dist.loc[:, -1]  # type: ignore[attr-defined]
    is_equal = (scale == q.base_dist.scale[:, -1]).all(-1)  # type: ignore[attr-defined]
    noise, gap = (drafts - own) / scale, (own - mean) / scale
    direction = gap / gap.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return mean + scale * (noise - 2.0 * (direction * noise).sum(-1, keepdim=True) * direction), is_equal
