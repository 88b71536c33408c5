"""Names and options to parts: models from what a user calls them, and an engine for a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outpace.candidates.base import Worker
from outpace.core import registry
from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings
from outpace.core.types import Drafter, Rule
from outpace.engine import Engine, EngineOptions
from outpace.models import runtimes
from outpace.models.base import Model
from outpace.models.find import resolve
from outpace.models.packed import is_packed, whole
from outpace.models.pairs import find_draft

Progress = Callable[[str, float], None]

WORKERS = ("thread", "process", "inline")
PLANNED = "auto"  # the decoder that plans every round
LAYERS = "layers:"  # a draft made of some of the target's own layers: layers:0,1,28,29


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody sees."""


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, where it came from, and the fields of its config.json.

    `again` loads the same in another process, and can be pickled; None where the model was handed over as an object.
    `files` finds the folder of its files; None there as well. `precision` is what its weights are held in: int8, or the
    name of a torch type. `inflate`: how many times as much as its own a pass costs.
    """

    model: Any
    tokenizer: Any
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    precision: str = ""
    inflate: int = 1
    again: Callable[[], Loaded] | None = None
    files: Callable[[], Path] | None = None


def load_model(
    spec: Any,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    exact: bool | None = None,
    progress: Progress = silent,
    runtime: str = "auto",
    trust_remote_code: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    inflate: int = 1,
) -> Loaded:
    """The model that `spec` means: a folder, a .gguf file, a hub id, None for the shipped one, or a model of
    transformers that is loaded already, with its `tokenizer`.

    `runtime` "auto": our own where it knows the architecture and the weights' format, else transformers. `dtype`
    "auto": int8 on a CPU where the native kernels take the model, bfloat16 on a GPU that has it, else float32.
    `inflate`: a pass costs that many times as much, see `models.inflate`.
    """
    if spec is not None and not isinstance(spec, str | Path):
        if inflate != 1:
            raise UserError("inflate is for models that are loaded by name, not for one that is loaded already")
        return Loaded(*runtimes.wrap_loaded(spec, tokenizer))
    if tokenizer is not None:
        raise UserError("a tokenizer goes with a loaded model only, a model's name brings its own")
    _check_device(device)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "exact": exact, "inflate": inflate}
    how = runtimes.How(trust_remote_code=trust_remote_code, device_map=device_map, **options)
    again = partial(load_model, spec, **options, runtime=runtime, trust_remote_code=trust_remote_code)
    opened = runtimes.open_model(spec, runtime, how, progress)
    files = partial(resolve, None if spec is None else str(spec))
    return Loaded(*opened, again=partial(again, device_map=device_map), files=files)


def load_draft(spec: Any, target: Loaded, *, progress: Progress = silent, **options: Any) -> Loaded:
    """A draft for this target: another model with the same tokens, some of the target's own layers, or "auto" for the
    small sibling that is known for it. A model that is loaded already has the target's tokenizer if none is named."""
    if str(spec).startswith(LAYERS):
        if target.inflate != 1:
            raise UserError(f"{spec} skips layers, which inflate adds without effect: its cost would mean nothing")
        again = partial(_layers_again, str(spec), target.again) if target.again else None
        return Loaded(_shallow(str(spec), target), target.tokenizer, str(spec), again=again)
    if spec == "auto":
        spec = find_draft(target.name, target.config)
    if not isinstance(spec, str | Path):
        options["tokenizer"] = options.get("tokenizer") or target.tokenizer
    is_whole = not isinstance(spec, str | Path) or not is_packed(spec)
    draft = load_model(spec if is_whole else _whole(Path(spec), target), progress=progress, **options)
    draft = draft if is_whole else replace(draft, name=str(spec))
    differs = target.tokenizer.tokens_differ(draft.tokenizer)
    if differs:
        raise UserError(f"the draft {draft.name} does not fit the target {target.name}: {differs}")
    draft.model.vocab_size = min(draft.model.vocab_size, target.model.vocab_size)  # one of them may be padded
    return draft


def _whole(spec: Path, target: Loaded) -> Path:
    """The folder of a packed draft, whole with its target's embeddings."""
    if target.files is None:
        raise UserError(
            f"the draft {spec} has the embeddings of its target, and {target.name} is an object of this process: make"
            " the draft whole with the target's files by `outpace distill --unpack`"
        )
    return whole(spec.expanduser(), target.files())


def _shallow(spec: str, target: Loaded) -> Model:
    if not hasattr(target.model, "shallow"):
        raise UserError(f"{spec} needs a target of the runtime native or llama, {target.name} runs by transformers")
    draft: Model = target.model.shallow(_layers(spec, target.model))
    return draft


def choose_method(target: Loaded, draft: Loaded | None, rule: str, tuned: str | None = None) -> str:
    """What method "auto" means: what `outpace tune` found for the pair; else CARD where the draft has a device of its
    own to run beside the target, and a plan for every round, in turn, where it has not. A rule that judges draws makes
    its text of their number too: for that one nothing follows the clock."""
    if _needs_drawn(rule):
        return "speculative"
    if tuned:
        return tuned
    apart = draft is not None and _device(draft) is not None and _device(draft) != _device(target)
    return "card" if apart else PLANNED


