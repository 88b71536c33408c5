"""Mistakes in encoder-decoder models: each must fail the test that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutations

from outpace.core.types import Adjustments
from outpace.engine.earlier_texts import HashedTokens
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Session
from outpace.models.hf.encoder_decoder import EncoderDecoderModel, EncoderDecoderPasses, SourceSession

PATHS = "test_encoder_decoder.py::test_trees_score_as_their_paths_after_their_own_source"
PREFIXES = "test_encoder_decoder.py::test_the_prefix_cache_never_mixes_sources"
CUTS = "test_encoder_decoder.py::test_a_session_starts_from_another_and_is_cut_at_its_source"
CONFIG = "test_encoder_decoder.py::test_the_generation_config_is_followed"


READ: list[int] = []  # the source of the first request
SHOWN: list[Any] = []  # the keys and values of the first one


def of_another_request(encode: Original, passes: Any, session: Any) -> None:
    """Read the source of the first request for all."""
    READ.extend(() if READ else session.source)
    own, session.source = session.source, (READ * len(session.source))[: len(session.source)]
    encode(passes, session)
    session.source = own


def of_the_first_show(show: Original, session: Any, view: Any) -> None:
    """Show every session the cross-attention's keys and values that were shown first."""
    show(session, view)
    if view.first:
        SHOWN.extend(() if SHOWN else [(layer.keys, layer.values) for layer in session._crossed])
        for layer, kept in zip(session._crossed, SHOWN, strict=True):
            layer.keys, layer.values = kept


def without_the_source(prepare: Original, sequence: Any) -> None:
    prepare(sequence)
    sequence.text = HashedTokens(sequence.committed, sequence.request.cache_salt)


def within_the_source(cut_below: Original, session: Any, length: int, total: int | None = None) -> int:
    return length


def without_start(complete: Original, model: Any, request: Any) -> Any:
    return replace(complete(model, request), prompt=request.prompt)


def without_adjustments(complete: Original, model: Any, request: Any) -> Any:
    return replace(complete(model, request), adjustments=Adjustments())


def unsuppressed(score: Original, model: Any, forest: Any) -> Any:
    model._suppressed = []
    return score(model, forest)


ENCODER_DECODER_MUTATIONS: list[Mutation] = mutations(
    {
        PATHS: [
            ("sources: of another request", EncoderDecoderPasses, "_encode", of_another_request),
            ("sources: keys of another session", SourceSession, "show", of_the_first_show),
        ],
        PREFIXES: [
            ("sources: a prefix of another one's text", TokenSequence, "__post_init__", without_the_source),
        ],
        CUTS: [("sources: cut within", Session, "cut_below", within_the_source)],
        CONFIG: [
            ("sources: no start of the answer", EncoderDecoderModel, "complete", without_start),
            ("sources: no forced last token", EncoderDecoderModel, "complete", without_adjustments),
            ("sources: suppressed tokens", EncoderDecoderModel, "_score", unsuppressed),
        ],
    }
)
