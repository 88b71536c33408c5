"""Table, sentences, rows and plots of a comparison of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from outpace.api.plot import figure_for
from outpace.studies.edge.run import ALONE_POLICY, BASELINE, BOUNDS, SERVER_ALONE, PolicySummary

COLUMNS = ("policy", "ms per token", "p95", "mJ", "cut, %")
Point = Mapping[str, float]


def table(found: Sequence[tuple[Point, Sequence[PolicySummary]]]) -> Table:
    """Return a table of all policies at all points of the sweep; the best policy of each point is bold."""
    names = list(found[0][0])
    made = Table(box=None, padding=(0, 1 if names else 2, 0, 0))
    for name in [*names, *COLUMNS]:
        made.add_column(name.replace("_", " "), justify="left" if name == "policy" else "right", no_wrap=True)
    for point, summaries in found:
        best = best_policy(summaries)
        for one in summaries:
            cells = [f"{one.time:.1f} ± {one.time_error:.1f}", f"{one.slowest:.1f}", f"{one.energy:.0f}", _cut(one)]
            made.add_row(
                *(f"{point[name]:g}" for name in names), one.policy, *cells, style="bold" if one is best else ""
            )
    return made


def _cut(one: PolicySummary) -> str:
    return "-" if one.cut is None else f"{100 * one.cut:.1f} ± {100 * one.cut_error:.1f}"


def best_policy(summaries: Sequence[PolicySummary]) -> PolicySummary | None:
    """Return the policy with the lowest objective, the first of equal ones; None if there are only bounds."""
    return min((one for one in summaries if one.policy not in BOUNDS), key=lambda one: round(one.cost, 6), default=None)


def sentences(summaries: Sequence[PolicySummary]) -> list[str]:
    """Say which policy to use, whether drafting pays, and how many devices would be faster alone or have no server."""
    by_name, best = {one.policy: one for one in summaries}, best_policy(summaries)
    if best is None:
        return []
    if best.out_of_reach == 1.0:
        return ["no device has a server in reach: all write alone"]
    said = [f"use {best.policy}: {best.time:.1f} ms per token, objective {_percent(best.cut)} below {BASELINE}"]
    plain = by_name.get(SERVER_ALONE)
    if plain is not None:
        pays = "drafting on the devices pays" if best.time < plain.time else "drafting on the devices does not pay"
        said.append(f"{pays}: {best.time:.1f} ms per token with drafts, {plain.time:.1f} from the servers alone")
    if best.faster_alone and ALONE_POLICY in by_name:
        share = _percent(best.faster_alone)
        said.append(f"{share} of the devices would be faster alone, if both models fit into their memory")
    if best.out_of_reach:
        said.append(f"{_percent(best.out_of_reach)} of the devices have no server in reach and write alone")
    return said


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.1f} %"


def as_rows(found: Sequence[tuple[Point, Sequence[PolicySummary]]]) -> list[dict[str, Any]]:
    """Return the rows of the table for JSON."""
    return [{**point, **asdict(one)} for point, summaries in found for one in summaries]


Found = Sequence[tuple[Mapping[str, float], Sequence[PolicySummary]]]
MAX_PANELS = 6


def plot(found: Found, title: str, file: Path) -> None:
    """Draw bars by policy, curves over a sweep, or, if only the weight of energy is swept, curves by battery level."""
    names = list(found[0][0])
    if not names:
        with figure_for(file, 8, 0.32 * len(found[0][1]) + 1.4, title) as figure:
            _draw_bars(figure.subplots(), found[0][1])
    elif names == ["energy_weight"]:
        with figure_for(file, 9, 3.6, title) as figure:
            _draw_batteries(figure.subplots(1, 2), found)
    else:
        panels = sorted({point[names[1]] for point, _ in found})[:MAX_PANELS] if len(names) > 1 else [None]
        with figure_for(file, 3.2 * len(panels) + 2.4, 3.8, title) as figure:
            for axes, value in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
                chosen = [(p, rows) for p, rows in found if value is None or p[names[1]] == value]
                _draw_sweep(axes, chosen, names[0])
                axes.set_title("" if value is None else f"{names[1].replace('_', ' ')} {value:g}")
            figure.axes[0].set_ylabel("ms per token, mean and 95 % interval")
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")


def _draw_bars(axes: Any, rows: Sequence[PolicySummary]) -> None:
    names = [row.policy for row in rows]
    axes.barh(names, [row.time for row in rows], xerr=[row.time_error for row in rows], color="#4c6a92")
    axes.plot([row.slowest for row in rows], names, "|", color="#b5566b", markersize=10, label="95th percentile")
    axes.invert_yaxis()
    axes.set_xlabel("ms per token")
    axes.legend()


def _draw_sweep(axes: Any, found: Found, name: str) -> None:
    """Draw a curve for each policy: associations differ by colour and marker, shares by line style."""
    from matplotlib.ticker import LogLocator, NullLocator

    policies = [row.policy for row in found[0][1]]
    associations = list(dict.fromkeys(policy.partition("/")[0] for policy in policies))
    for policy in policies:
        rows = [next(row for row in rows if row.policy == policy) for _, rows in found]
        association, _, shares = policy.partition("/")
        number = associations.index(association)
        axes.errorbar(
            [point[name] for point, _ in found],
            [row.time for row in rows],
            [row.time_error for row in rows],
            label=policy,
            marker="osd^v<>P"[number % 8],
            linestyle="--" if shares == "optimal" else "-",
            color=f"C{number % 10}",
        )
    axes.set(xlabel=name.replace("_", " "), yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_batteries(panels: Sequence[Any], found: Found) -> None:
    """Draw times and energies of the policy that is best at the first point of the sweep."""
    policy = (best_policy(found[0][1]) or found[0][1][0]).policy
    rows = [next(row for row in rows if row.policy == policy) for _, rows in found]
    weights = [point["energy_weight"] for point, _ in found]
    for number, (axes, label) in enumerate(zip(panels, ("ms per token", "mJ per token"), strict=True)):
        for field, name in (("high_battery", "battery above 0.8"), ("low_battery", "battery below 0.2")):
            values = [getattr(row, field) for row in rows]
            axes.plot(weights, [None if one is None else one[number] for one in values], marker="o", label=name)
        axes.set(xlabel="weight of energy, ms per mJ", ylabel=label, ylim=(0, None), title=policy)
        axes.legend()
