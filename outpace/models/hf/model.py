"""Runs any causal language model of transformers in its own weight format, with token trees over slots of its Cache.

A tree is one forward if the model accepts a mask and positions, which a probe at the start finds out. Otherwise each
branch is a forward over the stored keys and values: correct but slow, so chains suit such models better. Each session
is a forward of its own. Results are equal up to rounding, never bit for bit.

The probe takes twelve short passes. The reference is the model's own pass over the whole text without a cache. How much
such passes differ merely by their shape measures rounding; a few units of the model's precision are added, as attention
over other numbers of keys may sum in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.logits import TargetOutput
from outpace.core.tree import PREFIX
from outpace.models.base import Capability, Model, Part, chain
from outpace.models.hf.passes import ForwardPasses, TransformersSession

PARENTS = (PREFIX, 0, 0, 1, 2)  # two branches make slots and positions differ
BRANCHES = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))
BEFORE = 4  # tokens of prefix, or of the source
STEPS = 4  # units of the model's precision at the largest score; one occurs on CPUs without bfloat16 arithmetic


class ProbeResult(NamedTuple):
    """What probing a model found."""

    width: int  # of a logits row
    token_bytes: int  # keys and values per token
    state_bytes: int  # of a session's recurrent layers
    objection: str | None  # why trees need several forwards


def probe(passes: ForwardPasses) -> ProbeResult:
    """Probe the model; UserError if it is not causal or cannot remove a token."""
    try:
        return _probe(passes)
    except UserError:
        raise
    except Exception as error:  # the model's own code may not support the cache
        first = str(error).partition("\n")[0]
        name = type(passes.module).__name__
        raise UserError(f"{name} does not work with a KV cache ({type(error).__name__}: {first})") from error


def _probe(passes: ForwardPasses) -> ProbeResult:
    prefix, nodes = _tokens(passes)
    name = type(passes.module).__name__
    fresh = torch.stack([_plain(passes, [*prefix, *(nodes[n] for n in branch)])[-1] for branch in BRANCHES]).float()
    max_difference = _max_difference(passes, fresh)
    whole = _plain(passes, [*prefix, *(nodes[n] for n in BRANCHES[3])])[-len(BRANCHES[3]) :].float()
    rounding = _distance(whole, fresh[[0, 1, 3]])
    if not rounding <= max_difference:
        raise UserError(f"{name} is not causal: a token's scores change with those after it")
    session = _read(passes, prefix, 0)
    if not all(layer.stored for layer in session.layers):
        raise UserError(f"{name} stores nothing in the given KV cache, so drafted tokens could not be taken back")
    token_bytes = sum(part[..., :1, :].nbytes for layer in session.layers for part in layer.stored)
    state_bytes = 2 * session.states.num_bytes  # the last forward's and the committed tokens'
    off = _distance(_tree(passes, prefix, nodes, as_trees=False), fresh)
    if not off <= max_difference:
        raise UserError(
            f"{name} scores differently with its cache than without (by {off:.2g}), so drafted tokens could not be"
            " taken back"
        )
    step = max(STEPS * torch.finfo(passes.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    limit = min(max_difference, 8 * rounding + step * fresh.abs().max().item())
    objection = passes.layout.objection or _objection(passes, fresh, limit)
    return ProbeResult(fresh.shape[-1], token_bytes, state_bytes, objection)


def _objection(passes: ForwardPasses, fresh: Tensor, limit: float) -> str | None:
    """Return why a tree does not fit in one forward, or None."""
    if "position_ids" not in passes.arguments:
        return "the model takes no positions"
    try:
        off = _distance(_tree(passes, *_tokens(passes), as_trees=True), fresh)
    except Exception as error:  # models fail in various ways on an unsupported mask
        return f"the model takes no mask of a tree ({type(error).__name__})"
    if not off <= limit:
        return f"the model does not follow the mask of a tree (scores off by {off:.2g}, rounding is {limit:.2g})"
    return None


def _tree(passes: ForwardPasses, prefix: list[int], nodes: list[int], as_trees: bool) -> Tensor:
    """Score the probe's tree after the prefix, in one forward or one for each branch. [nodes, vocab]"""
    session = _read(passes, prefix, len(nodes))
    session.keep(range(len(prefix)))
    part = Part(session, nodes, PARENTS, range(len(nodes)))
    return passes.score([part], width=passes.num_embeddings, as_trees=as_trees).float()


