"""Names and options to parts: methods, rules, drafters and workers by name, and an engine made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from outpace.card.loop import check_concurrent
from outpace.card.worker import DraftWorker
from outpace.core import registry
from outpace.core.drafting import NO_NEEDS, BuildContext
from outpace.core.errors import UserError, check_whole, unknown
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings
from outpace.core.types import Drafter, Rule
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.load import Loaded

WORKERS = ("thread", "process", "inline")
COPIERS = "prediction+ngram"  # beside the draft model, where every round is planned
PLANNED = "auto"  # the decoder that plans every round


def choose_method(target: Loaded, draft: Loaded | None, rule: str, tuned: str | None = None) -> str:
    """What method "auto" means: what `outpace tune` found for the pair; else CARD where the draft has a device of its
    own to run beside the target, and a plan for every round, in turn, where it has not. The text of a rule that is not
    keyed depends on how much was drafted: for that one nothing follows the clock. UserError for a rule that writes the
    draft's own tokens on purpose: how they are drafted is not left to a planner."""
    chosen = None if rule == "auto" else _build_rule(rule)
    if chosen is not None and chosen.leaf_q:
        *others, last = [name for name in registry.names("decoders") if _takes(name, rule)]
        raise UserError(f"rule {rule} does not go with method auto, use it with method {', '.join(others)} or {last}")
    if chosen is not None and not chosen.keyed:
        return "speculative"
    if tuned:
        return tuned
    apart = draft is not None and _device(draft) is not None and _device(draft) != _device(target)
    return "card" if apart else PLANNED


def _takes(method: str, rule: str) -> bool:
    """Whether a method that drafts in turn, and is no planner, goes with a rule."""
    decoder = registry.find("decoders", method)
    return method != PLANNED and decoder.NEEDS == "drafter" and _misfit(rule, decoder, "model") is None


def _device(loaded: Loaded) -> str | None:
    """Its name: runtimes hold it as torch does, or as a string."""
    device = loaded.model.device
    return None if device is None else str(device)


def default_drafter(method: str, has_draft: bool) -> str:
    """The drafter where none is named: the draft model, if there is one, and for a planner what costs nothing too."""
    if not has_draft:
        return COPIERS if method == PLANNED else "ngram"
    return f"model+{COPIERS}" if method == PLANNED else "model"


def check_prediction(drafter: str | None) -> None:
    """UserError where a prediction would be of no use: for drafters, joined by +, of which none takes it. Of several to
    choose from the first is meant."""
    name = drafter_names(drafter)[0] if drafter is not None else "prediction"
    if "prediction" not in name.split("+"):
        raise UserError(f"a prediction needs drafter prediction, this is {name}: name {name}+prediction")


def _build_rule(name: str, values: Mapping[str, Any] | None = None) -> Rule:
    """The rule by name, with those of the options that are its own."""
    module = registry.find("rules", name)
    rule: Rule = module.build(registry.build_options(module, values or {}))
    return rule


def check_names(parts: Parts) -> None:
    """UserError for a method, a drafter or a rule that there is not, before a model is loaded."""
    registry.find("decoders", parts.method)
    if parts.rule != "auto":
        registry.find("rules", parts.rule)
    if parts.drafter is not None:
        drafter_modules(parts.drafter)


def find_rule(name: str, sampling: Sampling, values: Mapping[str, Any] | None = None) -> Rule:
    """The rule by name, with its options among `values`; "auto" is greedy at temperature 0 and gumbel above. UserError
    for a rule that does not fit, or a wrong option."""
    if name == "auto":
        name = "greedy" if sampling.is_greedy else "gumbel"
    rule = _build_rule(name, values)
    if not _judges(rule, sampling):
        *others, last = [other for other in registry.names("rules") if _judges(_build_rule(other), sampling)]
        fitting = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"rule {name} does not work with temperature {sampling.temperature:g}, use rule {fitting}")
    return rule


def _judges(rule: Rule, sampling: Sampling) -> bool:
    return rule.judges_greedy if sampling.is_greedy else rule.judges_sampled


def default_rule(decoder: ModuleType, rule: str) -> str:
    """The rule of a method that has one of its own, where none is named."""
    return getattr(decoder, "RULE", rule) if rule == "auto" else rule


