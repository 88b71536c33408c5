"""`outpace edge`: which device should draft for which server, with which shares, and whether drafting pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.table import Table

from outpace.cli import display, process
from outpace.cli.flags import check_plot, flag, flags, flags_of
from outpace.cli.options import JSON
from outpace.core.errors import UserError, check_whole
from outpace.core.options import help_of
from outpace.studies.edge.settings import EdgeSettings, read_acceptance


@dataclass(frozen=True)
class NetworkFlags:
    """The network that is simulated."""

    panel: ClassVar[str] = "Network"
    settings: EdgeSettings = flags_of(EdgeSettings, *help_of(EdgeSettings))
    draft_length: str = flag("8", "Draft length of all devices; auto: each device's best, 0 if drafting does not pay.")

    def with_rates(self, acceptance: tuple[float, ...]) -> EdgeSettings:
        """Return the settings with the draft length and these acceptance rates."""
        try:
            length = None if self.draft_length == "auto" else int(self.draft_length)
        except ValueError:
            raise UserError(f"draft-length is {self.draft_length!r}, it must be a whole number or auto") from None
        return replace(self.settings, draft_length=length, acceptance=acceptance)


@dataclass(frozen=True)
class LinkFlags:
    """One device and one server, instead of a network; times in ms."""

    panel: ClassVar[str] = "One link"
    device_step: float | None = flag(None, "Time of a draft step on the device, in ms.")
    server_pass: float | None = flag(None, "Time of a target pass on the server, in ms.")
    rtt: float = flag(0.0, "Round trip between device and server, in ms.")
    device_pass: float | None = flag(None, "Time of a target pass on the device, in ms, if it can hold the target.")


@dataclass(frozen=True)
class StudyFlags:
    """The policies to compare, and over which worlds and settings."""

    panel: ClassVar[str] = "Study"
    policies: str = flag(
        "", "Policies to compare: associations and shares, as in greedy/equal,move/optimal. The default is most."
    )
    worlds: int = flag(10, "Number of random worlds over which figures are averaged.")
    seed: int = flag(0, "Seed of the first world.")
    sweep: str = flag("", "Settings to vary, name=first:last:step, as in devices=30:180:30,servers=4:20:4.")
    plot: Path | None = flag(None, "Write a plot to this file.")


@flags
def edge(
    network: NetworkFlags,
    link: LinkFlags,
    study: StudyFlags,
    acceptance: str = flag(
        "",
        "Acceptance rate of drafted tokens: one, or one for each position with commas between them, or a judgement.json"
        " of outpace distill. The default is the shipped pair's.",
    ),
    as_json: bool = JSON,
) -> None:
    """Show which devices should draft for which servers, and whether drafting on a device pays."""
    rates = read_acceptance(acceptance)
    check_whole("seed", study.seed, 0, 2**31)
    check_plot("--plot", study.plot)
    if link == LinkFlags():
        _show_network(network.with_rates(rates), study, as_json)
    elif study.sweep or study.plot:
        raise UserError(
            "one link has no sweep and no plot: leave those out, or the options of the link (rtt, device-step,"
            " device-pass, server-pass)"
        )
    else:
        _show_link(link, rates, as_json)


def _show_link(given: LinkFlags, rates: tuple[float, ...], as_json: bool) -> None:
    from outpace.studies.edge.link import OneLink, advice, choices

    if given.device_step is None or given.server_pass is None:
        raise UserError("rtt and device-pass need device-step and server-pass, which go together: name both")
    link = OneLink(given.device_step, given.server_pass, given.rtt, rates, given.device_pass)
    if as_json:
        display.print_json({"choices": [one._asdict() for one in choices(link)], "advice": advice(link)})
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("configuration", "ms per token", "draft length", ""):
        table.add_column(name, justify="right" if name in ("ms per token", "draft length") else "left")
    for one in choices(link):
        table.add_row(one.name, f"{one.time:.2f}", "-" if one.length is None else str(one.length), one.note)
    display.stdout().print(table)
    display.print_sentence(advice(link))


def _show_network(settings: EdgeSettings, study: StudyFlags, as_json: bool) -> None:
    from outpace.studies.edge import report, run

    names = [name.strip() for name in study.policies.split(",")] if study.policies else run.DEFAULT
    policies = [run.find_policy(name) for name in dict.fromkeys(names)]
    points: list[dict[str, float]] = run.parse_sweep(study.sweep) if study.sweep else [{}]
    for point in points:  # a wrong one is an error before the work
        replace(settings, **point)  # type: ignore[arg-type]
    with display.saying_what_is_kept(None), display.loading_bar() as bar, process.at_any_point():
        found = [*run.sweep(settings, points, policies, study.worlds, study.seed, partial(bar, "worlds"))]
    if as_json:
        display.print_json({"rows": report.as_rows(found), "advice": report.sentences(found[0][1])})
    else:
        display.stdout().print(report.table(found))
        for sentence in report.sentences(found[0][1]) if len(found) == 1 else []:
            display.print_sentence(sentence)
    if study.plot is not None:
        sizes = [f"{getattr(settings, name)} {name}" for name in ("devices", "servers") if name not in points[0]]
        report.plot(found, ", ".join([*sizes, f"{study.worlds} worlds"]), study.plot)
        display.say(f"plot: {study.plot}")