def _device(loaded: Loaded) -> Any:
    return getattr(loaded.model, "device", None)


def default_drafter(method: str, has_draft: bool) -> str:
    """The drafter where none is named: the draft model, if there is one, and for a planner what costs nothing too."""
    if not has_draft:
        return "ngram"
    return "model+ngram" if method == PLANNED else "model"


def _needs_drawn(rule: str) -> bool:
    """Whether a rule judges drafts that were drawn in turn."""
    if rule == "auto":
        return False
    module = registry.find("rules", rule)
    return module.build(module.Options()).siblings is Siblings.DRAWN


def find_rule(name: str, sampling: Sampling) -> Rule:
    """The rule by name; "auto" is greedy at temperature 0 and gumbel above. UserError for a rule that does not fit."""
    if name == "auto":
        name = "greedy" if sampling.is_greedy else "gumbel"
    module = registry.find("rules", name)
    if (name == "greedy") != sampling.is_greedy:
        fitting = "rule greedy" if sampling.is_greedy else "rule gumbel, match or rejection"
        raise UserError(f"rule {name} does not go with temperature {sampling.temperature:g}, use {fitting}")
    rule: Rule = module.build(module.Options())
    return rule


def check_rule(name: str, decoder: ModuleType, drafter: str | None) -> None:
    """UserError for a rule that needs drawn drafts with a method or drafters that cannot give them."""
    if not _needs_drawn(name):
        return
    if decoder.NEEDS == "worker":
        raise UserError(f"rule {name} judges drafts that were drawn in turn, use it with method speculative")
    if drafter is not None and "+" in drafter:
        raise UserError(f"rule {name} takes one drafter, not {drafter!r}: picked and drawn tokens do not mix")


def drafter_modules(name: str) -> dict[str, ModuleType]:
    """The drafters that `name` means: one, or several joined by +; those that need no model stand first."""
    modules = {part: registry.find("drafters", part) for part in name.split("+")}
    return dict(sorted(modules.items(), key=lambda item: not _is_free(item[1])))


def may_draft(method: str, drafter: str | None) -> bool:
    """Whether a draft model would have anything to do by this method with this drafter."""
    needs_none = method != "auto" and registry.find("decoders", method).NEEDS is None
    return not needs_none and (drafter is None or "model" in drafter.split("+"))


def build_drafter(name: str, draft: Model | None, values: Mapping[str, Any]) -> Drafter:
    """One drafter, or several on one tree."""
    from outpace.drafters._combined import Combined

    modules = drafter_modules(name)
    parts = [module.build(registry.build_options(module, values), draft=draft) for module in modules.values()]
    return parts[0] if len(parts) == 1 else Combined(parts, free=sum(map(_is_free, modules.values())))


def _is_free(module: ModuleType) -> bool:
    """Whether a drafter runs no model."""
    return bool(getattr(module, "FREE", False))


@dataclass(frozen=True)
class Parts:
    """Which parts an engine is made of, by name. `drafter` None: `model` where there is a draft, else `ngram`."""

    method: str
    drafter: str | None = None
    worker: str = "thread"
    draft_threads: int = 1  # cores that the drafter may use beside the target

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
    name = parts.drafter or default_drafter(parts.method, draft is not None)
    modules |= {f"drafter {part}": module for part, module in drafter_modules(name).items()}
    registry.check_known(modules, options)
    if not all(getattr(loaded.model, "trees", True) for loaded in (target, draft) if loaded):
        options = {"width": 1, "branches": 1} | dict(options)  # each branch would be a pass of its own
    drafter = build_drafter(name, draft.model if draft else None, options)
    if decoder.NEEDS == "drafter":
        return Engine(target.model, drafter, options=settings)
    is_apart = parts.worker == "process"  # the drafter above then only tells a wrong option at once
    worker = _build_process(parts, name, draft, options) if is_apart else _build_worker(parts, drafter)
    return Engine(target.model, worker=worker, options=settings)


def _build_worker(parts: Parts, drafter: Drafter) -> Worker:
    from outpace.candidates.inline import InlineWorker
    from outpace.candidates.thread import ThreadWorker

    return ThreadWorker(drafter, parts.draft_threads) if parts.worker == "thread" else InlineWorker(drafter)


def _build_process(parts: Parts, name: str, draft: Loaded | None, options: Mapping[str, Any]) -> Worker:
    from outpace.candidates.process import ProcessWorker

    if draft is not None and draft.again is None:
        raise UserError(f"the draft {draft.name} is an object of this process: name a path, or use worker thread")
    again, vocab_size = (draft.again, draft.model.vocab_size) if draft else (None, 0)
    return ProcessWorker(partial(_drafter_again, name, again, vocab_size, dict(options)), parts.draft_threads)


def _drafter_again(
    name: str, again: Callable[[], Loaded] | None, vocab_size: int, options: Mapping[str, Any]
) -> Drafter:
    """In another process: the drafter, with the draft loaded anew and cut to the tokens that it had here."""
    draft = again().model if again else None
    if draft is not None:
        draft.vocab_size = vocab_size
    return build_drafter(name, draft, options)


def _layers_again(spec: str, again: Callable[[], Loaded]) -> Loaded:
    return load_draft(spec, again())


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
