"""Compares acceptance rules on questions with right answers: a table of a bench's results, with intervals, and a plot.

For each rule: the share of right answers, tokens per target pass, and tokens/s divided by those of greedy speculation,
with 95 % intervals by bootstrap over the questions. The arguments are folders of `outpace bench --out`, one per task,
with rule greedy among the rules; docs/benchmarks-rules.md has the command. Lenience l at temperature 0 accepts tokens
with p > (1 - l) max p (Leviathan et al., arXiv:2211.17192, appendix A.5), as rule top_beta does with beta 256 and tau
-log(1 - l).

    python bench/judge_table.py bench-sums bench-places --plot judge.png
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parse, run
from common import show as show_table

from outpace import UserError
from outpace.bench.contenders import parse_options
from outpace.bench.store import Record, read_records

RESAMPLES = 2000
SHARE = 0.95
COLORS = {"judge": "C0", "other task's judge": "C1", "top_beta": "C2", "lenience": "C4", "typical": "C5"}
NEUTRAL = "k"  # plain decoding, greedy, gumbel
MANY = 256  # top_beta with this `beta` accepts what is within `tau` of the best: lenience at temperature 0


class Measured:
    """What a bench measured of one method: arrays with one value for each question."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.right = np.array([bool(record.correct) for record in records], float)
        self.tokens = np.array([sum(record.counts) for record in records], float)
        self.passes = np.array([len(record.counts) for record in records], float)
        self.decoded = np.array([record.decoded for record in records], float)
        self.seconds = np.array([record.decode_seconds for record in records], float)
        self.relaxed = sum(record.relaxed or 0 for record in records) / self.tokens.sum()


def read(folder: Path) -> tuple[str, dict[str, Measured]]:
    """Read a folder; return its task, and the measurements by label of the method, for the questions that all methods
    answered. UserError if rule greedy is missing."""
    latest = {record.key: record for record in read_records(folder) if record.correct is not None}
    found: dict[str, dict[str, Record]] = {}
    for record in latest.values():
        found.setdefault(record.label, {})[record.prompt] = record
    shared = sorted(set.intersection(*map(set, found.values()))) if found else []
    if not shared or not any(rule_of(label)[0] == "greedy" for label in found):
        raise UserError(f"{folder} has no question that all methods answered, or no rule greedy")
    measured = {label: Measured([own[prompt] for prompt in shared]) for label, own in found.items()}
    return f"{next(iter(latest.values())).task}, {len(shared)} questions", measured


def rule_of(label: str) -> tuple[str, dict[str, str]]:
    """Return the rule of a label, and the rule's options with the temperature; plain decoding is its own rule."""
    [(_, name, options)] = parse_options("methods", label)
    names = list(options)
    return options.get("rule", name), {
        one: options[one] for one in names[names.index("rule") + 1 if "rule" in names else 0 :]
    }


def kind_of(label: str, own_judge: str | None) -> tuple[str, str]:
    """Return the kind of a rule and its setting, for a table."""
    rule, options = rule_of(label)
    judge = options.pop("judge", own_judge)
    kind = rule if judge == own_judge or rule != "judge" else "other task's judge"
    if options.get("beta") == str(MANY):
        return "lenience", f"lenience {1 - math.exp(-float(options['tau'])):.2g}"
    return kind, ", ".join(f"{name} {value}" for name, value in options.items())


def interval(one: np.ndarray, per: np.ndarray) -> tuple[float, float, float]:
    """Return the ratio of two sums over questions, and its interval over resampled questions: [questions] each."""
    drawn = _resampled(len(one))
    return _with_bounds(one.sum() / per.sum(), one[drawn].sum(1) / per[drawn].sum(1))


def speed_ratio(own: Measured, base: Measured) -> tuple[float, float, float]:
    """Return tokens/s over those of `base`, and its interval over resampled questions, the same ones for both."""
    drawn = _resampled(len(own.tokens))
    rates = [(each.decoded, each.seconds) for each in (own, base)]
    ratio, resampled = (
        np.divide(*(decoded.sum() / seconds.sum() for decoded, seconds in rates)),
        np.divide(*(decoded[drawn].sum(1) / seconds[drawn].sum(1) for decoded, seconds in rates)),
    )
    return _with_bounds(ratio, resampled)


def _resampled(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _with_bounds(value: float, resampled: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(resampled, (0.5 - SHARE / 2, 0.5 + SHARE / 2))
    return float(value), float(low), float(high)


def table_rows(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Return the row of each method, in the order of the bench."""
    greedy = next(label for label in measured if rule_of(label)[0] == "greedy")
    own_judge = next((rule_of(label)[1]["judge"] for label in measured if rule_of(label)[0] == "judge"), None)
    rows = []
    for label, found in measured.items():
        kind, setting = kind_of(label, own_judge)
        rows.append(
            {
                "rule": kind,
                "setting": setting,
                "right": interval(found.right, np.ones_like(found.right)),
                "tokens_per_pass": interval(found.tokens, found.passes),
                "speed": speed_ratio(found, measured[greedy]),
                "relaxed": float(found.relaxed),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    shown = []
    for row in rows:
        cells = {name: "{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in FIGURES}
        shown.append({"rule": row["rule"], "setting": row["setting"], **cells, "relaxed": f"{row['relaxed']:.0%}"})
    show_table(shown, width=140)


FIGURES = ("right", "tokens_per_pass", "speed")


def plot(named: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw the share of right answers over tokens per pass and over tokens/s, one row of panels per task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.2 * len(named)), layout="constrained")
    panels = figure.subplots(len(named), 2, squeeze=False)
    for row_of_panels, (task, rows) in zip(panels, named.items(), strict=True):
        lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            lines.setdefault((row["rule"], str(row["setting"]).partition("temperature ")[2]), []).append(row)
        for axes, measure, text in zip(
            row_of_panels, FIGURES[1:], ("tokens per target pass", "tokens/s over greedy speculation"), strict=True
        ):
            for (kind, temperature), own in lines.items():
                _draw(axes, kind, temperature, own, measure)
            axes.set_title(task, loc="left", fontsize=10)
            axes.set(xlabel=text, ylabel="share of right answers", ylim=(0, 1))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=120)


def _draw(axes: Any, kind: str, temperature: str, rows: list[dict[str, Any]], measure: str) -> None:
    """Draw the settings of one rule, joined in the order of their speed; hollow where it samples."""
    rows = sorted(rows, key=lambda row: float(row[measure][0]))
    x, y = (np.array([row[figure] for row in rows]) for figure in (measure, "right"))
    spans = [np.abs(points[:, 1:] - points[:, :1]).T for points in (x, y)]
    marker = {"autoregressive": "x", "greedy": "s", "gumbel": "s"}.get(kind, "o")
    style = {"marker": marker, "ls": "--" if temperature else "-", "lw": 1, "elinewidth": 0.4, "ms": 5}
    color = style["color"] = COLORS.get(kind, NEUTRAL)
    style |= {"mfc": "none" if temperature else color, "label": f"{kind}{f', T {temperature}' if temperature else ''}"}
    axes.errorbar(x[:, 0], y[:, 0], spans[1], spans[0], **style)


def main() -> int:
    """Run the command."""
    args = parse(__doc__, {"folders": [Path]}, plot=Path)
    named: dict[str, list[dict[str, Any]]] = {}
    for folder in args.folders:
        name, measured = read(folder)
        named[name] = table_rows(measured)
        print(name)
        show(named[name])
    if args.plot:
        plot(named, args.plot)
    return finish(named, False)


if __name__ == "__main__":
    run(main)
