"""Lossy: sample exactly from a mixture pi of target and draft, which follows the draft where it is about as good.

Speculative cascades, Narasimhan et al., arXiv:2405.19261.

The ratio rule with pi in place of p: a drafted token is accepted with min(1, pi / q), the residual is norm((pi - q)+),
and what follows the last one comes from pi too. So pi is kept exactly; what is given up is that pi is not p. With P and
Q at temperature 1 and without filters, pi is q as processed
- chow: where max Q >= 1 - a;
- diff: where max Q >= max P - a;
- opt: where max Q >= max P - a TV(P, Q);
- token_v1, v2, v3: on a set of tokens A, with p for the rest of q's mass: pi = q 1_A + (1 - q(A)) p. A has v where
  Q(v) >= max P - a, where P(v) >= max P - a, where P(v) >= (1 - a) max P;
and p elsewhere. a = -2 is the target alone by each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.adjust import adjusted
from outpace.core.errors import UserError, check_range, unknown
from outpace.core.lazy import torch
from outpace.core.sampling import unscaled
from outpace.core.tree import TokenTree
from outpace.rules._ratio import Judged, TopDown, fitted

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = False
COST = "as rejection, with p and q at temperature 1 too; one more draft step a round"


class Pair(NamedTuple):
    """Both models' distributions after one node: as processed, and P and Q unscaled. [vocab]"""

    p: Tensor
    q: Tensor
    raw_p: Tensor
    raw_q: Tensor


def _whole(defers: Callable[[Pair, float], bool]) -> Callable[[Pair, float], Tensor]:
    """Follows the draft altogether or not at all."""
    return lambda pair, a: pair.q if defers(pair, a) else pair.p


def _by_token(chosen: Callable[[Pair, float], Tensor]) -> Callable[[Pair, float], Tensor]:
    """Follows the draft for some tokens."""

    def mixed(pair: Pair, a: float) -> Tensor:
        kept = torch.where(chosen(pair, a), pair.q, 0.0)
        return kept + (1.0 - kept.sum()) * pair.p

    return mixed


def _distance(pair: Pair) -> float:
    return float((pair.raw_p - pair.raw_q).clamp_(min=0.0).sum())


MIXTURES: dict[str, Callable[[Pair, float], Tensor]] = {
    "chow": _whole(lambda pair, a: bool(pair.raw_q.max() >= 1.0 - a)),
    "diff": _whole(lambda pair, a: bool(pair.raw_q.max() >= pair.raw_p.max() - a)),
    "opt": _whole(lambda pair, a: bool(pair.raw_q.max() >= pair.raw_p.max() - a * _distance(pair))),
    "token_v1": _by_token(lambda pair, a: pair.raw_q >= pair.raw_p.max() - a),
    "token_v2": _by_token(lambda pair, a: pair.raw_p >= pair.raw_p.max() - a),
    "token_v3": _by_token(lambda pair, a: pair.raw_p >= (1.0 - a) * pair.raw_p.max()),
}


@dataclass(frozen=True)
class Options:
    """`defer`: how pi is made: chow, diff, opt, token_v1, token_v2 or token_v3; `alpha`: the higher, the more the draft
    is followed; -2 is the target alone."""

    defer: str = "opt"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if self.defer not in MIXTURES:
            raise unknown("defer", self.defer, list(MIXTURES))
        check_range("alpha", self.alpha, -2.0, 1.0)


class Cascade(TopDown):
    """The ratio rule against pi."""

    lossless = LOSSLESS
    raw = True
    leaf_q = True

    def __init__(self, options: Options) -> None:
        self._mix, self._alpha = MIXTURES[options.defer], options.alpha

    def goal(self, tree: TokenTree, node: int, judged: Judged, p: Tensor) -> Tensor:
        drawn = tree.drawn.get(node)
        if drawn is None or drawn.raw is None:
            raise UserError(
                "rule cascade needs the draft model's q after every token, but none came; use drafter model"
            )
        raw_p = unscaled(adjusted(judged.logits[None], [judged.row]))[0]
        return self._mix(Pair(p, fitted(drawn.q, p), raw_p, fitted(drawn.raw, p)), self._alpha)

    def strict(self, goal: Tensor, p: Tensor) -> Tensor:
        return p


def build(options: Options) -> Cascade:
    """The rule."""
    return Cascade(options)
