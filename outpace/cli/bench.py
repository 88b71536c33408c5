"""`outpace bench`: methods and other engines side by side, on the same prompts, in turn."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from outpace.cli import display
from outpace.cli.options import ModelFlags, flags
from outpace.cli.output_files import check_file, check_folder, check_plot, raise_last, write_all
from outpace.cli.process import INTERRUPTED, as_interrupt
from outpace.cli.sampling_options import MaxTokens, Seed, Temperature
from outpace.core.errors import UserError, check_whole

if TYPE_CHECKING:
    from outpace.api.llm import LLM


MEASURED, KEPT = "What is measured", "What is kept"


@dataclass(frozen=True)
class Measuring:
    """Who takes part, on what, and how often."""

    tasks: Annotated[
        str,
        typer.Option(
            help="Prompts, joined by commas: .jsonl files (a JSON object with turns in each line), builtin,"
            " repetition, summaries, answers, hub:NAME, or gsm8k, humaneval, mgsm, mt_bench from the hub.",
            rich_help_panel=MEASURED,
        ),
    ] = "builtin"
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, joined by commas, each with options of its own if needed, as in"
            " card:drafter=model+ngram,nodes=8,speculative. Plain decoding is always measured.",
            rich_help_panel=MEASURED,
        ),
    ] = "auto,card,speculative"
    rules: Annotated[
        str,
        typer.Option(
            help="Rules, joined by commas, each with options of its own if needed, as in block,lenience:lenience=0.4;"
            " each of the methods is measured with each of them. all: those that fit a method and the temperature.",
            rich_help_panel=MEASURED,
        ),
    ] = ""
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines, joined by commas, as in llama_cpp,transformers; or all.", rich_help_panel=MEASURED
        ),
    ] = ""
    prompts: Annotated[
        int, typer.Option(help="The number of prompts taken from the start of each task.", rich_help_panel=MEASURED)
    ] = 10
    turns: Annotated[
        int,
        typer.Option(
            help="The number of turns taken of each conversation, such as MT-bench's, with plain decoding's answers"
            " between them. Each later turn is a task of its own.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    rounds: Annotated[int, typer.Option(help="How often everything is measured.", rich_help_panel=MEASURED)] = 1
    batch: Annotated[
        str, typer.Option(help="Numbers of requests at once, as in 1,2,8,16; not for peers.", rich_help_panel=MEASURED)
    ] = "1"
    inflate: Annotated[
        int,
        typer.Option(
            help="Emulate a target that is this many times as large, by layers that do not change its text.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    run_tests: Annotated[
        bool,
        typer.Option(
            "--run-tests",
            help="Score programs that the models write by running their tests, each in a confined process.",
            rich_help_panel=MEASURED,
        ),
    ] = False
    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class Keeping:
    """Where results go."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to which each result is written at once; run again to continue a bench that stopped.",
            rich_help_panel=KEPT,
        ),
    ] = None
    json: Annotated[Path | None, typer.Option(help="File for the rows of the table.", rich_help_panel=KEPT)] = None
    plot: Annotated[Path | None, typer.Option(help="File for a plot: .png, .svg or .pdf.", rich_help_panel=KEPT)] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File for a trace of what the draft proposes, for outpace simulate; nothing is measured.",
            rich_help_panel=KEPT,
        ),
    ] = None


QUIET = 60.0  # seconds between two lines where there is no terminal
WIDTH = 120  # that the table takes at least; a narrower terminal breaks its lines


@flags
def bench(
    loading: ModelFlags,
    measuring: Measuring,
    keeping: Keeping,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Compare two results, files of --json or folders of --out; nothing is measured."
        ),
    ] = None,
) -> None:
    """Measure methods and other engines on the same prompts, and compare their texts."""
    if compare is not None:
        _compare(*compare)
        return
    _check_files(keeping)
    options = _options(loading, measuring)
    with as_interrupt(), _open(loading, options) as llm:
        if keeping.trace is not None:
            _trace(llm, options, keeping.trace)
        elif not _measure(llm, options, keeping, loading.options.device, measuring.run_tests):
            raise typer.Exit(INTERRUPTED)


def _check_files(keeping: Keeping) -> None:
    check_file("--json", keeping.json)
    check_file("--trace", keeping.trace)
    check_folder("--out", keeping.out)
    check_plot("--plot", keeping.plot)


def _options(loading: ModelFlags, measuring: Measuring) -> Any:
    """The `BenchOptions` that the flags mean; names are checked before a model is loaded."""
    from outpace.api.params import SamplingParams
    from outpace.bench import contenders, sandbox
    from outpace.bench.run import BenchOptions, check_batches
    from outpace.bench.tasks import collect

    if loading.method != "auto":
        raise UserError(f"--method is {loading.method!r}, a bench takes several: write --methods {loading.method}")
    check_whole("inflate", measuring.inflate, 1, 64)
    common = _common(loading)
    if measuring.run_tests and not sandbox.is_available():
        raise UserError("--run-tests confines programs by Linux's seccomp, which does not work here; leave it out")
    sampling = SamplingParams(max_tokens=measuring.max_tokens, temperature=measuring.temperature, seed=measuring.seed)
    methods = contenders.parse_methods(measuring.methods, common)
    if measuring.rules:
        methods = contenders.with_rules(methods, measuring.rules, sampling.sampling)
    peers = ",".join(contenders.peer_names()) if measuring.peers == "all" else measuring.peers
    options = BenchOptions(
        tasks=tuple(part.strip() for part in measuring.tasks.split(",") if part.strip()),
        methods=tuple(methods),
        peers=tuple(contenders.parse_peers(peers)),
        prompts=measuring.prompts,
        turns=measuring.turns,
        rounds=measuring.rounds,
        batch=_counts(measuring.batch),
        inflate=measuring.inflate,
        target=loading.target,
        sampling_params=sampling,
    )
    check_batches(options, collect(options.tasks, options.prompts, options.turns))
    if options.inflate > 1:
        _check_inflated(loading, options)
    return options


