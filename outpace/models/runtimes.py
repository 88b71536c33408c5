"""Runtimes that load and compute models: our own for the Llama family, and transformers for all others.

On a CPU the native runtime is the default, with a file's own weights if they are in blocks, else int8. If its kernels
do not support the model, torch computes it in float32, and the model's `notice` says so, because the texts differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outpace.core.arrays import kernels, num_cores, num_threads
from outpace.core.errors import UserError, require
from outpace.models.base import Model, UnsupportedModel, runtime_name
from outpace.models.devices import check_memory
from outpace.models.files.cache import weights_digest
from outpace.models.llama.config.experts import SPLIT
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.qwen35 import FUSED, TILED
from outpace.models.llama.weight_sources import parse_layers, source_of
from outpace.models.options import AUTO, EAGER, FILE, INT4, INT8, NATIVE_KV, LoadOptions, Progress

TORCH = "torch"  # the extra
OTHER_ORDERS = {
    TILED: "value heads",
    FUSED: "delta nets' inputs",
    SPLIT: "experts' rows",
}  # of GGUF files, by the fields that say so
TRANSFORMERS = (TORCH, "torch", "transformers")  # the same, and what the runtime needs of it


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, its name, and the fields of its config.json.

    `notice`: a sentence for users about the model and its loading. `again` loads the same model, with the options that
    are changed by name, in any process, and can be pickled; `files` finds the folder of its files; both are None if the
    model was passed as an object. `others`: for a draft model, further draft models next to it. `drafter`: for a draft,
    the drafter that runs it. `is_head`: whether it is a trained head, which reads the target's hidden states. `lead`:
    the `Leader` of a model that is split over processes.
    """

    model: Any
    tokenizer: Any
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    notice: str | None = None
    again: Callable[..., Loaded] | None = None
    files: Callable[[], Path] | None = None
    others: tuple[Loaded, ...] = ()
    drafter: str = "model"
    is_head: bool = False
    lead: Any = None

    @property
    def reads_target(self) -> bool:
        """Whether this draft reads the target's hidden states, and so cannot run in parallel with the target."""
        return self.is_head or self.drafter == "steered"

    @property
    def precision(self) -> str:
        precision: str = self.model.precision
        return precision

    def recommended_sampling(self, source: str) -> dict[str, Any]:
        """Return the sampling parameters that the model's files recommend; {} if they recommend none.

        `source` is a value of --generation-config. UserError for values that are not allowed.
        """
        from outpace.models.files.recommended_sampling import AUTO, recommended_sampling

        if source != AUTO or self.files is None:
            return {}
        try:
            path = self.files()
        except UserError:  # of a repository that only transformers can read
            return {}
        return recommended_sampling(path)

    @property
    def identity(self) -> dict[str, str]:
        """What hidden states depend on, by name: digests of tokenizer, template and weights; runtime and precision."""
        found = {"tokenizer": self.tokenizer.fingerprint[:16], "template": self.tokenizer.template_digest}
        if self.files is not None:
            found["weights"] = weights_digest(self.files())
        return found | {"runtime": runtime_name(self.model)}


def open_model(spec: str | Path | None, options: LoadOptions, progress: Progress) -> Loaded:
    """Load the model that `spec` names by one of the runtimes.

    "auto" is our own, and transformers for models that ours does not support and for a device map.
    """
    load = partial(_LOADERS[options.runtime], spec, options, progress)
    if options.pp_plan is None:
        return load()
    from outpace.models.distributed.pipeline import load_pipeline

    loaded, model = load_pipeline(load)
    stages = " + ".join(str(len(stage.layers)) for stage in model.stages)
    notices = "; ".join(filter(None, (f"a pipeline of {stages} layers", loaded.notice)))
    return replace(loaded, model=model, notice=notices, lead=model.lead)


def wrap_loaded(module: Any, tokenizer: Any) -> Loaded:
    """Wrap a loaded transformers model and its tokenizer."""
    require("a loaded model", *TRANSFORMERS)
    from outpace.models.hf import load as transformers_load

    model, wrapped = transformers_load.wrap_pair(module, tokenizer)
    name = getattr(module, "name_or_path", "") or type(module).__name__
    return Loaded(model, wrapped, name, model.config.to_dict(), notice=model.notice)


def _auto(spec: str | Path | None, options: LoadOptions, progress: Progress) -> Loaded:
    if options.device_map is not None:
        return _transformers(spec, options, progress)
    try:  # our runtimes run no code from the model's files, even if it is allowed
        return _own(spec, replace(options, trust_remote_code=False), progress)
    except UnsupportedModel as unavailable_reason:
        if options.target_files is not None:  # transformers reads no other model's files
            raise
        require(f"{unavailable_reason}; the runtime transformers, which may run it,", *TRANSFORMERS)
        reason = unavailable_reason
    try:
        return _transformers(spec, options, progress)
    except UserError as error:
        raise UserError(f"{reason}; {error}") from error


