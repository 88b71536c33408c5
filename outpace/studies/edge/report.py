"""Table, sentences and rows for a comparison of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

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
