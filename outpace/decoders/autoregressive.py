"""Plain decoding: one token in each target pass.

No paper: the baseline with which the text and the time of every other method are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Verify
from outpace.decoders.base import Coroutine, RequestContext

LOSSLESS = True
COST = "one pass for each token"
NEEDS = None


@dataclass(frozen=True)
class Options:
    """None."""


def decode(place: RequestContext, options: Options) -> Coroutine:
    """The same loop as the others', without Draft."""
    tree = TokenTree(place.last_token)
    while True:
        picks = yield Verify(tree, place.left)
        tree = yield Commit(tree, place.request.rule.walk(tree, picks))
