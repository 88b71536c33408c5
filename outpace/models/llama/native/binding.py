"""Says which models the native kernels support, and holds the native runtime's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.core.arrays import num_cores
from outpace.core.errors import UserError, check_whole, unknown
from outpace.models.llama.config.llama_config import ENTRY_BYTES, LlamaConfig
from outpace.models.options import AUTO, FILE, INT4, INT8

WEIGHTS = (INT8, INT4, FILE, AUTO)


class UnsupportedShape(UserError):
    """Raised for a model that the kernels do not support; the torch runtime does."""


@dataclass(frozen=True)
class NativeOptions:
    """Options of the native runtime.

    `threads` None: as many as this process may use. `instruction_set` "": the fastest that the machine has. `weights`
    "file": keep a file's block formats and round all others to int8; "auto": the same, without a notice about rounded
    float matrices; "int4": the same as "auto", but round the layers' float matrices to four bits.
    """

    threads: int | None = None
    kv_dtype: str = "float32"
    instruction_set: str = ""
    weights: str = INT8

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_whole("threads", self.threads, 1, num_cores())
        if self.kv_dtype not in ENTRY_BYTES:
            raise unknown("kv_dtype", self.kv_dtype, ENTRY_BYTES)
        if self.weights not in WEIGHTS:
            raise unknown("weights", self.weights, WEIGHTS)


def read_formats(kernels: Any) -> tuple[str, ...]:
    """Return the formats of a file's matrices that the kernels read in place: blocks, and floats that they round."""
    return (*kernels.FORMATS, *kernels.FLOATS)


def check_supported(kernels: Any, config: LlamaConfig) -> None:
    """Raise UnsupportedShape for a model that the kernels would compute wrongly."""
    sizes = config.recurrence
    if config.experts and config.experts.chosen > kernels.MAX_USED_EXPERTS:
        chosen = f"num_experts_per_tok is {config.experts.chosen}"
        raise UnsupportedShape(f"{chosen}, native kernels take at most {kernels.MAX_USED_EXPERTS}")
    if config.joint_norm and config.num_kv_heads * config.head_dim % kernels.LANES:
        width = f"the keys' width is {config.num_kv_heads * config.head_dim}"
        raise UnsupportedShape(f"{width}, with a norm of all heads native kernels take multiples of {kernels.LANES}")
    if not config.num_attention_layers:
        raise UnsupportedShape(f"none of the {config.num_layers} layers has attention, native kernels need one")
    depths = {"channels": sizes.channels} if sizes else {}
    if sizes and sizes.is_delta_net:
        depths |= {"linear_key_head_dim": sizes.key_depth, "linear_value_head_dim": sizes.value_depth}
    for name, depth in depths.items():
        if depth % kernels.LANES or (name != "channels" and depth > kernels.MAX_DEPTH):
            most = "" if name == "channels" else f" up to {kernels.MAX_DEPTH}"
            raise UnsupportedShape(f"{name} is {depth}, native kernels take multiples of {kernels.LANES}{most}")
    head_dim = max(config.kv_heads)
    if head_dim > kernels.MAX_DEPTH or config.head_dim % 2:
        raise UnsupportedShape(f"head_dim is {head_dim}, native kernels take even ones up to {kernels.MAX_DEPTH}")
