"""`outpace bench`: compare methods and other engines on the same prompts."""

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
from outpace.cli.flags import flag, flags
from outpace.cli.options import ModelFlags
from outpace.cli.output_files import check_file, check_folder, check_plot, raise_last, write_all
from outpace.cli.process import INTERRUPTED, sigterm_as_interrupt
from outpace.cli.sampling_options import MaxTokens, Seed, Temperature
from outpace.core.errors import UserError, check_whole

if TYPE_CHECKING:
    from outpace.api.llm import LLM


MEASURED, KEPT = "What is measured", "What is kept"


@dataclass(frozen=True)
class BenchFlags:
    """The methods, the prompts, and the number of repetitions."""

    tasks: Annotated[
        str,
        flag(
            "Prompts, joined by commas: .jsonl files (a JSON object with turns in each line), builtin,"
            " repetition, summaries, answers, hub:NAME, or gsm8k, humaneval, mgsm, mt_bench from the hub.",
            MEASURED,
        ),
    ] = "builtin"
    methods: Annotated[
        str,
        flag(
            "Methods, joined by commas, each with options of its own if needed, as in"
            " card:drafter=model+ngram,nodes=8,speculative. Plain decoding is always measured.",
            MEASURED,
        ),
    ] = "auto,card,speculative"
    rules: Annotated[
        str,
        flag(
            "Rules, joined by commas, each with options of its own if needed, as in"
            " block,lenience:lenience=0.4; each of the methods is measured with each of them. all: those that"
            " fit a method and the temperature.",
            MEASURED,
        ),
    ] = ""
    peers: Annotated[str, flag("Other engines, joined by commas, as in llama_cpp,transformers; or all.", MEASURED)] = ""
    prompts: Annotated[int, flag("Number of prompts taken from the start of each task.", MEASURED)] = 10
    turns: Annotated[
        int,
        flag(
            "Number of turns taken of each conversation, such as MT-bench's, with plain decoding's answers"
            " between them. Each later turn is a task of its own.",
            MEASURED,
        ),
    ] = 1
    rounds: Annotated[int, flag("Number of repetitions of all measurements.", MEASURED)] = 1
    batch: Annotated[str, flag("Numbers of concurrent requests, as in 1,2,8,16; not for peers.", MEASURED)] = "1"
    inflate: Annotated[
        int, flag("Emulate a target that is this many times as large, by layers that do not change its text.", MEASURED)
    ] = 1
    run_tests: Annotated[
        bool,
        flag(
            "Score programs that the models write by running their tests, each in a confined process.",
            MEASURED,
            "--run-tests",
        ),
    ] = False
    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class ResultFlags:
    """The files of the results."""

    out: Annotated[
        Path | None,
        flag("Folder to which each result is written at once; run again to continue a bench that stopped.", KEPT),
    ] = None
    json: Annotated[Path | None, flag("File for the rows of the table.", KEPT)] = None
    plot: Annotated[Path | None, flag("File for a plot: .png, .svg or .pdf.", KEPT)] = None
    trace: Annotated[
        Path | None,
        flag("File for a trace of what the draft proposes, for outpace simulate; nothing is measured.", KEPT),
    ] = None


LINE_SECONDS = 60.0  # between two progress lines without a terminal
MIN_WIDTH = 120  # of the table; a narrower terminal wraps it


@flags
def bench(
    model: ModelFlags,
    bench_flags: BenchFlags,
    results: ResultFlags,
    compare: Annotated[
        tuple[Path, Path] | None,
        flag("Compare two results, files of --json or folders of --out; nothing is measured.", metavar="A B"),
    ] = None,
) -> None:
    """Measure methods and other engines on the same prompts, and compare their texts."""
    if compare is not None:
        _compare(*compare)
        return
    check_file("--json", results.json)
    check_file("--trace", results.trace)
    check_folder("--out", results.out)
    check_plot("--plot", results.plot)
    options = _options(model, bench_flags)
    with sigterm_as_interrupt(), _open(model, options) as llm:
        if results.trace is not None:
            _trace(llm, options, results.trace)
        elif not _measure(llm, options, results, model.options.device, bench_flags.run_tests):
            raise typer.Exit(INTERRUPTED)


def _options(model: ModelFlags, bench_flags: BenchFlags) -> Any:
    """Convert the flags to BenchOptions, and check names before a model is loaded."""
    from outpace.api.params import SamplingParams
    from outpace.bench import contenders, sandbox
    from outpace.bench.run import BenchOptions, check_batches
    from outpace.bench.tasks import collect

    if model.method != "auto":
        raise UserError(f"--method is {model.method!r}, a bench takes several: write --methods {model.method}")
    check_whole("inflate", bench_flags.inflate, 1, 64)
    common = _common(model)
    if bench_flags.run_tests and not sandbox.is_available():
        raise UserError("--run-tests confines programs by Linux's seccomp, which does not work here; leave it out")
    sampling = SamplingParams(
        max_tokens=bench_flags.max_tokens, temperature=bench_flags.temperature, seed=bench_flags.seed
    )
    methods = contenders.parse_methods(bench_flags.methods, common)
    if bench_flags.rules:
        methods = contenders.with_rules(methods, bench_flags.rules, sampling.sampling)
    peers = ",".join(contenders.peer_names()) if bench_flags.peers == "all" else bench_flags.peers
    options = BenchOptions(
        tasks=tuple(part.strip() for part in bench_flags.tasks.split(",") if part.strip()),
        methods=tuple(methods),
        peers=tuple(contenders.parse_peers(peers)),
        prompts=bench_flags.prompts,
        turns=bench_flags.turns,
        rounds=bench_flags.rounds,
        batch=_counts(bench_flags.batch),
        inflate=bench_flags.inflate,
        target=model.target,
        sampling_params=sampling,
    )
    check_batches(options, collect(options.tasks, options.prompts, options.turns))
    if options.inflate > 1:
        _check_inflated(model, options)
    return options


