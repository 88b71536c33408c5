"""What computes a model: our own runtimes for the Llama family, or transformers for everything else that it loads."""

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

Progress = Callable[[str, float], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INSTALL = "`pip install 'outpace[transformers]'`"


@dataclass(frozen=True)
class How:
    """How a model is to be loaded. `exact` None: where it is to be had. The last two are for transformers only:
    `trust_remote_code` runs Python files that come with the model, `device_map` is accelerate's."""

    device: str = "cpu"
    dtype: str = "float32"
    exact: bool | None = None
    trust_remote_code: bool = False
    device_map: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)


class Opened(NamedTuple):
    """A model, its tokenizer, its name, and the fields of its config.json."""

    model: Any
    tokenizer: Any
    name: str
    config: Mapping[str, Any]


def open_model(spec: str | Path | None, runtime: str, how: How, progress: Progress) -> Opened:
    """The model that `spec` means by a runtime of RUNTIMES. "auto" is our own, and transformers for what our own
    refuses as not its to run, and for a device map."""
    if runtime not in RUNTIMES:
        raise unknown("runtime", runtime, RUNTIMES)
    return RUNTIMES[runtime](spec, how, progress)


def wrap_loaded(module: Any, tokenizer: Any) -> Opened:
    """A model of transformers that is loaded already, and its tokenizer."""
    _need_transformers("a loaded model")
    from outpace.models import transformers_load

    model, wrapped = transformers_load.wrap_pair(module, tokenizer)
    name = getattr(module, "name_or_path", "") or type(module).__name__
    return Opened(model, wrapped, name, model.config.to_dict())


def _auto(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    if how.device_map is not None:
        return _transformers(spec, how, progress)
    try:  # plain files need no code of their own, whatever is allowed
        return _llama(spec, replace(how, trust_remote_code=False), progress)
    except UserError as refusal:
        if "runtime transformers" not in str(refusal):
            raise
        if importlib.util.find_spec("transformers") is None:
            raise UserError(f"{refusal}; it needs {INSTALL}") from None
    return _transformers(spec, how, progress)


def _llama(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    from outpace.models.llama import Llama

    if how.trust_remote_code or how.device_map is not None:
        raise UserError("trust_remote_code and device_map are options of the runtime transformers, not of llama")
    options: dict[str, Any] = {"device": how.device, "dtype": DTYPES[how.dtype], "exact": how.exact}
    return _read(spec, progress, partial(Llama.from_tensors, **options))


def _native(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    """int8 on a CPU by the package outpace-kernels; a `dtype` of half precision halves the keys and values."""
    from outpace.models.native import NativeLlama, Options, load_kernels

    load_kernels()
    if how.device != "cpu" or how.trust_remote_code or how.device_map is not None:
        raise UserError("the runtime native runs on the cpu and takes neither trust_remote_code nor device_map")
    options = Options(torch.get_num_threads(), "float32" if how.dtype == "float32" else "float16")
    return _read(spec, progress, partial(NativeLlama.from_tensors, options=options))


def _read(spec: str | Path | None, progress: Progress, build: Callable[..., Any]) -> Opened:
    """A model of the Llama family from its files."""
    from outpace.models.checkpoint import Checkpoint
    from outpace.models.config import from_dict, tensor_shapes
    from outpace.models.draft_vocab import read_draft_vocab
    from outpace.models.find import resolve
    from outpace.models.tokenizer import Tokenizer

    path = resolve(None if spec is None else str(spec), progress=progress)
    with Checkpoint.open(path) as checkpoint:
        config = from_dict(checkpoint.config)
        checkpoint.check_shapes(tensor_shapes(config))
        head_ids = read_draft_vocab(path, checkpoint.config)
        model = build(config, checkpoint.tensor, head_ids=head_ids, progress=progress)
    return Opened(model, Tokenizer.from_folder(path), _name(spec), checkpoint.config)


def _transformers(spec: str | Path | None, how: How, progress: Progress) -> Opened:
    from outpace.models import hub
    from outpace.models.find import resolve

    _need_transformers("the runtime transformers")
    if how.exact:
        raise UserError("exact mode is not to be had with the runtime transformers, leave out exact")
    from outpace.models import transformers_load

    name = None if spec is None or os.path.exists(spec) else hub.parse(str(spec))
    progress("loading", 0.0)
    is_repository = name is not None and name.file is None  # there may be more to fetch than our own runtime reads
    model, tokenizer = transformers_load.load(
        name.repository if name and is_repository else resolve(None if spec is None else str(spec), progress=progress),
        revision=name.revision if name and is_repository else None,
        device=how.device,
        dtype=DTYPES[how.dtype],
        device_map=how.device_map,
        trust_remote_code=how.trust_remote_code,
    )
    return Opened(model, tokenizer, _name(spec), model.config.to_dict())


def _name(spec: str | Path | None) -> str:
    from outpace.models.find import shipped_model

    return shipped_model().stem if spec is None else str(spec)


def _need_transformers(what: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{what} needs {INSTALL}")


RUNTIMES = {"auto": _auto, "llama": _llama, "native": _native, "transformers": _transformers}
