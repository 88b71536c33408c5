"""Repeats rank 0's operations on the other ranks of a model that transformers splits over processes (`tp_plan`).

Tensor parallelism (Megatron-LM, arXiv:1909.08053) needs the same forwards in the same order in every process.
"""

from __future__ import annotations

from typing import Any

from outpace.core.errors import UserError

FORWARDS = ("plain", "call")  # operations that all ranks run together


def check_tp_plan(config: Any, kind: Any, size: int, source: object) -> None:
    """Raise UserError for a model that transformers cannot split, or whose heads `size` processes cannot share.

    `kind` is the model's class, if known.
    """
    text = config.get_text_config(decoder=True)
    if not (getattr(text, "base_model_tp_plan", None) or getattr(kind, "_tp_plan", None)):
        raise UserError(f"transformers has no plan to split {source} ({type(config).__name__}): leave out tp_plan")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise UserError(f"{source} has {heads} {name}, which {size} processes cannot share alike: start fewer")


def repeat(passes: Any, sessions: dict[int, Any], name: str, *arguments: Any) -> None:
    """Perform one operation of rank 0 on this rank; `sessions` holds those of rank 0 by number."""
    if name == "plain":
        passes.plain(*arguments)
        return
    number, *rest = arguments
    if name == "close":
        sessions.pop(number, None)
        return
    for one in (number, rest[0]) if name == "copy" else (number,):
        if one not in sessions:
            sessions[one] = passes.open(0, 0)
    if name == "copy":
        sessions[number].copy_layers(sessions[rest[0]], rest[1])
    elif name == "call":
        passes.call(sessions[number], *rest)
    else:
        sessions[number].on_layers(name, *rest)
