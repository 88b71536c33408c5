"""Flags that several commands share: the models, the decoding method, and the fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.cli.flags import flag, flags_of
from outpace.core.errors import UserError, check_range, require
from outpace.core.options import help_of
from outpace.engine.options import BuildOptions
from outpace.models.files.reading import read_named_text
from outpace.models.options import GENERATION_CONFIG, LoadOptions, Progress

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.cluster.remote_target import RemoteTarget

TEXT, PENALTIES = "Text", "Penalties and bans"
SEED = "Seed of the sampling: the same seed gives the same text."
MAX_TOKENS = "Maximum number of tokens of an answer."


@dataclass(frozen=True)
class BasicSamplingFlags:
    """Sampling options of commands that time short answers."""

    panel: ClassVar[str] = TEXT
    max_tokens: int = flag(128, MAX_TOKENS)
    temperature: float = flag(0.0, "Sampling temperature; 0 is greedy.")
    seed: int = flag(0, SEED)


@dataclass(frozen=True)
class StructureFlags:
    """The structure of an answer."""

    panel: ClassVar[str] = "Structured output"
    json_schema: str | None = flag(None, "Answer with JSON that follows the schema in this file.")
    regex: str | None = flag(None, "Answer with text that this regex matches as a whole.")
    grammar: str | None = flag(None, "Answer with text of the Lark grammar in this file.")

    def structured_outputs(self) -> dict[str, str] | None:
        """Return this field of SamplingParams; raise UserError for several flags or an unreadable file."""
        files = (("json", "--json-schema", self.json_schema), ("grammar", "--grammar", self.grammar))
        found = {name: read_named_text(option, Path(file)) for name, option, file in files if file is not None}
        found |= {} if self.regex is None else {"regex": self.regex}
        if len(found) > 1:
            raise UserError("--json-schema, --regex and --grammar exclude each other, give one of them")
        return found or None


@dataclass(frozen=True)
class SamplingFlags:
    """How an answer is sampled, and where it ends."""

    panel: ClassVar[str] = TEXT
    max_tokens: int = flag(256, MAX_TOKENS)
    temperature: float | None = flag(
        None, "Sampling temperature; 0 is greedy. The default is what the model's files recommend, else 0."
    )
    seed: int = flag(0, SEED)
    top_p: float | None = flag(None, "Sample from the likeliest tokens up to this probability mass.")
    top_k: int | None = flag(None, "Sample from the k likeliest tokens; 0: all.")
    min_p: float | None = flag(None, "Sample from tokens with at least this share of the likeliest one's probability.")
    generation_config: str = flag("auto", GENERATION_CONFIG)
    stop: list[str] | None = flag(None, "A string that ends the text before it appears; may be repeated.")
    ignore_eos: bool = flag(False, "Do not stop at the model's stop tokens.")
    repetition_penalty: float | None = flag(
        None, "Above 1: tokens of prompt and answer become less likely.", panel=PENALTIES
    )
    presence_penalty: float = flag(0.0, "Subtracted from the logits of tokens in the answer.", panel=PENALTIES)
    frequency_penalty: float = flag(
        0.0, "Subtracted from a token's logit for each time it was written.", panel=PENALTIES
    )
    logit_bias: list[str] | None = flag(
        None, "TOKEN=BIAS: added to the logit of a token id, -100 to 100; may be repeated.", panel=PENALTIES
    )
    bad_words: list[str] | None = flag(
        None,
        "A string that the answer never contains, not even inside a longer word; may be repeated.",
        panel=PENALTIES,
    )
    min_tokens: int = flag(0, "Minimum number of tokens of an answer.", panel=PENALTIES)
    structured_outputs: StructureFlags = field(default_factory=StructureFlags)

    def options(self, recommended: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the arguments of SamplingParams; the `recommended` ones apply where no flag was given."""
        given = asdict(self) | {"structured_outputs": self.structured_outputs.structured_outputs()}
        given = {name: value for name, value in given.items() if value is not None and name != "generation_config"}
        return dict(recommended) | given | {"logit_bias": _bias(self.logit_bias or ())}

    def check(self, **more: Any) -> None:
        """Raise UserError for a value out of range, before a model is loaded. `more`: arguments of SamplingParams."""
        from outpace.api.params import SamplingParams
        from outpace.models.files.recommended_sampling import check_source

        check_source(self.generation_config)
        SamplingParams(**self.options({"temperature": 1.0}), **more)  # the model may recommend one

    def recommended(self, llm: LLM | RemoteTarget, *, quiet: bool = False) -> dict[str, Any]:
        """Return what the model's files recommend for flags that were not given, and say so unless `quiet`."""
        from outpace.cli.display import say_recommended

        found = llm.target.recommended_sampling(self.generation_config)
        found = {name: value for name, value in found.items() if getattr(self, name) is None}
        if not quiet:
            say_recommended(found)
        return found


