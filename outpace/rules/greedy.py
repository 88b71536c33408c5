"""Accept while the token is the target's most likely one.

No paper: the definition of greedy decoding. Its own rule, never "temperature to 0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.adjust import adjusted
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Verdict
from outpace.rules.base import follow

LOSSLESS = True


@dataclass(frozen=True)
class Options:
    """None."""


class Greedy:
    """argmax p; equal logits go to the lowest id."""

    lossless = LOSSLESS
    siblings = Siblings.PICKED

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        picks: list[int] = adjusted(logits, rows).argmax(dim=-1).tolist()
        return picks

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return torch.log_softmax(adjusted(logits, rows).float(), dim=-1)


def build(options: Options) -> Greedy:
    """The rule."""
    return Greedy()