def _plain(passes: ForwardPasses, tokens: list[int]) -> Tensor:
    """Score a text that begins with the probe's prefix without a cache."""
    return passes.plain(tokens, BEFORE if passes.decoder_start else 0)


def _read(passes: ForwardPasses, prefix: list[int], more: int) -> TransformersSession:
    """Return a session that has read the prefix and holds `more` tokens after it."""
    session = passes.open(len(prefix) + more, len(prefix) + more)
    session.source_length = BEFORE if passes.decoder_start else 0
    passes.score([chain(session, prefix)], width=passes.num_embeddings, as_trees=False)
    return session


def _tokens(passes: ForwardPasses) -> tuple[list[int], list[int]]:
    """Return a prefix, for an encoder-decoder model a source and the decoder's start, and nodes: distinct ids that are
    not special, as some models treat padding differently."""
    special = [getattr(passes.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    plain = [token for token in range(min(passes.num_embeddings, 64)) if token not in special]
    some = [plain[(3 + 5 * number) % len(plain)] for number in range(BEFORE + len(PARENTS))]
    return [*some[:BEFORE], *passes.decoder_start], some[BEFORE:]


def _max_difference(passes: ForwardPasses, fresh: Tensor) -> float:
    """Return the largest difference explained by rounding; a larger one means an error."""
    eps = torch.finfo(passes.dtype).eps
    if getattr(passes.module.config, "quantization_config", None) is not None:
        eps = max(eps, torch.finfo(torch.float16).eps)
    spread = (fresh - fresh.mean(-1, keepdim=True)).abs().max().item()
    return 2 * math.sqrt(eps) * spread + 64 * torch.finfo(torch.float32).eps * fresh.abs().max().item()


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; nan if a score is nan."""
    width = min(one.shape[-1], other.shape[-1])
    return (one[..., :width] - other[..., :width].to(one.device)).abs().max().item()


class TransformersModel(Model):
    """A probed transformers model. `score` must be called by one thread at a time.

    `trees`: a token tree is one forward; if False, `notice` explains why.
    """

    capabilities = frozenset({Capability.HIDDEN})

    def __init__(self, passes: ForwardPasses, found: ProbeResult) -> None:
        self._passes, self._token_bytes, self._state_bytes = passes, found.token_bytes, found.state_bytes
        self.module, self.config = passes.module, passes.config
        self.device, self.dtype = passes.device, passes.dtype
        self.max_positions = passes.max_positions
        self.vocab_size = min(passes.num_embeddings, found.width)
        self.supports_trees = found.objection is None
        if not self.supports_trees:
            cost = "every branch of a token tree costs a pass of its own"
            self.notice = f"chains only: {cost}, because {found.objection}"

    @property
    def token_bytes(self) -> int:
        return self._token_bytes

    @property
    def state_bytes(self) -> int:
        return self._state_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, assumed to be read by each pass."""
        return sum(weight.nbytes for weight in self.module.parameters())

    def open(self, capacity: int, max_pending: int) -> TransformersSession:
        return self._passes.open(capacity, max_pending)

    @property
    def max_hidden_layer(self) -> int:
        """The last layer with hidden states: the output of the final layer is available only after the final norm."""
        return int(self.config.num_hidden_layers) - 1

    def _score(self, forest: Sequence[Part]) -> Tensor:
        return self._passes.score(forest, width=self.vocab_size, as_trees=self.supports_trees)

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Score, and return the hidden states before each of `layers`. [layers, hidden rows, width]"""
        scored = [part._replace(logit_rows=sorted({*part.logit_rows, *part.hidden_rows})) for part in forest]
        rows = self._passes.score(scored, width=self.vocab_size, as_trees=self.supports_trees, layers=layers)
        logit_rows, hidden_rows, first = [], [], 0
        for part, scored_part in zip(forest, scored, strict=True):
            places = {node: first + place for place, node in enumerate(scored_part.logit_rows)}
            logit_rows += [places[node] for node in part.logit_rows]
            hidden_rows += [places[node] for node in part.hidden_rows]
            first += len(scored_part.logit_rows)
        hidden = rows[hidden_rows][:, self.vocab_size :].unflatten(1, (len(layers), -1))  # [hidden rows, layers, width]
        return TargetOutput(rows[logit_rows][:, : self.vocab_size], hidden.transpose(0, 1))
