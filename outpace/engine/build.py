"""Build an engine from the names and options of a method, a rule, drafters and a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from outpace.core import registry
from outpace.core.arrays import num_cores
from outpace.core.drafting import NO_NEEDS, BuildContext, Needs
from outpace.core.errors import UserError, require
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings
from outpace.core.types import Drafter, Rule
from outpace.decoders.base import Decoder
from outpace.drafters import build_drafter, drafter_modules, drafter_names
from outpace.engine.engine import Engine
from outpace.engine.options import BuildOptions
from outpace.models.load import Loaded

if TYPE_CHECKING:
    from outpace.card.worker import DraftWorker

HEAD_DRAFTERS = ("block", "eagle", "specformer")  # they run trained heads only
LOOKUP_DRAFTERS = "prediction+ngram"  # lookup drafters that a planner gets in addition to the draft model
AUTO = "auto"  # the decoder that plans every round, and the method name that `choose_method` resolves
PLANNED = "planned"  # the same with a drafter in parallel with the target
_TAKERS = {"drafter": ("sequential", "parallel"), "worker": ("parallel",)}  # by a method's `drafting`
PLAIN = "autoregressive"
REMOTE_METHOD = "card"  # the default if the drafter runs on another machine


def resolve(options: BuildOptions, target: Loaded, draft: Loaded | None, tuned: str | None = None) -> BuildOptions:
    """Return the options with all defaults filled in for these models; `tuned`: the method that `outpace tune` found
    for the pair. UserError for a rule that fits neither the method nor the drafter."""
    method = options.method
    if method == "auto":
        method = REMOTE_METHOD if options.is_remote else choose_method(target, draft, options.rule, tuned)
    decoder = registry.find("decoders", method)
    drafter = options.drafter
    if decoder.drafting and not options.is_remote:
        drafter = drafter or default_drafter(method, draft.drafter if draft else None)
        _check_draft(drafter, draft)
    rule = default_rule(decoder, options.rule)
    check_rule(rule, decoder, drafter)
    return replace(
        options,
        method=method,
        drafter=drafter,
        rule=rule,
        nodes=_num_nodes(options, decoder),
        structured_drafter=_structured_drafter(options.drafter is None, rule, drafter, decoder),
    )


def _num_nodes(options: BuildOptions, decoder: type[Decoder]) -> int:
    """Return the most nodes of a tree; the default leaves room for the longest draft. UserError if the user named both
    a limit and a draft length that exceeds it."""
    values = registry.build_options(decoder, options.part_options)
    needed, name = decoder.num_nodes(values), decoder.length_option
    if options.nodes is None:
        return max(needed, decoder.usual_nodes)
    if name and name in options.part_options and needed > options.nodes:
        raise UserError(
            f"{name} is {getattr(values, name)}, which takes {needed} nodes in a pass, the root included, and"
            f" nodes is {options.nodes}: raise nodes or lower {name}"
        )
    return options.nodes


def choose_method(target: Loaded, draft: Loaded | None, rule: str, tuned: str | None = None) -> str:
    """Resolve method "auto" to the first of these that applies:

    1. "speculative" for a rule whose text depends on the drafts: with a planner, the text would depend on measured
       times;
    2. the method that `outpace tune` found fastest for this pair of models (`tuned`), if it can run the draft;
    3. "planned" if the draft model has a GPU of its own, where it can run in parallel with the target;
    4. "auto", the same planner, which drafts in each round as much as pays, alternating with the target. With the
       target on a GPU and the draft on the CPU sequential drafting was faster than CARD at both measured sizes.

    UserError for a rule that works only with certain methods.
    """
    chosen = None if rule == "auto" else _build_rule(rule)
    if chosen is not None and chosen.traits.q_at_leaves:
        *others, last = [name for name in registry.names("decoders") if _takes(name, rule)]
        raise UserError(f"rule {rule} does not go with method auto, use it with method {', '.join(others)} or {last}")
    if chosen is not None and not chosen.traits.same_text:
        return "speculative"
    reads_target = draft is not None and draft.reads_target
    if tuned and not (reads_target and registry.find("decoders", tuned).drafting == "parallel"):
        return tuned
    has_own_gpu = draft is not None and _device(draft) != _device(target) and str(_device(draft)).startswith("cuda")
    return PLANNED if has_own_gpu and not reads_target else AUTO


def _takes(method: str, rule: str) -> bool:
    """Whether this is a sequential method without a planner that works with the rule."""
    decoder = registry.find("decoders", method)
    return method != AUTO and decoder.drafting == "sequential" and _misfit(rule, decoder, "model") is None


def _device(loaded: Loaded) -> str | None:
    """Return the device's name; runtimes hold a torch.device or a string."""
    device = loaded.model.device
    return None if device is None else str(device)


