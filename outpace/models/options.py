"""`LoadOptions`: how a target or draft model is loaded. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.arrays import to_python
from outpace.core.errors import UserError
from outpace.core.options import CheckedOptions, one_of, option, switch

if TYPE_CHECKING:
    import torch

AUTO, INT8, INT4, FILE = "auto", "int8", "int4", "file"
FLOATS = ("float32", "bfloat16", "float16")  # the types that torch computes in
OWN_RUNTIMES = ("native", "llama")
RUNTIMES = (AUTO, *OWN_RUNTIMES, "transformers")
DTYPES = (AUTO, INT8, INT4, FILE, *FLOATS)
ALL = "all"
MIN_VOCAB = 1024  # tokens of a reduced output layer
CUDA, EAGER, OFF = "cuda", "eager", "off"
GRAPHS = (AUTO, CUDA, EAGER, OFF)
KV_DTYPES = (AUTO, "float32", "float16", INT8)
NATIVE_KV = "float16"  # the native kernels' default for keys and values, as in most engines
GENERATION_CONFIG = "Sampling where nothing else is said: auto (as the model's files recommend) or none (also vllm)."


def _check_plan(name: str, plan: Any) -> None:
    if not is_plan(plan):
        raise UserError(f"pp_plan is {plan!r:.100}, it must be auto or each rank's layers, as in 12,10,8")


def _check_vocab(name: str, value: str) -> None:
    if value not in (AUTO, ALL) and not (value.isascii() and value.isdigit() and int(value) >= MIN_VOCAB):
        raise UserError(f"{name} is {value!r:.50}, it must be auto, all, or a number of tokens from {MIN_VOCAB} on")


@dataclass(frozen=True)
class LoadOptions(CheckedOptions):
    """How a target and its draft are loaded. Scalars of numpy and torch, `torch.dtype` and `torch.device` are accepted
    too. `is_draft`: the model only proposes, so four bits change no text: by the native kernels, "auto" is "int4".
    `target_files`: folder or .gguf file of the target whose embeddings a packed draft uses.
    """

    device: str = option("cpu", "Device of the target: cpu, cuda, cuda:1, ...")
    dtype: str = one_of(
        AUTO,
        DTYPES,
        "Precision: file (a GGUF, GPTQ or AWQ model's own weights, all else in int8; CPU only), int4 (as file, but four"
        " bits where file has int8 in its layers), int8 (CPU only), float32, bfloat16 or float16; auto: file on a CPU"
        " whose kernels support the model, bfloat16 on a GPU where available, else float32.",
    )
    exact: bool | None = switch(
        None,
        "Make every method compute bit-identical logits; the default is on where the device supports it.",
        runtimes=OWN_RUNTIMES,
    )
    runtime: str = one_of(
        AUTO,
        RUNTIMES,
        "Runtime: native (kernels for a CPU), llama (the Llama family by torch) or transformers (causal and"
        " encoder-decoder models); auto: one of our own if it supports the model, else transformers.",
    )
    trust_remote_code: bool = switch(
        False, "Run the Python files that come with a model, by transformers.", runtimes=("transformers",)
    )
    device_map: str | Mapping[str, Any] | None = option(
        None, "Devices of the target's parts, for accelerate; by transformers.", runtimes=("transformers",)
    )
    layers: str | None = option(None, "The layers to load, as in 0-24,26-29.", runtimes=OWN_RUNTIMES)
    graphs: str = one_of(
        AUTO,
        GRAPHS,
        "Graph capture of the runtime llama: cuda (CUDA graphs), eager (the same forwards without capture, on any"
        " device) or off; auto: cuda on a GPU, else off.",
        runtimes=("llama",),
    )
    kv_dtype: str = one_of(
        AUTO,
        KV_DTYPES,
        "Keys and values: float32, float16 (half of the memory) or int8 (about a quarter), of the draft's too; auto:"
        " float16 by the native kernels, else the runtime's own.",
        runtimes=OWN_RUNTIMES,
    )
    pp_plan: str | None = option(
        None,
        "Layers of the target in each of the processes that torch.distributed.run started, on one machine or several,"
        " as in 12,10,8; auto: by memory and speed. Only the first process writes output. By the runtimes native and"
        " llama.",
        _check_plan,
        runtimes=OWN_RUNTIMES,
    )
    draft_device: str | None = option(None, "Device of the draft; the default is the target's.")
    draft_dtype: str | None = one_of(
        None,
        DTYPES,
        "Precision of the draft; the default is the target's dtype, where auto holds a draft in int4 on a CPU.",
    )
    draft_vocab: str = option(
        AUTO,
        "Tokens that the draft model's output layer scores: a number N for the first N, those of the prompt and those"
        " written lately; auto: N is 49,152 where that pays; or all. By the runtimes native and"
        " llama.",
        _check_vocab,
    )
    is_draft: bool = False
    target_files: Path | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _to_builtin(getattr(self, field.name)))
        object.__setattr__(self, "draft_vocab", str(self.draft_vocab))
        super().__post_init__()
        if self.runtime != AUTO:
            self.check_runtime(self.runtime)

    def check_runtime(self, runtime: str) -> None:
        """Raise UserError for an option that this runtime does not take."""
        for one in fields(self):
            value, takers = getattr(self, one.name), one.metadata.get("runtimes", RUNTIMES)
            if runtime not in takers and value not in (one.default, False, OFF):
                which = f"the runtime{'s' if len(takers) > 1 else ''} {' and '.join(takers)}"
                raise UserError(f"{one.name} {value} is for {which}, not for {runtime}: leave it out")

    def of_draft(self) -> LoadOptions:
        """Return the options of this target's draft model.

        A device map and a pp_plan apply to the target only; so do graphs if the devices differ.
        """
        graphs = self.graphs if self.draft_device in (None, self.device) else AUTO
        own = replace(
            self, device=self.draft_device or self.device, dtype=self.draft_dtype or self.dtype, graphs=graphs
        )
        return replace(own, device_map=None, pp_plan=None, draft_device=None, draft_dtype=None)

    def kv_dtype_or(self, default: str) -> str:
        """Return the type of keys and values, given the runtime's default."""
        return default if self.kv_dtype == AUTO else self.kv_dtype

    @property
    def num_output_tokens(self) -> int | None:
        """The tokens that a draft's output layer keeps; None: to be chosen by its sizes, 0: all."""
        if self.draft_vocab == AUTO:
            return None
        return 0 if self.draft_vocab == ALL else int(self.draft_vocab)

    @property
    def is_on_cuda(self) -> bool:
        return self.device_map is None and self.device.split(":")[0] == "cuda"

    @property
    def is_on_cpu(self) -> bool:
        return self.device_map is None and self.device.split(":")[0] == "cpu"

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
            is_spread = self.device_map is not None
            is_on_gpu = is_spread or torch.device(self.device).type == "cuda"
            has_half = is_on_gpu and has_bfloat16(None if is_spread else self.device)
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


def is_plan(text: object) -> bool:
    """Return whether this is "auto" or a list of numbers of layers, as in "12,10,8"."""
    parts = text.split(",") if isinstance(text, str) else [""]
    return text == AUTO or all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)


Progress = Callable[[str, float], None]  # receives a stage and the fraction of it that is done


def silent(stage: str, fraction: float) -> None:
    """Ignore the progress of a load."""