def _bias(given: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in given:
        token, _, value = entry.partition("=")
        try:
            number, amount = int(token), float(value)
        except ValueError:
            raise UserError(f"--logit-bias is {entry!r}, it must be a token id and a number, as in 198=-5") from None
        if number in bias:
            raise UserError(f"--logit-bias names token {number} twice")
        bias[number] = amount
    return bias


METHOD = "Method"
TARGET = "Target model: hub id, folder or .gguf file; the default is the shipped model."
TARGET_NAMES = ("--target", "--model", "-m")
DRAFT = (
    "Draft model, or a trained head of the target: hub id, folder or .gguf file; auto (a known small model of the same"
    " family); mtp (a layer in the target's files); layers:0-24,26-29 (these layers of the target); or none. The"
    " default is the shipped draft for the shipped model, else none. May be repeated: each round uses the best."
)
# The fields of LoadOptions and BuildOptions that are flags of the commands that load a pair.
TARGET_FLAGS = ("device", "dtype", "exact", "runtime", "kv_dtype", "graphs", "pp_plan", "trust_remote_code")
LOAD_FLAGS = (*TARGET_FLAGS, "draft_device", "draft_dtype", "draft_vocab")
BUILD_FLAGS = ("method", "drafter", "rule", "worker", "draft_threads", "nodes", "kv_memory", "reuse")
SYSTEM = flag(None, "System message that opens the conversation.", panel=TEXT)
JSON = flag(False, "Write one line of JSON to stdout, and nothing else.", "--json")


def use_threads(count: int | None) -> None:
    """Set the number of CPU threads; UserError for one that this machine does not have."""
    from outpace.core.arrays import num_cores, set_num_threads

    if count is not None:
        check_range("threads", count, 1, num_cores())
        set_num_threads(count)


def after(check: Callable[[], None], progress: Progress) -> Progress:
    """Return a progress function whose first call, after all options were checked, runs another check."""
    pending = [check]

    def show(stage: str, fraction: float) -> None:
        while pending:
            pending.pop()()
        progress(stage, fraction)

    return show


@dataclass(frozen=True)
class ModelFlags:
    """The models to load, and the decoding method."""

    panel: ClassVar[str] = "Model"
    target: str | None = flag(None, TARGET, *TARGET_NAMES)
    draft: list[str] | None = flag(None, DRAFT)
    options: LoadOptions = flags_of(LoadOptions, *LOAD_FLAGS)
    threads: int | None = flag(None, "CPU threads of the target; the default is one for each core.")
    build: BuildOptions = flags_of(BuildOptions, *BUILD_FLAGS, panel=METHOD)

    def open(self, extra: Mapping[str, Any], *, quiet: bool = False, bar_after: float = 0.5) -> LLM:
        """Load the models. `extra` are options of the method and the drafter."""
        from outpace.api.llm import load
        from outpace.card.link import check_reachable, read_address
        from outpace.cli.display import loading_bar, say
        from outpace.cli.process import end_after_loss
        from outpace.models.files.find import short_name
        from outpace.models.load import known_draft

        use_threads(self.threads)
        draft: Any = self.draft[0] if self.draft and len(self.draft) == 1 else self.draft
        given = {name: getattr(self.build, name) for name in help_of(BuildOptions)}
        if self.build.is_on_ray:
            given |= {"worker": self._place_on_ray(extra), "drafter": None}
            draft, extra = None, {name: value for name, value in extra.items() if name not in self._drafter_options}
        with loading_bar(quiet, bar_after) as show:
            progress = show
            if self.build.is_remote:
                progress = after(partial(check_reachable, read_address(str(self.build.worker)), "draft worker"), show)
            llm = load(self.target, draft, self.options, progress=progress, **given | dict(extra))
        if self.options.exact and not llm.target.model.exact:
            llm.close()
            raise UserError(
                "exact mode is not available here: without graphs it needs a CPU and a precision other than float16;"
                " leave out --exact"
            )
        if llm.target.lead is not None:
            llm.target.lead.on_loss = end_after_loss
        names: dict[str, list[str]] = {}
        for loaded in (llm.target, llm.draft):
            if loaded and loaded.notice and not quiet:
                names.setdefault(loaded.notice, []).append(loaded.name)
        for notice, models in names.items():
            say(f"{' and '.join(models)}: {notice}")
        if llm.draft is None and self.draft is None and self.build.method == "auto" and not quiet:
            with suppress(UserError):
                say(f"no draft model: --draft auto ({short_name(known_draft(llm.target))}) may speed this up")
        return llm

    def given(self) -> list[str]:
        """Return the names of the flags that differ from their defaults."""
        pairs = ((self, ModelFlags()), (self.options, LoadOptions()), (self.build, BuildOptions()))
        named = ((one.name, mine, other) for mine, other in pairs for one in fields(mine))
        given = [name for name, mine, other in named if getattr(mine, name) != getattr(other, name)]
        return [name for name in given if name not in ("options", "build")]

    def only_draft(self, user: str) -> str | None:
        """Return the name of the draft model, if there is one; UserError, which names its `user`, if there are more."""
        if self.draft and len(self.draft) > 1:
            raise UserError(f"{user} takes one draft model, not {len(self.draft)}: name one")
        return self.draft[0] if self.draft else None

    @property
    def _drafter_options(self) -> set[str]:
        """Names of the options of the drafters that a draft worker runs."""
        from outpace.drafters import drafter_modules

        modules = drafter_modules(self.build.drafter or "model").values()
        return {one.name for module in modules for one in fields(module.Options)}

    def _place_on_ray(self, extra: Mapping[str, Any]) -> str:
        """Start a draft worker on a Ray cluster with these flags; return its address."""
        from outpace.cluster.on_ray import place_draft_worker, read_resources

        return place_draft_worker(
            self.only_draft("a draft worker"),
            self.options.of_draft(),
            drafter=self.build.drafter or "model",
            values={name: value for name, value in extra.items() if name in self._drafter_options},
            resources=read_resources(str(self.build.worker)),
        )


DRAFT_FLAGS = ("target", "draft", "drafter", "threads")  # flags that concern the draft for a target elsewhere


def open_any(
    model: ModelFlags, extra: Mapping[str, Any], *, quiet: bool = False, is_chat: bool = False
) -> LLM | RemoteTarget:
    """Load the models, or the draft alone for a target on another machine (--target grpc://HOST:PORT). With `is_chat`
    the target needs a chat template, which is checked first."""
    from outpace.core.drafting import is_address
    from outpace.models.load import check_chat_template

    if is_address(model.target):
        return _open_remote_target(model, extra, quiet)
    if is_chat:
        check_chat_template(model.target)
    return model.open(extra, quiet=quiet)


def _open_remote_target(model: ModelFlags, extra: Mapping[str, Any], quiet: bool) -> RemoteTarget:
    """Load the draft model for a target on another machine. UserError for flags that its server sets."""
    require("a target on another machine", "remote", "grpc")
    from outpace.card.link import read_address
    from outpace.cli.display import loading_bar
    from outpace.cluster.draft_model import build_card_drafter, load_own_draft
    from outpace.cluster.remote_target import RemoteTarget

    of_draft = [one.name for one in fields(model.options) if one.name != "pp_plan"]  # which concerns the target alone
    for name in model.given():
        if name not in (*DRAFT_FLAGS, *of_draft):
            raise UserError(f"leave out --{name.replace('_', '-')}: the server at {model.target} sets it")
    chosen = model.only_draft("a target on another machine")
    address = read_address(str(model.target))
    use_threads(model.threads)
    with loading_bar(quiet) as progress:
        draft = load_own_draft(chosen, model.options, progress)
    drafter = build_card_drafter(model.build.drafter or "model", draft, extra)
    return RemoteTarget(address, draft, drafter, address.key)
