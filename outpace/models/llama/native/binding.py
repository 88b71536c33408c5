"""The package of the native kernels: whether it is here, which models it takes, and how it is to run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError, check_whole, unknown
from outpace.core.lazy import cpu_ids
from outpace.models.llama.config.families import GELU
from outpace.models.llama.config.footprint import ENTRY_BYTES
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.options import AUTO, FILE, INT4, INT8

WEIGHTS = (INT8, INT4, FILE, AUTO)
INSTALL = (
    "run `pip install ./kernels` in a checkout of outpace, with a C++20 compiler, or"
    " `pip install --find-links FOLDER outpace-kernels` where FOLDER holds a wheel of them"
)


class UnsupportedShape(UserError):
    """A model that the kernels do not take; the torch runtime does."""


@dataclass(frozen=True)
class NativeOptions:
    """`threads` None: as many as this process may use. `instruction_set` "": the fastest that the machine has.
    `weights` "file": those in blocks stay as the file has them; all others are rounded to int8. "auto": the same,
    and nothing is told of what comes in float. "int4": the same, and the layers' matrices in float are rounded to four
    bits."""

    threads: int | None = None
    kv_dtype: str = "float32"
    instruction_set: str = ""
    weights: str = INT8

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_whole("threads", self.threads, 1, usable_cores())
        if self.kv_dtype not in ENTRY_BYTES:
            raise unknown("kv_dtype", self.kv_dtype, ENTRY_BYTES)
        if self.weights not in WEIGHTS:
            raise unknown("weights", self.weights, WEIGHTS)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(cpu_ids())


def read_formats(kernels: Any) -> tuple[str, ...]:
    """The formats of a file's matrices that these kernels read where they lie: blocks, and floats that they round."""
    return (*getattr(kernels, "FORMATS", ()), *getattr(kernels, "FLOATS", ()))


def load_kernels() -> Any:
    """The package of the kernels; UserError where it is not installed, with how to install it."""
    try:
        import outpace_kernels
    except ImportError as error:
        what = "are not installed" if error.name == "outpace_kernels" else f"cannot be imported ({error})"
        raise UserError(f"the native kernels {what}: {INSTALL}") from error
    return outpace_kernels


def check_supported(kernels: Any, config: LlamaConfig) -> None:
    """UnsupportedShape for a model that the kernels would get wrong."""
    largest = kernels.MAX_DEPTH
    if config.head_dim > largest or config.head_dim % 2:
        raise UnsupportedShape(f"head_dim is {config.head_dim}, native kernels take even ones up to {largest}")
    if not hasattr(kernels.Layer, "window") and (any(config.windows) or config.query_scale or constants_of(config)):
        raise UnsupportedShape(f"these kernels were built before they took sliding windows or Gemma 3: {INSTALL}")


def constants_of(config: LlamaConfig) -> dict[str, Any]:
    """What the kernels' Model is told of a config beside its sizes; nothing where it is Llama's."""
    found: dict[str, Any] = {}
    if len(config.rotations) > 1:
        found["rotations"] = len(config.rotations)
    if config.embedding_scale != 1.0:
        found["embedding_scale"] = config.embedding_scale
    return found | ({"gelu": True} if config.activation == GELU else {})