def default_drafter(method: str, drafter_of_draft: str | None) -> str:
    """Return the default drafter of a method.

    It is the one that runs the draft (`Loaded.drafter`), or a lookup drafter without one (None); "auto" combines it
    with all lookup drafters.
    """
    if drafter_of_draft is None:
        return LOOKUP_DRAFTERS if method == AUTO else "ngram"
    return f"{drafter_of_draft}+{LOOKUP_DRAFTERS}" if method == AUTO else drafter_of_draft


def _check_draft(drafter: str, draft: Loaded | None) -> None:
    """Raise UserError for a drafter that cannot run this draft: a head has one drafter, and some take heads only."""
    if draft is None:
        return
    for part in drafter_modules(drafter):
        if part != draft.drafter and _runs_draft(part) if draft.is_head else part in HEAD_DRAFTERS:
            kind = "a trained head" if draft.is_head else "a draft model"
            raise UserError(f"drafter {part} does not run {draft.name}, which is {kind}: use drafter {draft.drafter}")


def _runs_draft(part: str) -> bool:
    return registry.describe("drafters", part).needs == registry.DRAFT_MODEL


def _build_rule(name: str, values: Mapping[str, Any] | None = None) -> Rule:
    """Build the rule with this name, given those of the options that are its own."""
    rule: type[Rule] = registry.find("rules", name)
    return rule(registry.build_options(rule, values or {}))


def find_rule(name: str, sampling: Sampling, values: Mapping[str, Any] | None = None) -> Rule:
    """Build a rule for a request; "auto" is greedy at temperature 0 and gumbel above. UserError for a rule that cannot
    judge this temperature, or a wrong option."""
    if name == "auto":
        name = "greedy" if sampling.is_greedy else "gumbel"
    rule = _build_rule(name, values)
    if not _judges(rule, sampling):
        rules = {other: _build_rule(other) for other in registry.names("rules")}
        names = [other for other in rules if _judges(rules[other], sampling)]
        *others, last = sorted(names, key=lambda other: not rules[other].traits.lossless)  # lossless ones first
        fitting = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"rule {name} does not work with temperature {sampling.temperature:g}, use rule {fitting}")
    return rule


def _judges(rule: Rule, sampling: Sampling) -> bool:
    return rule.traits.greedy if sampling.is_greedy else rule.traits.sampled


class Chosen(NamedTuple):
    """What writes one answer. `method` is the decoder's name; `drafter` None: the engine's first one."""

    rule: Rule
    decoder: type[Decoder]
    options: Any
    method: str
    drafter: str | None


class RequestChoices:
    """Finds the rule, the decoder and the drafter of each request among those of resolved options."""

    def __init__(self, options: BuildOptions, target: Loaded) -> None:
        self._options, self._target = options, target
        self._decoder = registry.find("decoders", options.method)
        self._decoder_options = registry.build_options(self._decoder, options.part_options)
        # One instance for all requests, so that they share batches.
        self._rules: dict[tuple[str, bool, bool], Rule] = {}

    def choose(
        self,
        sampling: Sampling,
        *,
        plain: bool = False,
        is_structured: bool = False,
        is_predicted: bool = False,
        drafter: str | None = None,
        rule: str | None = None,
        method: str | None = None,
    ) -> Chosen:
        """Return what writes an answer; `drafter`, `rule` and `method` are the names that the request chose. UserError
        if they do not fit each other, the sampling or the prediction.

        `plain`: without speculation. `is_structured`, `is_predicted`: the answer has a grammar, a prediction.
        """
        options = self._options
        if is_predicted and not plain:
            _check_prediction(drafter or options.drafter)
        found = self._rule(rule or options.rule, sampling, plain)
        drafter = drafter or (options.structured_drafter if is_structured and not plain else None)
        if plain:
            decoder = registry.find("decoders", PLAIN)
            return Chosen(found, decoder, decoder.Options(), PLAIN, drafter)
        if method is None and rule is not None and options.method == AUTO and not found.traits.same_text:
            method = "speculative"  # as `choose_method` does
        method = method or options.method
        decoder = self._decoder if method == options.method else registry.find("decoders", method)
        if rule is not None:
            check_rule(rule, decoder, drafter or options.drafter)
        values = self._decoder_options if method == options.method else decoder.Options()
        return Chosen(found, decoder, values, method, drafter)

    def _rule(self, name: str, sampling: Sampling, plain: bool) -> Rule:
        key = name, sampling.is_greedy, plain
        if key not in self._rules:
            rule = find_rule(name, sampling, self._options.part_options)
            rule.check_target(self._target)
            if plain and rule.traits.q_at_leaves:  # it needs a draft's q, which plain decoding does not have
                rule = find_rule("auto", sampling)
            self._rules.setdefault(key, rule)
        return self._rules[key]


