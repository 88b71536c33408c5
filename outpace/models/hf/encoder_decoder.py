"""Encoder-decoder models of transformers: the encoder reads a source, and the decoder writes after it.

A session's text is the source, the tokens that the decoder starts with, and the answer. The slot of a source token
holds the keys and values of the cross-attention, that of any other token those of the self-attention. So a slot takes
the same memory everywhere, and all that a session knows of its source is copied and dropped with its slots. When the
last token of the source is read, the encoder reads all of it.

Positions and relative biases follow the decoder's slots, so each branch of a token tree takes a forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from outpace.core.errors import UserError
from outpace.core.machine import free_bytes
from outpace.core.types import Adjustments, Request
from outpace.models.base import Part
from outpace.models.hf.cache import SlotView
from outpace.models.hf.model import ProbeResult, TransformersModel
from outpace.models.hf.passes import UNNAMED, ForwardPasses, TransformersSession

SCORE_BYTES = 16  # of a pair of source tokens and a head, while a layer of the encoder runs: scores, bias, softmax
UNSUPPORTED = (  # fields of a generation config that change texts
    "num_beams",
    "encoder_no_repeat_ngram_size",
    "begin_suppress_tokens",
    "sequence_bias",
    "exponential_decay_length_penalty",
)


class SourceSession(TransformersSession):
    """A decoder's keys and values, after the cross-attention's of a source."""

    def __init__(self, capacity: int, max_pending: int, config: Any) -> None:
        super().__init__(capacity, max_pending, config)
        self.source: list[int] = []  # tokens that were read of it
        self._crossed: list[Any] = [DynamicLayer() for _ in self.layers]
        crossed = DynamicCache()
        crossed.layers = self._crossed
        self.cache = EncoderDecoderCache(self.cache, crossed)
        self.cache.is_updated = dict.fromkeys(range(len(self.layers)), True)

    def show(self, view: SlotView) -> None:
        super().show(view)
        for layer, crossed in zip(self.layers, self._crossed, strict=True):
            shown = layer.stored if view.first else (None, None)
            crossed.keys, crossed.values = (part if part is None else part[..., : view.first, :] for part in shown)

    def fill(self, found: Sequence[Any]) -> None:
        """Store the cross-attention's keys and values of the source, by layer."""
        for layer, given in zip(self.layers, found, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(given.keys, given.values)
            for stored, new in zip(layer.stored, (given.keys, given.values), strict=True):
                stored[..., : self.source_length, :] = new

    def _copy(self, other: Any, length: int) -> None:
        super()._copy(other, length)
        self.source = other.source[:length]


class EncoderDecoderPasses(ForwardPasses):
    """The forwards of an encoder-decoder model."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.config = module.get_decoder().config.get_text_config(decoder=True)
        self.generation = getattr(module, "generation_config", None) or module.config
        self.decoder_start = _decoder_start(self.generation, type(module).__name__)
        if getattr(self.config, "relative_attention_num_buckets", None):  # whatever n_positions is, none are learned
            self.max_positions = UNNAMED
        heads = int(module.config.get_text_config(encoder=True).num_attention_heads)
        self.max_source = min(self.max_positions, math.isqrt(free_bytes(self.device) // (SCORE_BYTES * heads)))

    def open(self, capacity: int, max_pending: int) -> SourceSession:
        return SourceSession(capacity, max_pending, self.config)

    def plain(self, tokens: Sequence[int], source: int = 0) -> Tensor:
        inputs = {"input_ids": self._ids(tokens[:source]), "decoder_input_ids": self._ids(tokens[source:])}
        return self._plain(tokens[source:], **inputs)

    def _read_source(self, part: Part, before: int) -> int:
        session = part.session
        if not session.source_length:
            raise UserError("an encoder-decoder model scores what follows a source, this text has none")
        read = session.length + before
        count = min(max(session.source_length - read, 0), len(part.tokens))
        if count:
            session.source[read:] = part.tokens[:count]
            if len(session.source) == session.source_length:
                self._encode(session)
        return count

    def _encode(self, session: SourceSession) -> None:
        """Run the encoder over the source, and the decoder over one token, which computes the keys and values of the
        cross-attention."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        inputs = {"input_ids": self._ids(session.source), "decoder_input_ids": self._ids(self.decoder_start[:1])}
        self.module(**inputs, past_key_values=cache, use_cache=True)
        session.fill(cache.cross_attention_cache.layers)

    def _inputs(self, session: Any, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the decoder's inputs; the encoder's output is read for its shape only."""
        nothing = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
        shaped = nothing.expand(1, session.source_length, int(self.config.hidden_size))
        return {"decoder_input_ids": self._ids(tokens), "encoder_outputs": BaseModelOutput(last_hidden_state=shaped)}


class EncoderDecoderModel(TransformersModel):
    """A probed encoder-decoder model, which follows its generation config as transformers' greedy `generate` does."""

    capabilities = frozenset()

    def __init__(self, passes: EncoderDecoderPasses, found: ProbeResult) -> None:
        super().__init__(passes, found)
        self.decoder_start, self.max_source, generation = passes.decoder_start, passes.max_source, passes.generation
        self._forced_end = _token(generation, "forced_eos_token_id")
        self._no_repeat_ngram = getattr(generation, "no_repeat_ngram_size", 0) or 0
        self._min_tokens = max((getattr(generation, "min_length", 0) or 0) - len(self.decoder_start), 0)
        words = [word for word in getattr(generation, "bad_words_ids", None) or [] if word != [generation.eos_token_id]]
        suppressed = list(getattr(generation, "suppress_tokens", None) or [])
        suppressed += [word[0] for word in words if len(word) == 1]
        self._suppressed = [token for token in suppressed if 0 <= token < self.vocab_size]
        given = {name: getattr(generation, name, None) for name in UNSUPPORTED}
        given["bad_words_ids"] = [word for word in words if len(word) > 1]
        left_out = ", ".join(f"{name} {value!s:.50}" for name, value in given.items() if value not in (None, 0, 1, []))
        if left_out:
            left_out = f"its generation config asks for {left_out}, which outpace leaves out"
            self.notice = "; ".join(filter(None, (self.notice, left_out)))

    def complete(self, request: Request) -> Request:
        """Add the decoder's start to the prompt, and what the generation config asks for to the adjustments."""
        marks = {getattr(self.module.config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
        if marks.issuperset(request.prompt):
            raise UserError(f"the source has no text, its tokens are {list(request.prompt)}: give one to read")
        given = request.adjustments or Adjustments()
        least = max(given.min_tokens, min(self._min_tokens, request.max_tokens))
        last = self._forced_end if request.constraint is None else None
        adjusted = replace(given, min_tokens=least, last=last, no_repeat_ngram=self._no_repeat_ngram)
        if adjusted.no_repeat_ngram or adjusted.repetition_penalty != 1.0:
            adjusted = replace(adjusted, source=len(request.prompt))
        adjustments = None if adjusted == Adjustments() else adjusted
        return replace(request, prompt=(*request.prompt, *self.decoder_start), adjustments=adjustments)

    @torch.inference_mode()
    def _score(self, forest: Sequence[Part]) -> Tensor:
        scores = super()._score(forest)
        scores[:, self._suppressed] = -math.inf
        return scores


def _decoder_start(generation: Any, name: str) -> tuple[int, ...]:
    """Return the tokens that every answer of `generate` begins with. UserError if the model names none."""
    start = _token(generation, "decoder_start_token_id")
    start = _token(generation, "bos_token_id") if start is None else start
    if start is None:
        raise UserError(f"{name} names no decoder_start_token_id, with which its decoder starts")
    forced = _token(generation, "forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _token(generation: Any, name: str) -> int | None:
    """Return a token that a generation config names; UserError for anything but one token."""
    value = getattr(generation, name, None)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{name} of the generation config is {value!r:.50}, it must be one token")
    return value