def _common(loading: ModelFlags) -> dict[str, Any]:
    """The flags that are options of every method with a drafter, where they were given."""
    names = ("drafter", "rule", "worker", "draft_threads", "nodes")
    return {name: value for name in names if (value := getattr(loading, name)) != getattr(ModelFlags, name)}


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--batch is {text!r}, it must be whole numbers joined by commas, as in 1,2,8") from None


def _check_inflated(loading: ModelFlags, options: Any) -> None:
    """Layers that write nothing would be drafted with, or skipped: both would flatter us."""
    drafters = [str(contender.options.get("drafter", "")) for contender in options.methods]
    skips = next((name for name in drafters if "layer" in name), None)
    layers = next((draft for draft in loading.draft or () if draft.startswith("layers:")), None)
    if layers or skips:
        named = skips or layers
        raise UserError(f"--inflate does not go with {named}: its added layers cost time and write nothing")


def _open(loading: ModelFlags, options: Any) -> LLM:
    extra = {"inflate": options.inflate, "profile": False}
    return replace(loading, nodes=None, rule="auto", worker=None, draft_threads=1).open(extra)


def _measure(llm: LLM, options: Any, keeping: Keeping, device: str, runs_tests: bool) -> bool:
    """Runs what is not there yet, and shows all that is finished; False after Ctrl-C."""
    from outpace.bench import report
    from outpace.bench.run import Bench
    from outpace.bench.store import Store

    facts = report.about(llm, options.inflate, shlex.join(["outpace", *sys.argv[1:]]), device)
    store = Store(keeping.out, options.settings(llm))
    with Bench(llm, options, store, lambda text: display.say(text, "yellow")) as running:
        whole = _run(running, runs_tests)
        failed = _show(running, facts, keeping)
        if whole and (reason := running.failure) is not None:
            failed.append(UserError(f"no answer was finished, the first one failed with {reason}"))
        raise_last(failed)
    return whole


def _run(running: Any, runs_tests: bool) -> bool:
    """Measures, then judges, with a bar on stderr where somebody looks on, else a line a minute."""
    from outpace.bench.judging import judge

    console = display.stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("warming up", total=None)

        said = time.monotonic()

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said > QUIET:
                said = time.monotonic()
                display.say(f"{done} of {total}, {what}")

        try:
            running.measure(show)
            judge(running, show, runs_tests)
        except KeyboardInterrupt:
            return False
    return True


def _show(running: Any, facts: dict[str, Any], keeping: Keeping) -> list[UserError]:
    """The table, the files, and the line of JSON; why files could not be written."""
    from outpace.bench import report
    from outpace.bench.judging import with_score_gaps
    from outpace.bench.plot import plot
    from outpace.bench.store import PLOT, ROWS

    found = with_score_gaps(running.rows(), running)
    plain = report.plain_rows(found, facts)
    _page().print(report.tables(found, facts))
    files = [file for file in (keeping.json, keeping.out and keeping.out / ROWS) if file is not None]
    failed = write_all(partial(report.write_json, file, plain) for file in files)
    if keeping.plot is not None and found:
        failed += write_all([partial(plot, found, facts, keeping.plot)])
    if keeping.out is not None and found:  # nobody asked for this one: matplotlib may be missing
        for error in write_all([partial(plot, found, facts, keeping.out / PLOT)]):
            display.say(f"warning: {error}", "yellow")
    display.print_for_machines({"rows": plain, **facts})
    return failed


def _page() -> Console:
    console = display.stdout()
    console.width = max(console.width, WIDTH)
    return console


def _compare(one: Path, other: Path) -> None:
    from outpace.bench import compare

    first, second = compare.read(one), compare.read(other)
    found = compare.side_by_side(first, second)
    console = _page()
    console.print(compare.table(found))
    for line in (f"A: {one}", f"B: {other}", *compare.differences(first, second)):
        console.print(line, style=display.GREY)
    display.print_for_machines({"a": str(one), "b": str(other), "rows": found})


def _trace(llm: LLM, options: Any, file: Path) -> None:
    """Plain decoding's text and the draft's proposals at every place of it."""
    from outpace.bench.tasks import Conversations, check_turns, collect
    from outpace.simulate.trace import RecordOptions, record

    if llm.draft is None:
        raise UserError("--trace records a pair, name a draft with --draft")
    asked = collect(options.tasks, options.prompts, options.turns)
    check_turns(asked, llm.tokenizer)
    drawn = options.sampling_params

    talks = Conversations(llm.tokenizer, lambda prompt: llm.generate(list(prompt), drawn, plain=True)[0].tokens)
    prompts: Sequence[Sequence[int]] = [talks.prompt(one) for one in asked]
    console = display.stderr()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("recording", total=len(prompts))
        settings = RecordOptions(drawn.max_tokens, sampling=drawn.sampling, seed=drawn.seed)
        trace = record(
            llm.target,
            llm.draft,
            prompts,
            settings,
            tasks=[one.task for one in asked],
            progress=lambda done, total: progress.update(task, completed=done),
        )
    trace.save(file)
    found = {"trace": str(file), "answers": len(prompts), "tokens": trace.tokens}
    display.say(f"trace: {file}, {trace.tokens} tokens of {len(prompts)} answers")
    display.print_for_machines(found | {"acceptance": round(trace.acceptance(), 4)})