def _check_prediction(drafter: str | None) -> None:
    """Raise UserError if the drafter cannot use a prediction; of several drafters to choose from, the first counts."""
    name = drafter_names(drafter)[0] if drafter is not None else "prediction"
    if "prediction" not in name.split("+"):
        raise UserError(f"a prediction needs drafter prediction, this is {name}: name {name}+prediction")


def default_rule(decoder: type[Decoder], rule: str) -> str:
    """Replace "auto" by the method's own rule if it has one."""
    return decoder.rule or rule if rule == "auto" else rule


def check_rule(name: str, decoder: type[Decoder], drafter: str | None) -> None:
    """Raise UserError, naming the rules that fit, for a rule that does not fit the method or the drafter."""
    said = None if name == "auto" else _misfit(name, decoder, drafter)
    if said is not None:
        *others, last = [other for other in registry.names("rules") if _misfit(other, decoder, drafter) is None]
        raise UserError(f"{said}; the rules that fit are {', '.join(others)} and {last}")


def _misfit(name: str, decoder: type[Decoder], drafter: str | None) -> str | None:
    """Return why a rule does not fit a method and its drafters, None if it does."""
    rule = _build_rule(name)
    is_drawn = rule.traits.siblings is not Siblings.PICKED
    if decoder.drafting == "parallel" and not rule.traits.same_text:
        what = "needs sequential drafting" if is_drawn else "writes a text that depends on what was drafted"
        return f"rule {name} {what}, use it with method speculative"
    if is_drawn and drafter is not None and "+" in drafter:
        return f"rule {name} takes one drafter, not {drafter!r}: picked and drawn tokens cannot be mixed"
    if rule.traits.q_at_leaves and not _draws(drafter):
        given = f"drafter {drafter} has none" if drafter else "this method drafts nothing"
        return f"rule {name} mixes the target with a draft model's distribution, {given}"
    return None


def _draws(drafter: str | None) -> bool:
    """Whether a drafter has a distribution q after every token."""
    return drafter is not None and any(
        registry.drafter_class(part).capabilities.q_at_leaves for part in drafter_modules(drafter)
    )


def _structured_drafter(is_default: bool, rule: str, drafter: str | None, decoder: type[Decoder]) -> str | None:
    """Return the drafter for structured answers, None if it is the usual one. Unless the user named a drafter, tokens
    that the grammar forces are proposed too."""
    structured = f"grammar+{drafter}"
    if not is_default or drafter is None or decoder.drafting != "sequential":
        return None
    return structured if rule == "auto" or _misfit(rule, decoder, structured) is None else None


def build_engine(target: Loaded, draft: Loaded | None, options: BuildOptions) -> Engine:
    """Build the engine of resolved options: with sequential drafters, or with one drafter in a worker. UserError for an
    option that no part has, or that does not fit. The caller starts its worker."""
    decoder, settings, values = registry.find("decoders", options.method), options.engine_options, options.part_options
    _check_method(options, decoder)
    modules: dict[str, Any] = {f"method {options.method}": decoder}
    needs = NO_NEEDS
    for name in options.known_rules:
        modules[f"rule {name}"] = registry.find("rules", name)
        rule = _build_rule(name, values)
        rule.check_target(target)
        needs = needs.joined(Needs(layers=rule.traits.hidden_layers))
    if decoder.drafting is None:
        registry.check_known(modules, values)
        return Engine(target.model, options=settings, needs=needs)
    if options.is_remote:
        registry.check_known(modules, values)
        worker = build_remote_worker(str(options.worker), target)
        return Engine(target.model, worker=worker, options=settings)
    name = options.drafter or default_drafter(options.method, draft.drafter if draft else None)
    modules |= {f"drafter {part}": module for part, module in drafter_modules(name).items()}
    names = [*drafter_names(name), *([options.structured_drafter] if options.structured_drafter else [])]
    registry.check_known(modules, values, [module for one in names for module in drafter_modules(one).values()])
    models = [target, draft, *(draft.others if draft else ())]
    if not all(loaded.model.supports_trees for loaded in models if loaded):
        values = {"width": 1, "branches": 1} | dict(values)  # each branch would be a pass of its own
    values = decoder.drafter_defaults(registry.build_options(decoder, values), values) | dict(values)
    drafters = {one: build_drafter(one, _build_context(target, draft), values) for one in names}
    if decoder.drafting == "sequential":
        return Engine(target.model, drafters, options=settings, needs=needs)
    if len(drafters) > 1:
        raise UserError(f"method {options.method} has one drafter in its worker, not {name!r} to choose from")
    worker = _build_worker(options, name, drafters[name], target, draft, values)
    on_cpu = all(_device(one) == "cpu" for one in (target, draft) if one)
    if options.worker not in ("inline", "polled") and on_cpu and drafters[name].capabilities.runs_model:
        worker.cores = _draft_threads(options, target)
    return Engine(target.model, worker=worker, options=settings, needs=needs)


