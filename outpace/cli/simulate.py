"""`outpace simulate`: the speedup of every method at other cost ratios, from a recorded or an assumed pair."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Group
from rich.live import Live

from outpace.cli import display
from outpace.cli.flags import check_file, check_plot, flag, flags, numbers
from outpace.cli.options import JSON
from outpace.cli.theory import check_pipeline
from outpace.core.errors import UserError, check_range, check_whole

if TYPE_CHECKING:
    from outpace.simulate.trace import Trace


@dataclass(frozen=True)
class PairFlags:
    """The acceptance rate: that of a recorded trace, or an assumed one."""

    panel: ClassVar[str] = "Pair"
    trace: Path | None = flag(None, "A trace that outpace bench --trace recorded.")
    acceptance: float | None = flag(None, "Instead of a trace: the chance that a draft token is accepted.")
    answers: int | None = flag(None, "Use at most this many of the trace's answers.")
    tasks: str | None = flag(None, "Use the answers of these tasks only, as in gsm8k,mt_bench.")


@dataclass(frozen=True)
class TimeFlags:
    """The times of passes and draft steps, and the devices."""

    panel: ClassVar[str] = "Times"
    ratio: str = flag(
        "3.5,7,15",
        "Time of a target pass over that of a draft step, or several, joined by commas. More rows cost nothing.",
    )
    target_times: str | None = flag(
        None, "Instead of ratios: times of a target pass by number of rows, in any unit, as in 1:6.0,4:6.2,16:10."
    )
    draft_times: str | None = flag(None, "With --target-times: those of a draft step.")
    stages: int = flag(1, "Number of stages, if the target runs in a pipeline (--pp-plan).")
    hop: float = flag(0.0, "Time from each stage to the next, and from the last to the first, in plain target passes.")
    devices: int = flag(2, "2: the drafter has a device of its own; 1: both share one.")
    delay: str = flag(
        "0",
        "One-way delay between drafter and target, in target passes, for methods that draft in parallel. Several are"
        " compared, as in 0,0.5,1,2.",
    )


@dataclass(frozen=True)
class OutputFlags:
    """The output of the results."""

    panel: ClassVar[str] = "Output"
    as_json: bool = JSON
    out: Path | None = flag(None, "File for the rows of the table as JSON, written as they come.")
    wide: bool = flag(False, "Show a row for each ratio, with tokens a pass, rows a token, hit rate and idle times.")
    plot: Path | None = flag(None, "File for a plot of the speedup by ratio, or by delay: .png, .svg or .pdf.")


@flags
def simulate(
    pair: PairFlags,
    times: TimeFlags,
    output: OutputFlags,
    methods: str | None = flag(
        None,
        "Rows of the table to simulate, as in speculative,card,card-chain. The default is speculative,card,planned;"
        " every: each complete method; all: also variants without one of their parts.",
    ),
    nodes: int = flag(32, "Tree nodes verified in a pass, with the root."),
    width: str = flag("16", "Nodes that the drafter expands in a forward (K). More, as in 16,5,25, add rows for CARD."),
) -> None:
    """Simulate every method on two devices, from recorded outputs of two models, at given ratios of their times."""
    check_file("--out", output.out)
    check_pipeline(times.stages, times.hop)
    costs = _costs(times)
    says = f"delay is {times.delay!r}, it must be numbers such as 0,0.5,1,2"
    delays: list[float] = [*dict.fromkeys(numbers(times.delay, float, says))]
    for delay in delays:
        check_range("delay", delay, 0.0, 1000.0)
    check_plot("--plot", output.plot)
    from outpace.models.files.reading import write_json
    from outpace.simulate import report, run
    from outpace.simulate.setups import DEFAULT, SetupSizes, select_setups

    says = f"width is {width!r}, it must be whole numbers such as 16 or 16,5,25"
    first, *others = numbers(width, int, says)
    sizes = SetupSizes(nodes, first, others=tuple(others))
    rows = select_setups(sizes, [name.strip() for name in (methods or DEFAULT).split(",")])
    trace = _trace(pair)
    outcomes: list[Any] = []
    summary = report.about(trace, sizes, times.devices)
    title = f"{trace.draft} for {trace.target}: {summary['answers']} answers, {summary['tokens']} tokens"
    console = display.stderr()
    with Live(console=console, transient=True) if console.is_terminal else nullcontext() as live_table:

        def progress(what: str, done: int, total: int) -> None:
            if live_table is None:
                display.say(f"{done + 1} of {total}: {what}")
            else:
                live_table.update(Group(report.table(outcomes, title, output.wide), f"{done + 1} of {total}: {what}"))

        try:
            for outcome in run.simulate(trace, rows, costs, times.devices, progress, delays):
                outcomes.append(outcome)
                if output.out is not None:  # finished rows are kept if the rest is interrupted
                    with suppress(UserError):  # reported after the table
                        write_json(output.out, report.as_rows(outcomes))
        except KeyboardInterrupt:
            if live_table is not None:
                live_table.stop()
            if outcomes and not output.as_json:
                display.stdout().print(report.table(outcomes, title, output.wide))
            kept = f"; they are in {output.out}" if outcomes and output.out else ""
            display.say(f"stopped after {len(outcomes)} simulations{kept}", "yellow")
            raise
    if output.as_json:
        display.print_json({**summary, "rows": report.as_rows(outcomes)})
    else:
        display.stdout().print(report.table(outcomes, title, output.wide))
        display.print_sentence(report.conclusion(outcomes))
    if output.out is not None:
        write_json(output.out, report.as_rows(outcomes))
    if output.plot is not None:
        report.plot(outcomes, title, output.plot)
        display.say(f"plot: {output.plot}")


def _costs(times: TimeFlags) -> list[Any]:
    from outpace.simulate.setups import by_ratio, in_pipeline, measured

    if times.target_times is None and times.draft_times is None:
        says = f"ratio is {times.ratio!r}, it must be numbers such as 3.5,7,15"
        found = [by_ratio(ratio) for ratio in numbers(times.ratio, float, says)]
    elif times.target_times is None or times.draft_times is None:
        raise UserError("target-times and draft-times go together, name both or neither")
    else:
        found = [measured(times.target_times, times.draft_times)]
    return [in_pipeline(cost, times.stages, times.hop) for cost in found]


def _trace(pair: PairFlags) -> Trace:
    from outpace.simulate.trace import limit_trace, load, synthetic_trace

    if pair.answers is not None:
        check_whole("answers", pair.answers, 1)
    if (pair.trace is None) == (pair.acceptance is None):
        raise UserError("give either --trace FILE, a recorded pair, or --acceptance 0.7, and not both")
    if pair.trace is not None:
        tasks = [name.strip() for name in pair.tasks.split(",")] if pair.tasks else []
        return limit_trace(load(pair.trace), pair.answers, tasks)
    if pair.tasks is not None:
        raise UserError("--tasks selects answers of a trace, an assumed acceptance has none")
    return synthetic_trace(pair.acceptance or 0.0, pair.answers or 8)
