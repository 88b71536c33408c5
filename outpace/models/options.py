"""`LoadOptions`: how a target or draft model is loaded. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outpace.core.arrays import to_python
from outpace.core.errors import UserError, unknown

if TYPE_CHECKING:
    import torch

AUTO, INT8, INT4, FILE = "auto", "int8", "int4", "file"
FLOATS = ("float32", "bfloat16", "float16")  # the types that torch computes in
DTYPES = (AUTO, INT8, INT4, FILE, *FLOATS)
CUDA, EAGER, OFF = "cuda", "eager", "off"
GRAPHS = (AUTO, CUDA, EAGER, OFF)
KV_DTYPES = (AUTO, "float32", "float16", INT8)
NATIVE_KV = "float16"  # the native kernels' default for keys and values, as in most engines


class Shape(NamedTuple):
    """The shape that `inflate` widens a model to; `queries` and `keys` are the total widths of all heads."""

    hidden: int
    middle: int
    layers: int
    queries: int
    keys: int


SHAPES = {
    "1B": Shape(1280, 3584, 54, 1280, 320),  # MobileLLM 1B
    "3B": Shape(2048, 11008, 36, 2048, 512),  # SmolLM3 3B
    "8B": Shape(4096, 14336, 32, 4096, 1024),  # Llama 3.1 8B
    "32B": Shape(5120, 27648, 64, 5120, 1024),  # Qwen2.5 32B
    "70B": Shape(8192, 28672, 80, 8192, 1024),  # Llama 3.1 70B
}


@dataclass(frozen=True)
class LoadOptions:
    """How one model is loaded. Scalars of numpy and torch, `torch.dtype` and `torch.device` are accepted too.

    `dtype` "file": by the native kernels on a CPU, the own weights of a GGUF file or of a GPTQ or AWQ folder, and int8
    for float matrices. "int4": like "file", but four bits for the layers' float matrices, in ggml's format Q4_1.
    "int8": everything in int8, by the same kernels. "auto": like "file" on a CPU if the native kernels support the
    model, bfloat16 on a GPU that has it, else float32.

    `exact` None: if the machine supports it. `runtime` "auto": our own if it supports the architecture and the weights'
    format, else transformers. `trust_remote_code` and `device_map` are for transformers only: the first runs Python
    files that come with the model, the second is accelerate's. So is `tp_plan`, "auto": each layer is split over the
    processes that torch.distributed.run started, and only the first of them writes output. `pp_plan`, for the runtimes
    native and llama: number of layers in each of these processes, as in "12,10,8"; "auto": by memory and speed.
    `inflate`: widen the model to the shape of one of this size, as in "8B"; the text does not change. `layers`: load
    these only, as in "0-24,26-29". `kv_dtype`: the type of keys and values, also of the draft; "auto": float16 for the
    native kernels, else the runtime's own. `graphs`, for the runtime llama: "cuda" replays captured passes, "eager"
    runs the same passes without a capture on any device; "auto" is cuda on a GPU and off elsewhere. `is_draft`: the
    model only proposes, so four bits change no text: by the native kernels, "auto" is "int4". `target_files`: folder or
    .gguf file of the target whose embeddings a packed draft uses.
    """

    device: str = "cpu"
    dtype: str = AUTO
    exact: bool | None = None
    runtime: str = AUTO
    trust_remote_code: bool = False
    device_map: str | Mapping[str, Any] | None = None
    inflate: str | None = None
    layers: str | None = None
    graphs: str = AUTO
    kv_dtype: str = AUTO
    tp_plan: str | None = None
    pp_plan: str | None = None
    is_draft: bool = False
    target_files: Path | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _to_builtin(getattr(self, field.name)))
        if self.exact not in (None, True, False):
            raise UserError(f"exact is {self.exact!r:.50}, it must be True, False or None")
        if self.trust_remote_code not in (True, False):
            raise UserError(f"trust_remote_code is {self.trust_remote_code!r:.50}, it must be True or False")
        named = {"dtype": DTYPES, "graphs": GRAPHS, "kv_dtype": KV_DTYPES}
        for name, allowed in (named | {"tp_plan": (AUTO, None)}).items():
            value = getattr(self, name)
            if value not in allowed:
                raise unknown(name, str(value), filter(None, allowed))
        if self.pp_plan is not None and not is_plan(self.pp_plan):
            raise UserError(f"pp_plan is {self.pp_plan!r:.100}, it must be auto or each rank's layers, as in 12,10,8")
        if self.inflate not in (None, *SHAPES):
            raise _unknown_size(str(self.inflate))

    def of_draft(self, device: str | None = None, dtype: str | None = None) -> LoadOptions:
        """Return the options of this target's draft model, with its own device and dtype if they are given.

        A device map, a tp_plan, a pp_plan and inflation apply to the target only; so do graphs if the devices differ.
        """
        graphs = self.graphs if device in (None, self.device) else AUTO
        own = replace(self, device=device or self.device, dtype=dtype or self.dtype, graphs=graphs)
        return replace(own, device_map=None, tp_plan=None, pp_plan=None, inflate=None)

    def kv_dtype_or(self, default: str) -> str:
        """Return the type of keys and values, given the runtime's default."""
        return default if self.kv_dtype == AUTO else self.kv_dtype

    @property
    def is_spread(self) -> bool:
        """Whether transformers chooses the devices."""
        return self.device_map is not None or self.tp_plan is not None

    @property
    def is_on_cuda(self) -> bool:
        return not self.is_spread and self.device.split(":")[0] == "cuda"

    @property
    def is_on_cpu(self) -> bool:
        return not self.is_spread and self.device.split(":")[0] == "cpu"

    @property
    def has_graphs(self) -> bool:
        """Whether passes are captured, or run like captured ones."""
        return self.graphs in (CUDA, EAGER) or (self.graphs == AUTO and self.is_on_cuda)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that torch computes in: for "auto", bfloat16 on an NVIDIA GPU that has it, else float32.

        UserError for the native runtime's formats.
        """
        import torch

        name = self.dtype
        if name in (INT8, INT4, FILE):
            raise UserError(f"dtype {name} needs the runtime native, torch computes in {', '.join(FLOATS)}")
        if name == AUTO:
            is_on_gpu = self.is_spread or torch.device(self.device).type == "cuda"
            has_half = is_on_gpu and has_bfloat16(None if self.is_spread else self.device)
            name = "bfloat16" if has_half else "float32"
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def has_bfloat16(device: str | torch.device | None) -> bool:
    """Return whether this GPU (None: the current one) exists and computes in bfloat16 natively."""
    import torch

    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def _to_builtin(value: Any) -> Any:
    """Convert scalars of numpy and torch to Python's, and types and devices of torch to their names."""
    value = to_python(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _unknown_size(size: str) -> UserError:
    """Build the error for a size that `inflate` does not have; it names the two nearest."""
    message = f"unknown inflate {size!r}, allowed are {', '.join(SHAPES)}"
    try:
        wanted = float(size.upper().removesuffix("B"))
    except ValueError:
        return UserError(message)
    nearest = sorted(SHAPES, key=lambda name: abs(float(name.removesuffix("B")) - wanted))[:2]
    return UserError(f"{message}; the nearest are {' and '.join(nearest)}")


def is_plan(text: object) -> bool:
    """Return whether this is "auto" or a list of numbers of layers, as in "12,10,8"."""
    parts = text.split(",") if isinstance(text, str) else [""]
    return text == AUTO or all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)


Progress = Callable[[str, float], None]  # receives a stage and the fraction of it that is done


def silent(stage: str, fraction: float) -> None:
    """Ignore the progress of a load."""