def build_remote_worker(worker: str, target: Loaded) -> DraftWorker:
    """Return a worker for a drafter on another machine, grpc://HOST:PORT; UserError if the host is unknown."""
    from outpace.card.link import read_address

    address = read_address(worker)
    require("a drafter on another machine", "remote", "grpc")
    from outpace.card.remote import RemoteWorker
    from outpace.card.wire import identity_of

    return RemoteWorker(address, identity_of(target), address.key)


def _build_context(target: Loaded | None, draft: Loaded | None) -> BuildContext:
    model, tokenizer = (draft.model, draft.tokenizer) if draft else (None, None)
    others = tuple(other.model for other in draft.others) if draft else ()
    return BuildContext(model, target and target.model, tokenizer, target and target.tokenizer, others)


def _check_method(options: BuildOptions, decoder: type[Decoder]) -> None:
    """Raise UserError for an option that this method does not take, with the methods that do."""
    for name, drafting in _TAKERS.items():
        value = getattr(options, name)
        if value is not None and decoder.drafting not in drafting:
            takers = [one for one in registry.names("decoders") if registry.find("decoders", one).drafting in drafting]
            instead = f"leave out {name} {value!r}, or choose method {', '.join(takers[:-1])} or {takers[-1]}"
            raise UserError(f"method {options.method} takes no {name}: {instead}")


def _draft_threads(options: BuildOptions, target: Loaded) -> int:
    """Return the CPU threads of a drafter that runs in parallel with the target: by default one where both are on the
    CPU, and all but the one that launches the target's passes where it has a device of its own."""
    return options.draft_threads or (1 if _device(target) == "cpu" else max(num_cores() - 1, 1))


def _build_worker(
    options: BuildOptions, name: str, drafter: Drafter, target: Loaded, draft: Loaded | None, values: Mapping[str, Any]
) -> DraftWorker:
    """Return the worker, not started. A process will build a drafter of its own: `drafter` only checks its options."""
    from outpace.card.inline import InlineWorker
    from outpace.card.loop import check_concurrent
    from outpace.card.polled import PolledWorker, cuda_recorder
    from outpace.card.process import ProcessWorker
    from outpace.card.thread import ThreadWorker

    check_concurrent(drafter)
    on_gpu, draft_on_cpu = str(_device(target)).startswith("cuda"), draft is None or _device(draft) == "cpu"
    kind = options.worker or ("polled" if on_gpu and draft_on_cpu else "thread")
    threads = _draft_threads(options, target)
    if kind == "inline":
        return InlineWorker(drafter)
    if kind == "polled":
        if not (on_gpu and draft_on_cpu):
            where = f"the target on {_device(target)}" + (f" and the draft on {_device(draft)}" if draft else "")
            raise UserError(f"worker polled needs a target on a GPU and a draft on the CPU, not {where}: use thread")
        return PolledWorker(drafter, cuda_recorder(_device(target)), threads)
    if kind == "thread":
        return ThreadWorker(drafter, threads, draft.model.device if draft else None)
    if draft is not None and draft.others:
        raise UserError("worker process drafts with one draft model, these are several: use worker thread")
    if draft is not None and draft.again is None:
        raise UserError(f"the draft {draft.name} is an object of this process: name a path, or use worker thread")
    again, vocab_size = (draft.again, draft.model.vocab_size) if draft else (None, 0)
    return ProcessWorker(partial(_rebuild_drafter, name, again, vocab_size, dict(values)), threads)


def _rebuild_drafter(
    name: str, again: Callable[[], Loaded] | None, vocab_size: int, values: Mapping[str, Any]
) -> Drafter:
    """Build the drafter in the worker's process: load the draft again and cut it to the vocabulary it had here."""
    draft = again() if again else None
    if draft is not None:
        draft.model.vocab_size = vocab_size
    return build_drafter(name, _build_context(None, draft), values)
