"""Plain decoding: one token in each target pass.

No paper: the baseline with which the text and the time of every other method are compared.
"""

from __future__ import annotations

from outpace.core.options import MethodOptions
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext


class Autoregressive(Decoder):
    """Decodes without a drafter, in the same loop as the other methods."""

    name = "autoregressive"
    cost = "one pass for each token"
    drafting = None

    def decode(self, context: RequestContext, options: MethodOptions) -> DecoderGenerator:
        tree = TokenTree(context.last_token)
        while True:
            picks = yield Verify(tree)
            tree = yield Commit(tree, context.request.rule.walk(tree, picks))
