"""`outpace bench`: compare methods and other engines on the same prompts."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from outpace.cli import display
from outpace.cli.flags import check_file, check_folder, check_plot, flag, flags, numbers
from outpace.cli.options import JSON, BasicSamplingFlags, ModelFlags
from outpace.cli.process import INTERRUPTED, sigterm_as_interrupt
from outpace.core.errors import UserError, without_keys
from outpace.engine.options import BuildOptions

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.bench.run import Bench, BenchOptions


@dataclass(frozen=True)
class BenchFlags:
    """The methods, the prompts, and the number of repetitions."""

    panel: ClassVar[str] = "What is measured"
    tasks: str = flag(
        "builtin",
        "Prompts, joined by commas: .jsonl files (a JSON object with turns in each line), builtin, repetition,"
        " summaries, answers, hub:NAME, or gsm8k, humaneval, mgsm, mt_bench from the hub.",
    )
    methods: str | None = flag(
        None,
        "Methods, joined by commas, each with options of its own if needed, as in"
        " card:drafter=model+ngram,nodes=8,speculative. Plain decoding is always measured. The default is"
        " auto,card,speculative; with --rules it is speculative.",
    )
    rules: str = flag(
        "",
        "Rules, joined by commas, each with options of its own if needed, as in block,lenience:lenience=0.4; each"
        " method is measured with each rule. If all rules are lossy, a lossless one is added. A rule that does not work"
        " at this temperature is measured at 1 or 0. all: those that fit a method and the temperature.",
    )
    peers: str = flag("", "Other engines, joined by commas, as in llama_cpp,transformers; or all.")
    prompts: int = flag(10, "Number of prompts taken from the start of each task.")
    turns: int = flag(
        1,
        "Number of turns taken of each conversation, such as MT-bench's, with plain decoding's answers between"
        " them. Each later turn is a task of its own.",
    )
    rounds: int = flag(1, "Number of repetitions of all measurements.")
    batch: str = flag("1", "Numbers of concurrent requests, as in 1,2,8,16; not for peers.")
    memory: bool = flag(False, "Also load each method in a process of its own and report its peak memory.")
    run_tests: bool = flag(
        False, "Score programs that the models write by running their tests, each in a sandbox (needs bubblewrap)."
    )


@dataclass(frozen=True)
class ResultFlags:
    """The files of the results."""

    panel: ClassVar[str] = "What is kept"
    out: Path | None = flag(
        None, "Folder for the results (rows.json, bench.png), written as they come; run again to continue."
    )
    as_json: bool = JSON
    wide: bool = flag(False, "Show each task, all columns and the machine, in 120 columns.")
    plot: Path | None = flag(None, "File for a plot: .png, .svg or .pdf.")
    trace: Path | None = flag(
        None, "File for a trace of the draft's proposals, for outpace simulate; nothing is measured."
    )


METHODS = "auto,card,speculative"
LINE_SECONDS = 60.0  # between two progress lines without a terminal
WIDE = 120  # columns of the table of --wide; a narrower terminal wraps it


@flags
def bench(
    model: ModelFlags,
    measured: BenchFlags,
    sampling: BasicSamplingFlags,
    results: ResultFlags,
) -> None:
    """Measure methods and other engines on the same prompts, and compare their texts."""
    check_file("--trace", results.trace)
    check_folder("--out", results.out)
    check_plot("--plot", results.plot)
    options = _options(model, measured, sampling)
    loading = replace(model, build=replace(model.build, nodes=None, rule="auto", worker=None, draft_threads=None))
    with sigterm_as_interrupt(), loading.open({"profile": False}) as llm:
        if results.trace is not None:
            _trace(llm, options, results.trace, results.as_json)
        elif not _measure(llm, options, results, model.options.device, measured):
            raise typer.Exit(INTERRUPTED)


def _options(model: ModelFlags, measured: BenchFlags, sampling: BasicSamplingFlags) -> BenchOptions:
    """Convert the flags to BenchOptions, and check names before a model is loaded."""
    from outpace.api.params import SamplingParams
    from outpace.api.scoring import check_sandbox
    from outpace.bench import contenders
    from outpace.bench.run import BenchOptions, check_batches
    from outpace.bench.tasks import collect

    build = model.build
    if build.method != "auto":
        raise UserError(f"--method is {build.method!r}, a bench takes several: write --methods {build.method}")
    if build.is_on_ray:
        raise UserError(f"--worker is {build.worker!r}, a bench takes the address of a draft worker: grpc://HOST:PORT")
    if measured.run_tests:
        check_sandbox()
    params = SamplingParams(**asdict(sampling))
    given = {name: getattr(build, name) for name in ("drafter", "rule", "worker", "draft_threads", "nodes")}
    common = {name: value for name, value in given.items() if value != getattr(BuildOptions, name)}
    methods = contenders.parse_methods(measured.methods or ("speculative" if measured.rules else METHODS), common)
    if measured.rules:
        methods = contenders.with_rules(methods, measured.rules, params.sampling)
    peers = ",".join(contenders.peer_names()) if measured.peers == "all" else measured.peers
    says = f"--batch is {measured.batch!r}, it must be whole numbers joined by commas, as in 1,2,8"
    options = BenchOptions(
        tasks=tuple(part.strip() for part in measured.tasks.split(",") if part.strip()),
        methods=tuple(methods),
        peers=tuple(contenders.parse_peers(peers)),
        prompts=measured.prompts,
        turns=measured.turns,
        rounds=measured.rounds,
        batch=tuple(numbers(measured.batch, int, says)),
        target=model.target,
        sampling_params=params,
    )
    check_batches(options, collect(options.tasks, options.prompts, options.turns))
    return options


def _measure(llm: LLM, options: BenchOptions, results: ResultFlags, device: str, measured: BenchFlags) -> bool:
    """Run what has no result yet, and show all finished results. Return False after Ctrl-C."""
    from outpace.bench import report
    from outpace.bench.run import Bench
    from outpace.bench.store import Store

    facts = report.about(llm, without_keys(shlex.join(["outpace", *sys.argv[1:]])), device)
    store = Store(results.out, options.settings(llm))
    with Bench(llm, options, store, lambda text: display.say(text, "yellow")) as running:
        is_complete = _run(running, measured, facts)
        if not is_complete:
            kept = f"; the same command continues from {results.out}" if results.out else ""
            display.say(f"stopped after {len(store.records)} answers{kept}", "yellow")
        _show(running, facts, results)
        if is_complete and (reason := running.failure) is not None:
            raise UserError(f"no answer was finished, the first one failed with {reason}")
    return is_complete


def _run(running: Bench, measured: BenchFlags, facts: dict[str, Any]) -> bool:
    """Measure, then score, below the rows so far and a progress bar, or a line a minute without a terminal. Return
    False after Ctrl-C."""
    from outpace.bench import report
    from outpace.bench.quality import score_quality

    console = display.stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    task = progress.add_task("warming up", total=None)
    said = time.monotonic()
    with Live(progress, console=console, transient=True) if console.is_terminal else nullcontext() as live:

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            progress.update(task, description=what, completed=done, total=total)
            if live is not None and running.store.records:
                live.update(Group(report.tables(running.rows(), facts), progress))
            if not console.is_terminal and time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                display.say(f"{done} of {total}, {what}")

        try:
            running.measure(show)
            score_quality(running, show, measured.run_tests)
            if measured.memory:
                running.measure_memory(show)
        except KeyboardInterrupt:
            return False
    return True


def _show(running: Bench, facts: dict[str, Any], results: ResultFlags) -> None:
    """Show the table or the line of JSON, then write the files."""
    from outpace.bench import report
    from outpace.bench.plot import plot
    from outpace.bench.quality import with_score_gaps
    from outpace.bench.store import PLOT, ROWS
    from outpace.models.files.reading import write_json

    found = with_score_gaps(running.rows(), running)
    plain = report.plain_rows(found, facts)
    if results.as_json:
        display.print_json({"rows": plain, **facts})
    else:
        console = display.stdout()
        console.width = max(console.width, WIDE) if results.wide else console.width
        console.print(report.tables(found, facts, results.wide))
    if results.out is not None:
        write_json(results.out / ROWS, plain)
    if results.plot is not None and found:
        plot(found, facts, results.plot)
        display.say(f"plot: {results.plot}")
    if results.out is not None and found:
        try:
            plot(found, facts, results.out / PLOT)
        except UserError as error:  # not requested, so that a missing matplotlib is no error
            display.say(f"warning: {error}", "yellow")


def _trace(llm: LLM, options: BenchOptions, file: Path, as_json: bool) -> None:
    """Record the text of plain decoding and the draft's proposals at each position."""
    from outpace.bench.tasks import check_turns, collect, encode_all
    from outpace.simulate.trace import RecordOptions, record

    if llm.draft is None:
        raise UserError("--trace records a pair, name a draft with --draft")
    tasks = collect(options.tasks, options.prompts, options.turns)
    check_turns(tasks, llm.tokenizer)
    params = options.sampling_params

    def answer(prompt: Sequence[int]) -> Sequence[int]:
        return llm.generate(list(prompt), params, plain=True)[0].tokens

    prompts = encode_all(tasks, llm.tokenizer, answer)
    names = [one.task for one in tasks]
    settings = RecordOptions(params.max_tokens, sampling=params.sampling, seed=params.seed)
    with display.loading_bar(after=0.0) as bar:
        trace = record(
            *(llm.target, llm.draft, prompts, settings),
            tasks=names,
            progress=lambda done, total: bar("recording", done / total),
        )
    trace.save(file)
    found = {"trace": str(file), "answers": len(prompts), "tokens": trace.tokens}
    display.say(f"trace: {file}, {trace.tokens} tokens of {len(prompts)} answers")
    if as_json:
        display.print_json(found | {"acceptance": round(trace.acceptance(), 4)})
