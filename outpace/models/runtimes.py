"""What computes a model: our own runtimes for the Llama family, or transformers for everything else that it loads.

On a CPU it is the native one, in int8, unless another precision is asked for. Where its kernels are not installed or do
not take the model, torch computes it in float32, and the model's `notice` says so: the texts of the two differ.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outpace.core.errors import UserError, unknown
from outpace.models.base import UnsupportedModel
from outpace.models.llama.inflate import check_factor, inflated, label, notice

Progress = Callable[[str, float], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO, INT8 = "auto", "int8"
INSTALL = "`pip install 'outpace[transformers]'`"


@dataclass(frozen=True)
class How:
    """How a model is to be loaded. `dtype` "auto": int8 on a CPU where it is to be had, else see `torch_dtype`. `exact`
    None: where it is to be had. `inflate`: how many times as much a pass shall cost, see `inflate`. Two are for
    transformers only: `trust_remote_code` runs Python files that come with the model, `device_map` is accelerate's."""

    device: str = "cpu"
    dtype: str = AUTO
    exact: bool | None = None
    trust_remote_code: bool = False
    device_map: str | Mapping[str, Any] | None = None
    inflate: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in (AUTO, INT8, *DTYPES):
            raise unknown("dtype", self.dtype, (AUTO, INT8, *DTYPES))
        check_factor(self.inflate)

    @property
    def is_on_cpu(self) -> bool:
        return self.device_map is None and torch.device(self.device).type == "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """What torch computes in. "auto" is bfloat16 on an NVIDIA GPU that has it, else float32; UserError for int8."""
        if self.dtype == INT8:
            raise UserError(f"dtype int8 needs the runtime native, torch computes in {', '.join(DTYPES)}")
        if self.dtype != AUTO:
            return DTYPES[self.dtype]
        is_on_gpu = self.device_map is not None or torch.device(self.device).type == "cuda"
        has_half = is_on_gpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_half else torch.float32


class Opened(NamedTuple):
    """A model, its tokenizer, its name, the fields of its config.json, and what its weights are held in: int8, or the
    name of a torch type. `inflate`: how many times as much as its own a pass costs."""

    model: Any
    tokenizer: Any
    name: str
    config: Mapping[str, Any]
    precision: str = ""
    inflate: int = 1


def open_model(spec: str | Path | None, runtime: str, how: How, progress: Progress) -> Opened:
    """The model that `spec` means by a runtime of RUNTIMES. "auto" is our own, and transformers for what our own
    refuses as not its to run, and for a device map."""
    if runtime not in RUNTIMES:
        raise unknown("runtime", runtime, RUNTIMES)
    return RUNTIMES[runtime](spec, how, progress)


def wrap_loaded(module: Any, tokenizer: Any) -> Opened:
    """A model of transformers that is loaded already, and its tokenizer."""
    _need_transformers("a loaded model")
    from outpace.models.hf import load as transformers_load

    model, wrapped = transformers_load.wrap_pair(module, tokenizer)
    name = getattr(module, "name_or_path", "") or type(module).__name__
    return Opened(model, wrapped, name, model.config.to_dict(), _name_of(model.dtype))


def missing_kernels() -> str | None:
    """Why the native runtime is not to be had at all; None where it is."""
    from outpace.models.llama.native_runtime import load_kernels

    try:
        load_kernels()
    except UserError as error:
        return str(error)
    return None


def _auto(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    if how.device_map is not None:
        return _transformers(spec, how, progress)
    try:  # plain files need no code of their own, whatever is allowed
        return _own(spec, replace(how, trust_remote_code=False), progress)
    except UnsupportedModel as refusal:
        if importlib.util.find_spec("transformers") is None:
            raise UserError(f"{refusal}; it needs {INSTALL}") from None
    return _transformers(spec, how, progress)


def _own(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    """Native on a CPU where no other precision is asked for, else torch."""
    from outpace.models.llama.native_runtime import UnsupportedShape

    if how.dtype == INT8:
        return _native(spec, how, progress)
    if how.dtype != AUTO or not how.is_on_cpu:
        return _llama(spec, how, progress)
    refusal = missing_kernels()
    if refusal is None:
        try:
            return _native(spec, how, progress)
        except UnsupportedShape as error:
            refusal = str(error)
    opened = _llama(spec, how, progress)
    _add_notice(opened.model, f"float32 by torch, not int8: {refusal}")
    return opened


def _llama(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    from outpace.models.llama.torch_runtime import Llama

    if how.trust_remote_code or how.device_map is not None:
        raise UserError("trust_remote_code and device_map are options of the runtime transformers, not of llama")
    options: dict[str, Any] = {"device": how.device, "dtype": how.torch_dtype, "exact": how.exact}
    return _read(spec, how, progress, partial(Llama.from_tensors, **options), _name_of(how.torch_dtype))


def _native(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    """int8 on a CPU by the package outpace-kernels. A `dtype` of float16 halves the keys and values."""
    from outpace.models.llama.native_runtime import NativeLlama, Options, load_kernels, usable_cores

    load_kernels()
    if not how.is_on_cpu or how.trust_remote_code:
        raise UserError("the runtime native runs on the cpu and takes neither trust_remote_code nor device_map")
    if how.dtype not in (AUTO, INT8, "float16"):
        raise UserError(f"the runtime native computes in int8, dtype {how.dtype} needs the runtime llama")
    threads = min(torch.get_num_threads(), usable_cores())  # more were asked for by the environment, not by the user
    options = Options(threads, "float16" if how.dtype == "float16" else "float32")
    return _read(spec, how, progress, partial(NativeLlama.from_tensors, options=options), INT8)


def _read(spec: str | Path | None, how: How, progress: Progress, build: Callable[..., Any], precision: str) -> Opened:
    """A model of the Llama family from its files."""
    from outpace.models.files.checkpoint import Checkpoint
    from outpace.models.files.find import resolve
    from outpace.models.llama.config import from_dict, tensor_shapes
    from outpace.models.llama.draft_vocab import read_draft_vocab
    from outpace.models.text.tokenizer import Tokenizer

    path = resolve(None if spec is None else str(spec), progress=progress)
    with Checkpoint.open(path) as checkpoint:
        config = from_dict(checkpoint.config)
        checkpoint.check_shapes(tensor_shapes(config))
        head_ids = read_draft_vocab(path, checkpoint.config)
        model = build(*inflated(config, checkpoint.tensor, how.inflate), head_ids=head_ids, progress=progress)
    _add_notice(model, notice(how.inflate))
    name = _name(spec) + label(how.inflate)
    return Opened(model, Tokenizer.from_folder(path), name, checkpoint.config, precision, how.inflate)


def _add_notice(model: Any, text: str | None) -> None:
    model.notice = "; ".join(filter(None, (model.notice, text))) or None


def _transformers(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    from outpace.models.files import hub
    from outpace.models.files.find import resolve

    _need_transformers("the runtime transformers")
    if how.exact:
        raise UserError("exact mode is not to be had with the runtime transformers, leave out exact")
    if how.inflate != 1:
        raise UserError("inflate is for the runtimes native and llama, transformers lays out its models itself")
    from outpace.models.hf import load as transformers_load

    name = None if spec is None or os.path.exists(spec) else hub.parse(str(spec))
    progress("loading", 0.0)
    is_repository = name is not None and name.file is None  # there may be more to fetch than our own runtime reads
    model, tokenizer = transformers_load.load(
        name.repository if name and is_repository else resolve(None if spec is None else str(spec), progress=progress),
        revision=name.revision if name and is_repository else None,
        device=how.device,
        dtype=how.torch_dtype,
        device_map=how.device_map,
        trust_remote_code=how.trust_remote_code,
    )
    return Opened(model, tokenizer, _name(spec), model.config.to_dict(), _name_of(model.dtype))


def _name(spec: str | Path | None) -> str:
    from outpace.models.files.find import shipped_model

    return shipped_model().stem if spec is None else str(spec)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _need_transformers(what: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{what} needs {INSTALL}")


RUNTIMES = {"auto": _auto, "llama": _llama, "native": _native, "transformers": _transformers}