def _common(model: ModelFlags) -> dict[str, Any]:
    """Return the given flags that are options of every method with a drafter."""
    names = ("drafter", "rule", "worker", "draft_threads", "nodes")
    return {name: value for name in names if (value := getattr(model, name)) != getattr(ModelFlags, name)}


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--batch is {text!r}, it must be whole numbers joined by commas, as in 1,2,8") from None


def _check_inflated(model: ModelFlags, options: Any) -> None:
    """Refuse drafts of added layers or without them: these layers change no text, so the results would be too good."""
    drafters = [str(contender.options.get("drafter", "")) for contender in options.methods]
    skips = next((name for name in drafters if "layer" in name), None)
    layers = next((draft for draft in model.draft or () if draft.startswith("layers:")), None)
    if layers or skips:
        named = skips or layers
        raise UserError(f"--inflate does not go with {named}: its added layers cost time and write nothing")


def _open(model: ModelFlags, options: Any) -> LLM:
    extra = {"inflate": options.inflate, "profile": False}
    return replace(model, nodes=None, rule="auto", worker=None, draft_threads=1).open(extra)


def _measure(llm: LLM, options: Any, results: ResultFlags, device: str, runs_tests: bool) -> bool:
    """Run what has no result yet, and show all finished results. Return False after Ctrl-C."""
    from outpace.bench import report
    from outpace.bench.run import Bench
    from outpace.bench.store import Store

    facts = report.about(llm, options.inflate, shlex.join(["outpace", *sys.argv[1:]]), device)
    store = Store(results.out, options.settings(llm))
    with Bench(llm, options, store, lambda text: display.say(text, "yellow")) as running:
        is_complete = _run(running, runs_tests)
        failed = _show(running, facts, results)
        if is_complete and (reason := running.failure) is not None:
            failed.append(UserError(f"no answer was finished, the first one failed with {reason}"))
        raise_last(failed)
    return is_complete


def _run(running: Any, runs_tests: bool) -> bool:
    """Measure, then score, with a progress bar, or a line a minute without a terminal. Return False after Ctrl-C."""
    from outpace.bench.judging import judge

    console = display.stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("warming up", total=None)
        said = time.monotonic()

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                display.say(f"{done} of {total}, {what}")

        try:
            running.measure(show)
            judge(running, show, runs_tests)
        except KeyboardInterrupt:
            return False
    return True


def _show(running: Any, facts: dict[str, Any], results: ResultFlags) -> list[UserError]:
    """Show the table, and write the files and the line of JSON. Return errors of writing."""
    from outpace.bench import report
    from outpace.bench.judging import with_score_gaps
    from outpace.bench.plot import plot
    from outpace.bench.store import PLOT, ROWS

    found = with_score_gaps(running.rows(), running)
    plain = report.plain_rows(found, facts)
    _console().print(report.tables(found, facts))
    files = [file for file in (results.json, results.out and results.out / ROWS) if file is not None]
    failed = write_all(partial(report.write_json, file, plain) for file in files)
    if results.plot is not None and found:
        failed += write_all([partial(plot, found, facts, results.plot)])
    if results.out is not None and found:  # not requested, so that a missing matplotlib is no error
        for error in write_all([partial(plot, found, facts, results.out / PLOT)]):
            display.say(f"warning: {error}", "yellow")
    display.print_for_machines({"rows": plain, **facts})
    return failed


def _console() -> Console:
    console = display.stdout()
    console.width = max(console.width, MIN_WIDTH)
    return console


def _compare(one: Path, other: Path) -> None:
    from outpace.bench import compare

    first, second = compare.read(one), compare.read(other)
    found = compare.side_by_side(first, second)
    console = _console()
    console.print(compare.table(found))
    for line in (f"A: {one}", f"B: {other}", *compare.differences(first, second)):
        console.print(line, style=display.GREY)
    display.print_for_machines({"a": str(one), "b": str(other), "rows": found})


def _trace(llm: LLM, options: Any, file: Path) -> None:
    """Record the text of plain decoding and the draft's proposals at each position."""
    from outpace.bench.tasks import Conversations, check_turns, collect
    from outpace.simulate.trace import RecordOptions, record

    if llm.draft is None:
        raise UserError("--trace records a pair, name a draft with --draft")
    tasks = collect(options.tasks, options.prompts, options.turns)
    check_turns(tasks, llm.tokenizer)
    params = options.sampling_params
    conversations = Conversations(
        llm.tokenizer, lambda prompt: llm.generate(list(prompt), params, plain=True)[0].tokens
    )
    prompts: Sequence[Sequence[int]] = [conversations.prompt(one) for one in tasks]
    console = display.stderr()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("recording", total=len(prompts))
        settings = RecordOptions(params.max_tokens, sampling=params.sampling, seed=params.seed)
        trace = record(
            llm.target,
            llm.draft,
            prompts,
            settings,
            tasks=[one.task for one in tasks],
            progress=lambda done, total: progress.update(task, completed=done),
        )
    trace.save(file)
    found = {"trace": str(file), "answers": len(prompts), "tokens": trace.tokens}
    display.say(f"trace: {file}, {trace.tokens} tokens of {len(prompts)} answers")
    display.print_for_machines(found | {"acceptance": round(trace.acceptance(), 4)})