def _own(spec: str | Path | None, options: LoadOptions, progress: Progress) -> Loaded:
    """Load by the native runtime on a CPU unless another precision was chosen, else by torch."""
    from outpace.models.llama.native.binding import UnsupportedShape

    if options.dtype in (INT8, INT4, FILE):
        return _native(spec, options, progress)
    if options.dtype != AUTO or not options.is_on_cpu or options.has_graphs:
        return _llama(spec, options, progress)
    try:
        return _native(spec, options, progress)
    except UnsupportedShape as error:
        require(f"{error}; the runtime llama, which runs it,", TORCH)
        return _llama(spec, options, progress, f"computed in float32 by torch: {error}")


def _llama(spec: str | Path | None, options: LoadOptions, progress: Progress, reason: str | None = None) -> Loaded:
    """Load by torch. `reason`: why not by the native runtime, if that was expected."""
    require("the runtime llama" if options.dtype == AUTO else f"dtype {options.dtype}", TORCH)
    from outpace.models.llama.torch.runtime import Llama

    options.check_runtime("llama")
    build: Callable[..., Model] = Llama.from_tensors
    if options.has_graphs and options.pp_plan is None:
        kind, slow_path_warning = _captured(options)
        build = partial(_build_captured, partial(kind.from_tensors, is_eager=options.graphs == EAGER), build)
        reason = slow_path_warning or reason
    given = {name: getattr(options, name) for name in ("device", "exact", "kv_dtype")}
    return _read(spec, options, progress, partial(build, dtype=options.torch_dtype, **given), reason)


def _build_captured(
    captured: Callable[..., Model], plain: Callable[..., Model], config: LlamaConfig, *arguments: Any, **options: Any
) -> Model:
    """Build a model with captured passes, or a plain one if it has parts that these do not compute."""
    parts: dict[str, Any] = {
        "recurrent layers": config.recurrence,
        "experts": config.experts,
        "capped scores": config.score_cap,
        "layers of two sizes": config.full_heads,
    }
    reason = next((name for name, part in parts.items() if part), None)
    if reason is None:
        return captured(config, *arguments, **options)
    model = plain(config, *arguments, **options)
    model.notice = f"its passes are not captured, because it has {reason}"
    return model


def _captured(options: LoadOptions) -> tuple[Any, str | None]:
    """Choose the runtime with captured passes, and a notice for its users."""
    import torch

    from outpace.core.noise import slow_path_warning, unavailable_reason
    from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama

    if options.exact or options.graphs == EAGER:
        return (ExactGraphLlama if options.exact else GraphLlama), None
    if why := unavailable_reason(torch.device(options.device)):
        return GraphLlama, slow_path_warning(why)
    from outpace.models.llama.cuda.fused_runtime import FusedLlama  # which imports Triton

    return FusedLlama, None


def _native(spec: str | Path | None, options: LoadOptions, progress: Progress) -> Loaded:
    """Load by the package outpace-kernels on a CPU. `dtype` float16 means int8 weights with float16 keys and values."""
    from outpace.models.llama.native.binding import NativeOptions, read_formats
    from outpace.models.llama.native.runtime import NativeLlama

    options.check_runtime("native")
    if not options.is_on_cpu:
        raise UserError(f"the runtime native runs on the cpu, not on {options.device}: use the runtime llama there")
    if options.dtype not in (AUTO, INT8, INT4, FILE, "float16"):
        held = "in int8, in int4 or as the file has them"
        raise UserError(f"the runtime native holds weights {held}, dtype {options.dtype} needs the runtime llama")
    count = min(num_threads(), num_cores())  # the environment may ask for more
    weights = options.dtype if options.dtype in (AUTO, INT4, FILE) else INT8
    if options.is_draft and weights == AUTO:
        weights, options = INT4, replace(options, dtype=INT4)
    native = NativeOptions(count, options.kv_dtype_or(NATIVE_KV), weights=weights)
    build = partial(NativeLlama.from_tensors, options=native)
    return _read(spec, options, progress, build, formats=read_formats(kernels))


