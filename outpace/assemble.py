"""Names and options to parts: models from what a user calls them, and an engine for a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outpace.candidates.base import Worker
from outpace.core import registry
from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.core.sampling import Sampling
from outpace.core.types import Drafter, Rule
from outpace.engine import Engine, EngineOptions
from outpace.models.base import Model

Progress = Callable[[str, float], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORKERS = ("thread", "inline")
LAYERS = "layers:"  # a draft made of some of the target's own layers: layers:0,1,28,29


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody sees."""


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, and where it came from."""

    model: Any
    tokenizer: Any
    name: str


def load_model(
    spec: str | Path | None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    exact: bool | None = None,
    progress: Progress = silent,
) -> Loaded:
    """The model that `spec` means: a folder, a .gguf file, a hub id, or None for the shipped one."""
    from outpace.models.checkpoint import Checkpoint
    from outpace.models.config import from_dict, tensor_shapes
    from outpace.models.find import resolve, shipped_model
    from outpace.models.llama import Llama
    from outpace.models.tokenizer import Tokenizer

    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    _check_device(device)
    path = resolve(None if spec is None else str(spec), progress=progress)
    with Checkpoint.open(path) as checkpoint:
        config = from_dict(checkpoint.config)
        checkpoint.check_shapes(tensor_shapes(config))
        model = Llama.from_tensors(
            config, checkpoint.tensor, device=device, dtype=DTYPES[dtype], exact=exact, progress=progress
        )
    name = shipped_model().stem if spec is None else str(spec)
    return Loaded(model, Tokenizer.from_folder(path), name)


def load_draft(spec: str | Path, target: Loaded, *, progress: Progress = silent, **options: Any) -> Loaded:
    """A draft for this target: another model with the same tokens, or some of the target's own layers."""
    if str(spec).startswith(LAYERS):
        return Loaded(target.model.shallow(_layers(str(spec), target.model)), target.tokenizer, str(spec))
    draft = load_model(spec, progress=progress, **options)
    differs = target.tokenizer.tokens_differ(draft.tokenizer)
    if differs:
        raise UserError(f"the draft {spec} does not fit the target {target.name}: {differs}")
    draft.model.vocab_size = min(draft.model.vocab_size, target.model.vocab_size)  # one of them may be padded
    return draft


def find_rule(name: str, sampling: Sampling) -> Rule:
    """The rule by name; "auto" is greedy at temperature 0 and gumbel above. UserError for a rule that does not fit."""
    if name == "auto":
        name = "greedy" if sampling.is_greedy else "gumbel"
    module = registry.find("rules", name)
    if (name == "greedy") != sampling.is_greedy:
        fitting = "rule greedy" if sampling.is_greedy else "rule gumbel or match"
        raise UserError(f"rule {name} does not go with temperature {sampling.temperature:g}, use {fitting}")
    rule: Rule = module.build(module.Options())
    return rule


def drafter_modules(name: str) -> dict[str, ModuleType]:
    """The drafters that `name` means: one, or several joined by +; those that need no model stand first."""
    modules = {part: registry.find("drafters", part) for part in name.split("+")}
    return dict(sorted(modules.items(), key=lambda item: item[0] == "model"))


def build_drafter(name: str, draft: Model | None, values: Mapping[str, Any]) -> Drafter:
    """One drafter, or several on one tree."""
    from outpace.drafters._combined import Combined

    parts = [
        module.build(registry.build_options(module, values), draft=draft) for module in drafter_modules(name).values()
    ]
    return parts[0] if len(parts) == 1 else Combined(parts)


@dataclass(frozen=True)
class Parts:
    """Which parts an engine is made of, by name. `drafter` None: `model` where there is a draft, else `ngram`."""

    method: str
    drafter: str | None = None
    worker: str = "thread"
    draft_threads: int = 1  # cores that the drafter's thread may use

    def __post_init__(self) -> None:
        check_whole("draft_threads", self.draft_threads, 1, 1024)
        if self.worker not in WORKERS:
            raise unknown("worker", self.worker, WORKERS)


def build_engine(
    target: Loaded, draft: Loaded | None, parts: Parts, settings: EngineOptions, options: Mapping[str, Any]
) -> Engine:
    """An engine for a method, with its drafter in turn or in a worker. UserError for an option that no part has."""
    decoder = registry.find("decoders", parts.method)
    modules = {f"method {parts.method}": decoder}
    if decoder.NEEDS is None:
        if parts.drafter is not None:
            raise UserError(f"method {parts.method} uses no drafter, leave out {parts.drafter!r} or change the method")
        registry.check_known(modules, options)
        return Engine(target.model, options=settings)
    name = parts.drafter or ("model" if draft else "ngram")
    modules |= {f"drafter {part}": module for part, module in drafter_modules(name).items()}
    registry.check_known(modules, options)
    drafter = build_drafter(name, draft.model if draft else None, options)
    if decoder.NEEDS == "drafter":
        return Engine(target.model, drafter, options=settings)
    return Engine(target.model, worker=_build_worker(parts, drafter), options=settings)


def _build_worker(parts: Parts, drafter: Drafter) -> Worker:
    from outpace.candidates.inline import InlineWorker
    from outpace.candidates.thread import ThreadWorker

    return ThreadWorker(drafter, parts.draft_threads) if parts.worker == "thread" else InlineWorker(drafter)


def _layers(spec: str, model: Any) -> list[int]:
    count = model.config.num_layers
    allowed = f"write {LAYERS} and numbers from 0 to {count - 1} in rising order, as in {LAYERS}0,1,{count - 1}"
    try:
        numbers = [int(part) for part in spec.removeprefix(LAYERS).split(",")]
    except ValueError:
        raise UserError(f"{spec!r} names no layers; {allowed}") from None
    for number in numbers:
        check_range(f"a layer of {spec}", number, 0, count - 1)
    if numbers != sorted(set(numbers)):
        raise UserError(f"{spec!r} names layers twice or out of order; {allowed}")
    return numbers


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:
        have = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise UserError(f"device {device!r} is not to be had here, there are {', '.join(have)}") from error
