"""Options that several commands share: one frozen dataclass a concern, whose fields become the command's flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outpace.cli.sampling_options import TEXT
from outpace.core.errors import UserError, check_range
from outpace.models.options import LoadOptions

if TYPE_CHECKING:
    from outpace.api.llm import LLM

MODEL = "Model"
METHOD = "Method"

Target = Annotated[
    str | None,
    typer.Option(
        help="Target model: hub id, folder or .gguf file; the default is the shipped model.", rich_help_panel=MODEL
    ),
]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        help="Draft model: hub id, folder or .gguf file; auto (a known small model of the same family); some of the"
        " target's layers, as in layers:0,1,28,29; or none. The default is the shipped draft for the shipped model,"
        " else none. May be repeated: each round then uses the best of them.",
        rich_help_panel=MODEL,
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Drafters, joined by +, as in model+ngram; outpace methods lists them. The default depends on the method.",
        rich_help_panel=METHOD,
    ),
]
System = Annotated[str | None, typer.Option(help="System message that opens the conversation.", rich_help_panel=TEXT)]
Json = Annotated[bool, typer.Option("--json", help="Write one line of JSON to stdout, and nothing else.")]


FLAGS: dict[type, dict[str, Any]] = {  # of dataclasses that know no command line: those of their fields that are flags
    LoadOptions: {
        "device": typer.Option(help="Device of the target: cpu, cuda, cuda:1, ...", rich_help_panel=MODEL),
        "dtype": typer.Option(
            help="Precision: file (a GGUF, GPTQ or AWQ model's own weights, all else in int8; CPU only), int4 (as file,"
            " but four bits where file has int8 in its layers), int8 (native on a CPU, else by torchao), fp8 (by"
            " torchao), float32, bfloat16 or float16; auto: file on a CPU and bfloat16 on a GPU where available, else"
            " float32.",
            rich_help_panel=MODEL,
        ),
        "exact": typer.Option(
            "--exact/--no-exact",
            help="Make every method compute bit-identical logits; the default is on where the device supports it.",
            rich_help_panel=MODEL,
        ),
        "runtime": typer.Option(
            help="Runtime: auto, native (kernels for a CPU), llama (the Llama family by torch) or transformers (any"
            " causal model).",
            rich_help_panel=MODEL,
        ),
        "kv_dtype": typer.Option(
            "--kv-dtype",
            help="Keys and values: float32, float16 (half of the memory) or int8 (about a quarter), of the draft's"
            " too; auto: float16 by the native kernels, else the runtime's own.",
            rich_help_panel=MODEL,
        ),
        "graphs": typer.Option(
            help="Graph capture of the runtime llama: cuda (CUDA graphs), eager (the same forwards without capture, on"
            " any device) or off; auto: cuda on a GPU, else off.",
            rich_help_panel=MODEL,
        ),
        "tp_plan": typer.Option(
            "--tp-plan",
            help="auto: split each layer of the target over the processes that torch.distributed.run started, by"
            " transformers; the first process alone writes.",
            rich_help_panel=MODEL,
        ),
        "trust_remote_code": typer.Option(
            "--trust-remote-code", help="Run the Python files that come with a model.", rich_help_panel=MODEL
        ),
    }
}


@dataclass(frozen=True)
class ModelFlags:
    """Which models to load, and by which method they write."""

    target: Target = None
    draft: Draft = None
    options: LoadOptions = field(default_factory=LoadOptions)  # FLAGS of its own
    draft_device: Annotated[
        str | None, typer.Option(help="Device of the draft; the default is the target's.", rich_help_panel=MODEL)
    ] = None
    draft_dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision of the draft; the default is the target's --dtype, where auto holds a draft in int4 on a"
            " CPU.",
            rich_help_panel=MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of the target; the default is one for each core.", rich_help_panel=MODEL),
    ] = None
    method: Annotated[
        str,
        typer.Option(
            help="Decoding method: auto (drafts as much as pays), card, speculative, ...; outpace methods lists them.",
            rich_help_panel=METHOD,
        ),
    ] = "auto"
    drafter: Drafter = None
    rule: Annotated[
        str,
        typer.Option(
            help="Acceptance rule: greedy, gumbel, rejection, ...; outpace methods lists them; auto: greedy at"
            " temperature 0, else gumbel.",
            rich_help_panel=METHOD,
        ),
    ] = "auto"
    worker: Annotated[
        str | None,
        typer.Option(
            help="Where a drafter beside the target runs (card, planned, pearl, ssd): thread, process, or inline on a"
            " simulated clock; the default is thread.",
            rich_help_panel=METHOD,
        ),
    ] = None
    draft_threads: Annotated[
        int, typer.Option(help="CPU threads of a drafter beside the target.", rich_help_panel=METHOD)
    ] = 1
    nodes: Annotated[
        int | None,
        typer.Option(
            help="The most tree nodes verified in a pass, with the root; the default is 32 for auto, else 8.",
            rich_help_panel=METHOD,
        ),
    ] = None
    kv_memory: Annotated[
        float | None,
        typer.Option(
            help="Memory for the KV cache, in GiB: the target's with its prefix cache, and that of drafts in this"
            " process; the default is half of the free memory.",
            rich_help_panel=METHOD,
        ),
    ] = None
    reuse: Annotated[
        bool,
        typer.Option(
            help="Start from the keys and values of an earlier text that begins alike, and draft what followed a prompt"
            " that was asked before.",
            rich_help_panel=METHOD,
        ),
    ] = True

    def open(self, extra: Mapping[str, Any], *, quiet: bool = False, bar_after: float = 0.5) -> LLM:
        """Loads the models; `extra` are the method's and the drafter's own options. Names are checked first."""
        from outpace.cli.display import LoadingBar, say

        self._check()
        from outpace.api.llm import load

        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "threads"}
        given["draft"] = one_or_all(self.draft)
        with LoadingBar(quiet, bar_after) as progress:
            llm = load(progress=progress, **given, **extra)
        if self.options.exact and not llm.target.model.exact:
            llm.close()
            raise UserError(
                "exact mode is not available here: without graphs it needs a CPU and a precision other than float16;"
                " leave out --exact"
            )
        names: dict[str, list[str]] = {}
        for loaded in (llm.target, llm.draft):
            if loaded and loaded.notice and not quiet:
                names.setdefault(loaded.notice, []).append(loaded.name)
        for notice, of in names.items():
            say(f"{' and '.join(of)}: {notice}")
        return llm

    def _check(self) -> None:
        """What can be told wrong before a model is loaded."""
        from outpace.core import registry

        registry.find("decoders", self.method)
        if self.rule != "auto":
            registry.find("rules", self.rule)
        for part in self.drafter.replace(",", "+").split("+") if self.drafter is not None else ():
            registry.find("drafters", part)
        if self.threads is not None:
            from outpace.core.lazy import set_num_threads
            from outpace.core.machine import num_cores

            check_range("threads", self.threads, 1, num_cores())
            set_num_threads(self.threads)


def one_or_all(drafts: Sequence[str] | None) -> str | Sequence[str] | None:
    """What the library takes: a draft by name, or a list of several."""
    return None if not drafts else drafts[0] if len(drafts) == 1 else drafts


def flags(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take dataclasses such as `ModelFlags`: the fields of each become flags of the command."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name in own and is_dataclass(kind)}
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
        if name not in groups
    ]
    parameters += [flag for group in groups.values() for flag in _flags_of(group)]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = _made(group, given)
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags_of(group: Any) -> Iterator[inspect.Parameter]:
    for flag, kind in _fields(group):
        if is_dataclass(kind):
            yield from _flags_of(kind)
            continue
        default = inspect.Parameter.empty if flag.default is MISSING else flag.default
        yield inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _made(group: Any, given: dict[str, Any]) -> Any:
    """A dataclass from its flags, which are taken out of `given`."""
    values = {
        flag.name: _made(kind, given) if is_dataclass(kind) else given.pop(flag.name) for flag, kind in _fields(group)
    }
    return group(**values)


def _fields(group: Any) -> Iterator[tuple[Any, Any]]:
    """A dataclass's fields that are flags, or hold some, each with its annotated type."""
    hints, flags_of = get_type_hints(group, include_extras=True), FLAGS.get(group)
    for one in fields(group):
        if flags_of is None:
            yield one, hints[one.name]
        elif one.name in flags_of:
            yield one, Annotated[hints[one.name], flags_of[one.name]]