def check_rule(name: str, decoder: ModuleType, drafter: str | None) -> None:
    """UserError for a rule that does not go with a method or with what drafts; it names the rules that do."""
    said = None if name == "auto" else _misfit(name, decoder, drafter)
    if said is not None:
        *others, last = [other for other in registry.names("rules") if _misfit(other, decoder, drafter) is None]
        raise UserError(f"{said}; the rules that fit are {', '.join(others)} and {last}")


def _misfit(name: str, decoder: ModuleType, drafter: str | None) -> str | None:
    """Why a rule does not go with a method and its drafters; None where it does."""
    rule = _build_rule(name)
    is_drawn = rule.siblings is not Siblings.PICKED
    if decoder.NEEDS == "worker" and not rule.keyed:
        what = "judges drafts that were drawn in turn" if is_drawn else "writes a text that depends on what was drafted"
        return f"rule {name} {what}, use it with method speculative"
    if is_drawn and drafter is not None and "+" in drafter:
        return f"rule {name} takes one drafter, not {drafter!r}: picked and drawn tokens cannot be mixed"
    if rule.leaf_q and not _draws(drafter):
        given = f"drafter {drafter} has none" if drafter else "this method drafts nothing"
        return f"rule {name} mixes the target with a draft model's distribution, {given}"
    return None


def _draws(drafter: str | None) -> bool:
    """Whether children can be drawn from a drafter's distribution."""
    return drafter is not None and any(getattr(module, "DRAWS", False) for module in drafter_modules(drafter).values())


def with_grammar(is_default: bool, rule: str, drafter: str | None, decoder: ModuleType) -> str | None:
    """The drafter for structured answers, None where the first one is: where the user named none, what a grammar forces
    is proposed too."""
    structured = f"grammar+{drafter}"
    if not is_default or drafter is None or decoder.NEEDS != "drafter":
        return None
    return structured if rule == "auto" or _misfit(rule, decoder, structured) is None else None


def drafter_names(drafter: str) -> list[str]:
    """Those from which each request chooses, which commas separate; UserError for one that is named twice."""
    names = drafter.split(",")
    if len(set(names)) < len(names):
        raise UserError(f"drafter {drafter!r} names one twice, requests choose among different ones")
    return names


def drafter_modules(drafter: str) -> dict[str, ModuleType]:
    """The parts of all these drafters: one, or several joined by +."""
    parts = (part for name in drafter_names(drafter) for part in name.split("+"))
    return {part: registry.find("drafters", part) for part in parts}


def may_draft(method: str, drafter: str | None) -> bool:
    """Whether a draft model would have anything to do by this method with this drafter."""
    needs_none = method != "auto" and registry.find("decoders", method).NEEDS is None
    return not needs_none and (drafter is None or any(map(_runs_model, drafter_modules(drafter))))


def _runs_model(part: str) -> bool:
    return registry.describe("drafters", part).needs == registry.DRAFT_MODEL


def needs_same_tokens(drafter: str | None) -> bool:
    """Whether a draft model must have the target's tokens: what drafts with it does not translate."""
    modules = {} if drafter is None else drafter_modules(drafter)
    return "translated" not in modules or "model" in modules


def build_drafter(name: str, given: BuildContext, values: Mapping[str, Any]) -> Drafter:
    """One drafter, or several on one tree, those that run no model first."""
    from outpace.drafters._composite import SharedTree

    modules = drafter_modules(name).values()
    parts = [module.build(registry.build_options(module, values), given=given) for module in modules]
    parts.sort(key=lambda part: part.runs_model)  # what costs no model stands first
    return parts[0] if len(parts) == 1 else SharedTree(parts)


def _given(target: Loaded | None, draft: Loaded | None) -> BuildContext:
    model, tokenizer = (draft.model, draft.tokenizer) if draft else (None, None)
    others = tuple(other.model for other in draft.others) if draft else ()
    return BuildContext(model, target and target.model, tokenizer, target and target.tokenizer, others)


@dataclass(frozen=True)
class Parts:
    """Which parts an engine is made of, by name. `drafter` None: `model` where there is a draft, else `ngram`; several
    are separated by commas. `structured`: one more, which nobody named, for structured answers. The `rule` comes with
    each request; here it says which options are known."""

    method: str
    drafter: str | None = None
    rule: str = "auto"
    worker: str | None = None  # of a method that has one; None: a thread
    draft_threads: int = 1  # cores that the drafter may use beside the target
    structured: str | None = None

    def __post_init__(self) -> None:
        check_whole("draft_threads", self.draft_threads, 1, 1024)
        if self.worker not in (None, *WORKERS):
            raise unknown("worker", str(self.worker), WORKERS)


