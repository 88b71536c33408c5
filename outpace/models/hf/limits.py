"""How far a transformers model reaches: the positions of its context, and the tokens that it has embeddings for."""

from __future__ import annotations

from typing import Any

from outpace.core.errors import UserError

# Names under which configurations give the length of the context; GPT-2's n_positions and others are mapped by
# transformers to the first.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
UNNAMED = 1 << 17  # a model that names none has no learned positions; KV memory is the limit then
# Rotary embeddings whose angles change with the longest text so far: a key stored before the change does not fit after.
CHANGING = ("dynamic", "longrope")


def max_positions(config: Any) -> int:
    """Tokens of the context; where the rotary angles change on the way, those before the change."""
    named = [value for name in NAMES if (value := _whole(config, name))]
    most = named[0] if named else UNNAMED
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = rope.values() if all(isinstance(kind, dict) for kind in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in CHANGING:
            original = kind.get("original_max_position_embeddings") or _whole(
                config, "original_max_position_embeddings"
            )
            most = min(most, original or most)
    return most


def num_embeddings(module: Any) -> int:
    """Tokens that the model has embeddings for."""
    try:
        return int(module.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        count = _whole(module.config.get_text_config(decoder=True), "vocab_size")
    if not count:
        raise UserError(f"{type(module).__name__} has no token embeddings, so it is not a language model")
    return count


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
