"""Mistakes in encoder-decoder models: each must fail the test that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.core.types import Adjustments
from outpace.engine.earlier_texts import HashedTokens
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Session
from outpace.models.hf.encoder_decoder import EncoderDecoderModel, EncoderDecoderPasses, SourceSession

PATHS = "test_encoder_decoder.py::test_trees_score_as_their_paths_after_their_own_source"
PREFIXES = "test_encoder_decoder.py::test_the_prefix_cache_never_mixes_sources"
CUTS = "test_encoder_decoder.py::test_a_session_starts_from_another_and_is_cut_at_its_source"
CONFIG = "test_encoder_decoder.py::test_the_generation_config_is_followed"


def of_another_request(encode: Original) -> Original:
    """Read the source of the first request for all."""
    first: list[int] = []

    def mutated(passes: Any, session: Any) -> None:
        first.extend(() if first else session.source)
        own, session.source = session.source, (first * len(session.source))[: len(session.source)]
        encode(passes, session)
        session.source = own

    return mutated


def of_the_first_show(show: Original) -> Original:
    """Show every session the cross-attention's keys and values that were shown first."""
    shown: list[Any] = []

    def mutated(session: Any, view: Any) -> None:
        show(session, view)
        if view.first:
            shown.extend(() if shown else [(layer.keys, layer.values) for layer in session._crossed])
            for layer, kept in zip(session._crossed, shown, strict=True):
                layer.keys, layer.values = kept

    return mutated


def without_the_source(prepare: Original) -> Original:
    def mutated(sequence: Any) -> None:
        prepare(sequence)
        sequence.text = HashedTokens(sequence.committed, sequence.request.cache_salt)

    return mutated


def within_the_source(cut_below: Original) -> Original:
    return lambda session, length, total=None: length


def without_start(complete: Original) -> Original:
    return lambda model, request: replace(complete(model, request), prompt=request.prompt)


def without_adjustments(complete: Original) -> Original:
    return lambda model, request: replace(complete(model, request), adjustments=Adjustments())


def unsuppressed(score: Original) -> Original:
    def mutated(model: Any, forest: Any) -> Any:
        model._suppressed = []
        return score(model, forest)

    return mutated


ENCODER_DECODER_MUTATIONS: list[Mutation] = [
    mutation("sources: of another request", EncoderDecoderPasses, "_encode", of_another_request, PATHS),
    mutation("sources: keys of another session", SourceSession, "show", of_the_first_show, PATHS),
    mutation("sources: a prefix of another one's text", TokenSequence, "__post_init__", without_the_source, PREFIXES),
    mutation("sources: cut within", Session, "cut_below", within_the_source, CUTS),
    mutation("sources: no start of the answer", EncoderDecoderModel, "complete", without_start, CONFIG),
    mutation("sources: no forced last token", EncoderDecoderModel, "complete", without_adjustments, CONFIG),
    mutation("sources: suppressed tokens", EncoderDecoderModel, "_score", unsuppressed, CONFIG),
]