def build_engine(
    target: Loaded, draft: Loaded | None, parts: Parts, settings: EngineOptions, options: Mapping[str, Any]
) -> Engine:
    """An engine for a method, with drafters in turn or one in a worker. UserError for an option that no part has."""
    decoder = registry.find("decoders", parts.method)
    _check_worker(parts, decoder)
    modules = {f"method {parts.method}": decoder}
    needs = NO_NEEDS
    if parts.rule != "auto":
        modules[f"rule {parts.rule}"] = registry.find("rules", parts.rule)
        needs = _build_rule(parts.rule, options).needs  # a wrong value is said at once
    if decoder.NEEDS is None:
        if parts.drafter is not None:
            raise UserError(f"method {parts.method} uses no drafter, leave out {parts.drafter!r} or change the method")
        registry.check_known(modules, options)
        return Engine(target.model, options=settings, needs=needs)
    name = parts.drafter or default_drafter(parts.method, draft is not None)
    modules |= {f"drafter {part}": module for part, module in drafter_modules(name).items()}
    names = [*drafter_names(name), *([parts.structured] if parts.structured else [])]
    registry.check_known(modules, options, [module for one in names for module in drafter_modules(one).values()])
    models = [target, draft, *(draft.others if draft else ())]
    if not all(loaded.model.trees for loaded in models if loaded):
        options = {"width": 1, "branches": 1} | dict(options)  # each branch would be a pass of its own
    drafters = {one: build_drafter(one, _given(target, draft), options) for one in names}
    if decoder.NEEDS == "drafter":
        return Engine(target.model, drafters, options=settings, needs=needs)
    if len(drafters) > 1:
        raise UserError(f"method {parts.method} has one drafter in its worker, not {name!r} to choose from")
    check_concurrent(drafters[name])
    is_apart = parts.worker == "process"  # the drafter above then only tells a wrong option at once
    worker = _build_process(parts, name, draft, options) if is_apart else _build_worker(parts, drafters[name], draft)
    if parts.worker != "inline" and all(_device(one) == "cpu" for one in (target, draft) if one):
        worker.cores = parts.draft_threads if drafters[name].runs_model else 0
    return Engine(target.model, worker=worker, options=settings, needs=needs)


def _check_worker(parts: Parts, decoder: ModuleType) -> None:
    if parts.worker is not None and decoder.NEEDS != "worker":
        fitting = [name for name in registry.names("decoders") if registry.find("decoders", name).NEEDS == "worker"]
        instead = f"leave out worker {parts.worker!r}, or choose method {' or '.join(fitting)}"
        raise UserError(f"method {parts.method} has no worker: {instead}")


def _build_worker(parts: Parts, drafter: Drafter, draft: Loaded | None) -> DraftWorker:
    from outpace.card.inline import InlineWorker
    from outpace.card.thread import ThreadWorker

    if parts.worker == "inline":
        return InlineWorker(drafter)
    return ThreadWorker(drafter, parts.draft_threads, draft.model.device if draft else None)


def _build_process(parts: Parts, name: str, draft: Loaded | None, options: Mapping[str, Any]) -> DraftWorker:
    from outpace.card.process import ProcessWorker

    if draft is not None and draft.others:
        raise UserError("worker process drafts with one draft model, these are several: use worker thread")
    if draft is not None and draft.again is None:
        raise UserError(f"the draft {draft.name} is an object of this process: name a path, or use worker thread")
    again, vocab_size = (draft.again, draft.model.vocab_size) if draft else (None, 0)
    return ProcessWorker(partial(_drafter_again, name, again, vocab_size, dict(options)), parts.draft_threads)


def _drafter_again(
    name: str, again: Callable[[], Loaded] | None, vocab_size: int, options: Mapping[str, Any]
) -> Drafter:
    """In another process: the drafter, with the draft loaded anew and cut to the tokens that it had here."""
    draft = again() if again else None
    if draft is not None:
        draft.model.vocab_size = vocab_size
    return build_drafter(name, _given(None, draft), options)
