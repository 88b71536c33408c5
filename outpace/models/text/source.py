"""The tokenizer of a model wherever its files lie: in a folder, or in the header of a .gguf file."""

from __future__ import annotations

from outpace.core.errors import UserError
from outpace.core.machine import trim_heap
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import GgufSource
from outpace.models.text.tokenizer import Tokenizer


def tokenizer_of(source: Checkpoint | GgufSource) -> Tokenizer:
    """UserError where it is missing or damaged. What a large vocabulary was made from on the way, 100 MB of memory, is
    given back."""
    if isinstance(source, Checkpoint):
        return Tokenizer.from_folder(source.path)
    built = source.tokenizer
    template, ends = built.settings.get("chat_template"), built.special_ids.get("eos_token_id", [])
    stops = ends if isinstance(ends, list) else [ends]
    try:
        return Tokenizer(built.tokenizer, built.settings, stops, {"default": template} if template else {})
    except UserError as error:
        raise UserError(f"{source.path}: {error}") from error
    finally:
        trim_heap()
