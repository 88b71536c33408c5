"""What speculation can give: expected tokens a round, speedups and their limits, and what a lossy rule must lose.

alpha is the chance that a drafted token is accepted, gamma the draft's length, c the time of a draft step over that of
a plain target pass, v the time of a pass that verifies over that of a plain one, and TV(p, q) = sum (p - q)+.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round, all positions being alike: (1 - alpha^(gamma+1)) / (1 - alpha). Leviathan et al., eq. 1."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Tokens of a round from each position's measured acceptance, once all before it were: 1 + sum of products."""
    return 1.0 + math.fsum(math.prod(acceptances[: depth + 1]) for depth in range(len(acceptances)))


def speedup(tokens: float, gamma: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """Over plain decoding, of a draft that is grown and verified in turn: E / (gamma c + v + o). Leviathan et al.,
    theorem 3.8, which has v = 1 and o = 0."""
    return tokens / (gamma * c + v + overhead)


def can_help(alpha: float, c: float) -> bool:
    """Whether any length helps where verifying costs no more than a plain pass. Leviathan et al., corollary 3.9."""
    return alpha > c


def best_length(alpha: float, c: float, most: int = 64) -> int:
    """The gamma of the greatest speedup in turn, verifying costing no more than a plain pass; 0 where none helps."""
    return max(range(most + 1), key=lambda gamma: speedup(expected_tokens(alpha, gamma), gamma, c))


def sequential_limit(alpha: float) -> float:
    """What no draft that costs nothing exceeds in turn: 1 / (1 - alpha)."""
    return math.inf if alpha >= 1.0 else 1.0 / (1.0 - alpha)


def parallel_limit(c: float) -> float:
    """What no draft beside the target exceeds, every token being drafted in turn: 1 / c."""
    return math.inf if c <= 0.0 else 1.0 / c


def pearl_speedup(alpha: float, gamma: int, c: float) -> float:
    """PEARL's, of gamma tokens drafted while the target verifies. Liu et al., arXiv:2408.11850."""
    tokens = float(gamma) if alpha >= 1.0 else (1.0 - alpha**gamma) / ((1.0 - alpha) * (1.0 + alpha - alpha**gamma))
    return tokens / max(gamma * c, 1.0)


def ssd_speedup(hit: float, on_hit: float, on_miss: float, primary: float, backup: float) -> float:
    """SSD's over plain decoding. `hit`: the share of outcomes that were drafted for; `on_hit` and `on_miss`: tokens of
    such rounds; `primary`, `backup`: drafting for outcomes and drafting after a miss, in passes of the target. Kumar,
    Dao, May, arXiv:2603.03251."""
    tokens = hit * on_hit + (1.0 - hit) * on_miss
    return tokens / (hit * max(1.0, primary) + (1.0 - hit) * (1.0 + backup))


def card_limit(tokens: float, v: float, c: float, slow_down: float = 1.0) -> float:
    """CARD's bound, A / v by the target and 1 / (c d) by the drafter: `tokens` A a pass, `slow_down` d of a wide draft
    forward. arXiv:2508.04462."""
    return min(tokens / v, parallel_limit(c * slow_down))


def tree_tokens(path_acceptances: Sequence[float]) -> float:
    """Tokens of a round over a tree: 1 + the sum over its nodes of the chance that all of its path is accepted.
    Sequoia, arXiv:2402.12374."""
    return 1.0 + math.fsum(path_acceptances)


def tree_speedup(tokens: float, depth: int, c: float, v: float) -> float:
    """Over plain decoding, of a tree that is grown in `depth` draft forwards: F / (d c + v)."""
    return tokens / (depth * c + v)


def total_variation(p: Tensor, q: Tensor) -> float:
    """sum (p - q)+ = 1 - sum min(p, q). [vocab] both"""
    return float((p - q).clamp(min=0.0).sum())


def expected_rejections(distances: Sequence[float]) -> float:
    """Of a text by the ratio rule: the sum of TV(p_n, q_n) over its tokens. Yin et al., "A Theoretical Perspective for
    Speculative Decoding Algorithm", NeurIPS 2024."""
    return math.fsum(distances)


def ideal_speedup(tokens: int, rejections: float) -> float:
    """Of a draft that costs nothing and is never cut: tokens over rejections."""
    return math.inf if rejections <= 0.0 else tokens / rejections


def min_distance(distance: float, rejected: float) -> float:
    """Yin's line: what a rule that rejects so often writes is at least TV(p, q) - P(reject) away from p."""
    return max(0.0, distance - rejected)


class BatchCost(NamedTuple):
    """What decides a pass over a batch: bytes of weights, of keys and values of one request, weights (their number),
    bytes a second and operations a second of the machine."""

    weight_bytes: float
    kv_bytes: float
    weights: float
    bandwidth: float
    flops: float

    def pass_seconds(self, nodes: int, requests: int) -> float:
        """max((weights + kv) / bandwidth, 2 P n B / flops): moving or computing, whichever takes longer."""
        moved = (self.weight_bytes + requests * self.kv_bytes) / self.bandwidth
        return max(moved, 2.0 * self.weights * nodes * requests / self.flops)

    @property
    def free_rows(self) -> float:
        """Rows n B up to which one more costs nothing but its keys and values: where computing takes as long as moving
        the weights."""
        return self.flops * self.weight_bytes / (2.0 * self.weights * self.bandwidth)
