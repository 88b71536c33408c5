"""The loss of a draft's logits: cross-entropy on the target's token, and divergence from its distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.options import CheckedOptions, number
from outpace.distill.batches import Labels

_TINY = 1e-8


@dataclass(frozen=True)
class LossOptions(CheckedOptions):
    """The loss is token_weight * cross-entropy + distribution_weight * divergence.

    The divergence is taken over the target's k most likely tokens and one bucket for all others.
    """

    token_weight: float = number(0.2, 0.0, 100.0)
    distribution_weight: float = number(0.8, 0.0, 100.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token_weight + self.distribution_weight:
            raise UserError("token_weight and distribution_weight are both 0, one of them must be above 0")


def loss(logits: Tensor, labels: Labels, options: LossOptions) -> Tensor:
    """Return the mean loss per position; logits float32 [scored, ids].

    Tokens outside the draft's vocabulary have no cross-entropy, and p is renormalised over the others.
    """
    log_q = torch.log_softmax(logits, dim=-1)
    total = logits.new_zeros(())
    if options.token_weight:
        total = total + options.token_weight * cross_entropy(log_q, labels).mean()
    if options.distribution_weight:
        total = total + options.distribution_weight * _forward_kl(log_q, labels).mean()
    return total


def _forward_kl(log_q: Tensor, labels: Labels) -> Tensor:
    """Return the divergence of q from p over the stored tokens and the bucket of all others: [scored]."""
    p, log_kept, q_rest = _buckets(log_q, labels)
    log_q_all = torch.cat([log_kept.masked_fill(labels.top < 0, 0.0), q_rest.log()], 1)
    return (p * (p.clamp_min(_TINY).log() - log_q_all)).sum(1)


def total_variation(log_q: Tensor, labels: Labels) -> Tensor:
    """Return half of the sum of |p - q| over the stored tokens and the bucket of all others: [scored].

    1 minus it is the probability that a drafted token is accepted.
    """
    p, log_kept, q_rest = _buckets(log_q, labels)
    return (p - torch.cat([log_kept.exp(), q_rest], 1)).abs().sum(1) / 2


def cross_entropy(log_q: Tensor, labels: Labels) -> Tensor:
    """Return the cross-entropy of the written tokens, 0 for those outside of the draft's vocabulary: [scored]."""
    chosen = log_q.gather(1, labels.tokens.clamp_min(0)[:, None]).squeeze(1)
    return -chosen * (labels.tokens >= 0)


def _buckets(log_q: Tensor, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """Return p of the stored tokens and of all others [scored, k + 1], log q of the stored ones [scored, k], -inf for
    those outside of the draft's vocabulary, and q of all others [scored, 1]."""
    known = labels.top >= 0
    rest = (1.0 - labels.top_p.sum(1)).clamp_min(0.0)  # treated as tokens of the draft's vocabulary
    p = labels.top_p * known
    mass = (p.sum(1) + rest).clamp_min(_TINY)[:, None]
    p = torch.cat([p, rest[:, None]], 1) / mass
    log_kept = log_q.gather(1, labels.top.clamp_min(0)).masked_fill(~known, -torch.inf)
    return p, log_kept, (1.0 - log_kept.exp().sum(1, keepdim=True)).clamp_min(_TINY)
