"""Formulas of speculative decoding: expected tokens per round, speedups and their limits.

alpha is the probability that a drafted token is accepted, gamma the draft length, c the time of a draft step over that
of a plain target pass, and v the time of a verifying pass over that of a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the tokens per round if all positions are alike.

    (1 - alpha^(gamma+1)) / (1 - alpha). Leviathan et al., eq. 1.
    """
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Return the tokens per round from each position's acceptance, given all before it: 1 + sum of products."""
    return 1.0 + math.fsum(math.prod(acceptances[: depth + 1]) for depth in range(len(acceptances)))


def speedup(tokens: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Return the speedup of sequential drafting and verification, E / (gamma c + v).

    Leviathan et al., theorem 3.8, has v = 1.
    """
    return tokens / (gamma * c + v)


def count_rounds(chains: Sequence[Sequence[bool]]) -> int:
    """Count the rounds of an answer. `chains`: for each position, which tokens of a chain drafted there are right.

    Each round emits the correctly drafted tokens and one token of the target.
    """
    rounds = place = 0
    while place < len(chains):
        drafted = chains[place]
        place += 1 + (drafted.index(False) if False in drafted else len(drafted))
        rounds += 1
    return rounds


def best_length(alpha: float, c: float, max_length: int = 64) -> int:
    """Return the gamma of the greatest sequential speedup if verifying costs no more than a plain pass.

    0 if none helps.
    """
    return max(range(max_length + 1), key=lambda gamma: speedup(expected_tokens(alpha, gamma), gamma, c))


def tokens_per_rejection(acceptances: Sequence[float]) -> float:
    """Return the expected tokens per rejection if drafts never end; all positions after the last one listed accept as
    it does.

    1 / (1 - alpha) if all positions are alike. This is the limit of sequential drafting with a free draft, and the
    ideal speedup T / E[rejections] of Yin et al., arXiv:2411.00841. There E[rejections] is the sum of E[TV(p, q)] over
    the T tokens, with TV = 1 - alpha: no exact rule that judges one token after another rejects fewer.
    """
    *before, last = acceptances
    rest = math.prod(before) * last
    return expected_tokens_by_position(before) + (0.0 if not rest else math.inf if last >= 1.0 else rest / (1.0 - last))


def any_acceptance(acceptances: Sequence[float]) -> float:
    """Return the probability that one of several drafts of the same token is accepted: 1 - product of the TVs.

    Each acceptance is conditional on the rejection of the earlier drafts. Yin et al., theorem 4, where this holds for
    the first token after a rejection.
    """
    return 1.0 - math.prod(1.0 - alpha for alpha in acceptances)


def parallel_limit(c: float) -> float:
    """Return the limit of drafting in parallel with the target if every token takes one draft step: 1 / c."""
    return math.inf if c <= 0.0 else 1.0 / c


def pearl_tokens(acceptances: Sequence[float], gamma: int) -> float:
    """Return PEARL's tokens per step: tokens per rejection over steps per rejection. Liu et al., arXiv:2408.11850.

    After a rejection one step checks the first token alone, and while all is accepted each further step checks gamma
    tokens. All positions after the last one listed accept as it does. If all are alike:
    (1 - alpha^gamma) / ((1 - alpha) (1 + alpha - alpha^gamma)).
    """
    last, checked, steps = acceptances[-1], 1, 1.0
    if last >= 1.0:
        return float(gamma)
    while checked < len(acceptances):
        steps += math.prod(acceptances[:checked])
        checked += gamma
    reached = math.prod(acceptances) * last ** (checked - len(acceptances))
    return tokens_per_rejection(acceptances) / (steps + reached / (1.0 - last**gamma))


def pearl_speedup(alpha: float, gamma: int, c: float) -> float:
    """Return PEARL's speedup with gamma tokens drafted while the target verifies, if all positions are alike."""
    return pearl_tokens([alpha], gamma) / max(gamma * c, 1.0)


def travel_time(stages: int, hop: float) -> float:
    """Return the time that a pass spends between the stages of a pipeline, each `hop` from the next; 0 for one stage.

    The last stage sends its rows back to the first, so there are as many hops as stages. Decentralised speculative
    decoding, arXiv:2511.11733, counts one less, without the way back.
    """
    return stages * hop if stages > 1 else 0.0


def pipeline_speedup(tokens: float, gamma: int, c: float, stages: int, hop: float, v: float = 1.0) -> float:
    """Return the speedup in a pipeline, E (1 + L) / (gamma c + v + L), where L is the travel time of a pass.

    A round travels once for all its tokens, plain decoding once for each token. arXiv:2511.11733.
    """
    travel = travel_time(stages, hop)
    return tokens * (1.0 + travel) / (gamma * c + v + travel)


def pipeline_saving(stages: int, hop: float, tokens: float) -> float:
    """Return the travel time saved per token, (N - 1) t1 (k - 1) / k for k tokens per pass. arXiv:2511.11733."""
    return (stages - 1) * hop * (tokens - 1.0) / tokens


def pipeline_break_even(gamma: int, c: float, stages: int, hop: float, v: float = 1.0) -> float:
    """Return the tokens per pass at which drafting breaks even: (gamma c + v + L) / (1 + L)."""
    travel = travel_time(stages, hop)
    return (gamma * c + v + travel) / (1.0 + travel)


def card_limit(tokens: float, v: float, c: float) -> float:
    """Return CARD's bound: A / v by the target, `tokens` A per pass, and 1 / c by the drafter. arXiv:2508.04462."""
    return min(tokens / v, parallel_limit(c))
