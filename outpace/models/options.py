"""`LoadOptions`: how a model is loaded, target or draft. Importing it does not import torch, for the sake of --help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from outpace.core.arrays import to_python
from outpace.core.errors import UserError, check_whole, unknown

if TYPE_CHECKING:
    import torch

AUTO, INT8, INT4, FP8, FILE = "auto", "int8", "int4", "fp8", "file"
FLOATS = ("float32", "bfloat16", "float16")  # what torch computes in
MOST_INFLATED = 256
CUDA, EAGER, OFF = "cuda", "eager", "off"
GRAPHS = (AUTO, CUDA, EAGER, OFF)
KV_DTYPES = (AUTO, "float32", "float16", INT8)
NATIVE_KV = "float16"  # keys and values where the native kernels run a model: as most engines hold them


@dataclass(frozen=True)
class LoadOptions:
    """How one model is loaded. Scalars of numpy and torch, `torch.dtype` and `torch.device` are taken too.

    `dtype` "file": on a CPU by the native kernels, the own weights of a GGUF file, or of a folder by GPTQ or AWQ, and
    int8 for what comes in float. "int4": as "file", but four bits for the layers' matrices that come in float, 32
    weights to a scale, as ggml's Q4_1 has them. "int8": by these kernels all in int8; elsewhere it is torchao's, and so
    is "fp8": matrices in 8 bits, all else in what "auto" would be. "auto": as "file" on a CPU where the native kernels
    take the model, bfloat16 on a GPU that has it, else float32.
    `exact` None: where the machine can. `runtime` "auto": our own where it knows the architecture and the weights'
    format, else transformers. `trust_remote_code` and `device_map` are for transformers only: the first runs Python
    files that come with the model, the second is accelerate's; so is `tp_plan`, "auto": each layer is split over the
    processes that torch.distributed.run started, of which the first alone writes. `inflate`: a pass costs so many times
    as much.
    `kv_dtype`: of keys and values, of the draft's too; "auto": float16 by the native kernels, else the runtime's own.
    `graphs`, of the runtime llama: "cuda" replays captured passes, "eager" runs the same passes without a capture, on
    any device; "auto" is cuda on a GPU and off elsewhere. `is_draft`: the model only proposes, and what it holds in
    four bits changes no text: where the native kernels run it, "auto" is "int4".
    """

    device: str = "cpu"
    dtype: str = AUTO
    exact: bool | None = None
    runtime: str = AUTO
    trust_remote_code: bool = False
    device_map: str | Mapping[str, Any] | None = None
    inflate: int = 1
    graphs: str = AUTO
    kv_dtype: str = AUTO
    tp_plan: str | None = None
    is_draft: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _pythonic(getattr(self, field.name)))
        dtypes = (AUTO, INT8, INT4, FP8, FILE, *FLOATS)
        if self.dtype not in dtypes:
            raise unknown("dtype", str(self.dtype), dtypes)
        if self.exact not in (None, True, False):
            raise UserError(f"exact is {self.exact!r:.50}, it must be True, False or None")
        if self.trust_remote_code not in (True, False):
            raise UserError(f"trust_remote_code is {self.trust_remote_code!r:.50}, it must be True or False")
        if self.graphs not in GRAPHS:
            raise unknown("graphs", str(self.graphs), GRAPHS)
        if self.kv_dtype not in KV_DTYPES:
            raise unknown("kv_dtype", str(self.kv_dtype), KV_DTYPES)
        if self.tp_plan not in (None, AUTO):
            raise unknown("tp_plan", str(self.tp_plan), (AUTO,))
        check_whole("inflate", self.inflate, 1, MOST_INFLATED)

    def of_draft(self, device: str | None = None, dtype: str | None = None) -> LoadOptions:
        """Those of the draft for a target with these: the same, but for a device and a dtype of its own where they are
        named; a device map, a tp_plan and an inflation are the target's alone, and so are graphs where the devices
        differ."""
        graphs = self.graphs if device in (None, self.device) else AUTO
        own = replace(self, device=device or self.device, dtype=dtype or self.dtype, graphs=graphs)
        return replace(own, device_map=None, tp_plan=None, inflate=1)

    def kv_dtype_or(self, own: str) -> str:
        """How keys and values are held by a runtime whose own way is `own`."""
        return own if self.kv_dtype == AUTO else self.kv_dtype

    @property
    def is_spread(self) -> bool:
        """Whether transformers chooses the devices."""
        return self.device_map is not None or self.tp_plan is not None

    @property
    def has_graphs(self) -> bool:
        """Whether passes are captured, or run as those that are."""
        is_on_gpu = not self.is_spread and self.device.split(":")[0] == "cuda"
        return self.graphs in (CUDA, EAGER) or (self.graphs == AUTO and is_on_gpu)

    @property
    def is_on_cpu(self) -> bool:
        return not self.is_spread and self.device.partition(":")[0] == "cpu"

    @property
    def quantized(self) -> str | None:
        """What torch is to hold matrices in, where that is not what it computes in."""
        is_torchs = self.dtype == FP8 or (self.dtype == INT8 and (self.runtime == "llama" or not self.is_on_cpu))
        return self.dtype if is_torchs else None

    @property
    def torch_dtype(self) -> torch.dtype:
        """What torch computes in. "auto" is bfloat16 on an NVIDIA GPU that has it, else float32; UserError for file,
        and for int8 where that is the native runtime's."""
        import torch

        if self.dtype in (INT8, INT4, FILE) and not self.quantized:
            raise UserError(f"dtype {self.dtype} needs the runtime native, torch computes in {', '.join(FLOATS)}")
        name = self.dtype
        if name == AUTO or self.quantized:
            is_on_gpu = self.is_spread or torch.device(self.device).type == "cuda"
            has_half = is_on_gpu and has_bfloat16(None if self.is_spread else self.device)
            name = "bfloat16" if has_half else "float32"
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def has_bfloat16(device: str | torch.device | None) -> bool:
    """Whether this GPU, None: the current one, is there and computes in bfloat16 by itself."""
    import torch

    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def _pythonic(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own, a type or a device of torch by its name; anything else as it is."""
    value = to_python(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def silent(stage: str, fraction: float) -> None:
    """Progress of a load that nobody sees."""