def _read(
    spec: str | Path | None,
    options: LoadOptions,
    progress: Progress,
    build: Callable[..., Model],
    reason: str | None = None,
    formats: tuple[str, ...] | None = None,
) -> Loaded:
    """Load a model of the Llama family from its files.

    `build` gets tensors, after a conversion of a .gguf file. With `formats` it gets arrays, and matrices in these
    formats of the file as they are.
    """
    from outpace.models.files.find import locate, open_source, resolve
    from outpace.models.llama.config.draft_vocab import read_draft_vocab
    from outpace.models.text.tokenizer import tokenizer_of

    path = (resolve if formats is None else locate)(None if spec is None else str(spec), progress=progress)
    with open_source(path, options.target_files) as source:
        config = source.read_config()
        head_ids = read_draft_vocab(path, source.config)
        tokenizer = cache(partial(tokenizer_of, source))

        def work_and_progress(stage: str, fraction: float) -> None:
            """Make the tokenizer at the first call, while other threads load weights.

            A thread of its own would have its own arena of the C library, which keeps the memory that it frees.
            """
            progress(stage, fraction)
            tokenizer()

        layers = (
            parse_layers(options.layers, config.num_layers) if options.layers is not None else range(config.num_layers)
        )
        config = config.of_layers(layers)
        whole = "recurrent layers" if config.recurrence else "layers of two sizes" if config.full_heads else None
        if whole and options.pp_plan is not None:
            raise UserError(f"{path} has {whole}, which are not split over processes: leave out pp_plan")
        weights: Callable[[str], Any] = source.tensor if formats is None else source.weight
        if options.pp_plan is None:
            check_memory(source, config, options, formats, layers)
        else:
            build = _staged(build, source, options, formats)

        def fetch(name: str) -> Any:
            return weights(source_of(name, layers))

        model = build(config, fetch, head_ids=head_ids, progress=work_and_progress)
    model.mask_token = mask = _mask_token(source, config)
    notices = "; ".join(filter(None, (model.notice, reason, *source.notices)))
    drafter = "model" if mask is None else "parallel"
    return Loaded(model, tokenizer(), _name(spec), source.config, notices or None, drafter=drafter)


def _staged(
    build: Callable[..., Model], source: Any, options: LoadOptions, formats: tuple[str, ...] | None
) -> Callable[..., Model]:
    """Return a function that builds only this rank's layers of a pipeline."""
    from outpace.models.distributed.pipeline import build_stage
    from outpace.models.files.cache import weights_digest

    def check_fit(stage: LlamaConfig) -> None:
        check_memory(source, stage, options, formats, range(stage.num_layers))

    shared = ("dtype", "exact", "kv_dtype", "pp_plan", "layers")
    identity: dict[str, Any] = {"outpace": version("outpace"), "arithmetic of the kernels": kernels.ARITHMETIC}
    identity |= {name: getattr(options, name) for name in shared} | {"file": weights_digest(source.path)}
    return partial(build_stage, build, str(options.pp_plan), identity, check_fit)


def _mask_token(source: Any, config: LlamaConfig) -> int | None:
    """Return the mask token of a model trained to draft in parallel by PARD; None for others."""
    token: int | None = source.config.get("pard_token")
    if token is not None and (type(token) is not int or not 0 <= token < config.vocab_size):
        allowed = f"it must be a token below {config.vocab_size}"
        raise UserError(f"{source.path / 'config.json'}: pard_token is {token!r:.50}, {allowed}")
    return token


def _transformers(spec: str | Path | None, options: LoadOptions, progress: Progress) -> Loaded:
    require("the runtime transformers", *TRANSFORMERS)
    options.check_runtime("transformers")
    from outpace.models.files.model_kind import check_language_model
    from outpace.models.files.reading import read_json
    from outpace.models.hf import load as transformers_load

    progress("loading", 0.0)
    source, revision = _source(spec, progress)
    if isinstance(source, Path):  # our runtimes may read a part of it that transformers does not load alone
        fields = read_json(source / "config.json")
        check_language_model(fields, source)
        ours = fields.get("outpace")
        differing = [what for name, what in OTHER_ORDERS.items() if isinstance(ours, Mapping) and name in ours]
        if differing:
            order = f"whose {differing[0]} are in another order than transformers expects"
            raise UserError(f"{spec} is a GGUF file {order}: use the runtime llama")
    model, tokenizer = transformers_load.load(source, revision, options)
    return Loaded(model, tokenizer, _name(spec), model.config.to_dict(), notice=model.notice)


def _source(spec: str | Path | None, progress: Progress) -> tuple[str | Path, str | None]:
    """Return what transformers loads: a folder, or a hub repository and its revision.

    The repository may hold more than our own runtimes read.
    """
    from outpace.models.files import hub
    from outpace.models.files.find import resolve

    name = None if spec is None or os.path.exists(spec) else hub.parse_name(str(spec))
    if name is None or name.file is not None:
        return resolve(None if spec is None else str(spec), progress=progress), None
    folder = hub.cached_snapshot(name)
    return (name.repository, name.revision) if folder is None else (resolve(str(folder)), None)


def _name(spec: str | Path | None) -> str:
    from outpace.models.files.find import shipped_model

    return shipped_model().stem if spec is None else str(spec)


_LOADERS = {AUTO: _auto, "llama": _llama, "native": _native, "transformers": _transformers}
