"""Speed against quality: a panel with a point for every contender, hollow where it is lossy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.contenders import PLAIN, is_lossy, parse_methods
from outpace.bench.figures import TableRow

INK = "#333333"
PANEL = (340.0, 270.0)  # of the axes, typographic points
Box = tuple[tuple[float, float], tuple[float, float]]
TITLES = {
    "perplexity": "speed and perplexity of the text (hollow: lossy; line: plain decoding)",
    "accuracy": "speed and right answers (hollow: lossy; line: plain decoding)",
}


def worth(found: Sequence[TableRow]) -> list[str]:
    """What is known of the quality of these rows; nothing is drawn where all are lossless, or all are wrong."""
    if not any(_is_lossy(row) for row in found):
        return []
    return [name for name in TITLES if sum(bool(getattr(row, name)) for row in found) > 1]


def quality(axes: Any, found: Sequence[TableRow], name: str, colors: Mapping[str, str]) -> str:
    """Draws the panel of one measure; its title."""
    rows = [row for row in found if getattr(row, name) is not None and row.speedup is not None]
    points = [(row.speedup or 0.0, getattr(row, name)) for row in rows]
    for row, (across, up) in zip(rows, points, strict=True):
        color = colors[row.label]
        face = "none" if _is_lossy(row) else color
        axes.plot(across, up, marker="o", markersize=7, markerfacecolor=face, markeredgecolor=color)
        if row.label == PLAIN:
            axes.axhline(up, color=INK, linewidth=0.8, linestyle=":")
    axes.margins(0.2, 0.12)
    box = (axes.get_xlim(), axes.get_ylim())
    for row, point, (dx, dy) in zip(rows, points, places(points, [short(row.label) for row in rows], box), strict=True):
        side = "center" if dx == 0 else "left" if dx > 0 else "right"
        style = {"fontsize": 7, "color": INK, "ha": side, "va": "center"}
        axes.annotate(short(row.label), point, (dx, dy), textcoords="offset points", **style)
    axes.set_xlabel("speedup over plain decoding", color=INK)
    axes.set_ylabel("perplexity" if name == "perplexity" else "share of right answers", color=INK)
    return TITLES[name]


def places(points: Sequence[tuple[float, float]], names: Sequence[str], box: Box) -> list[tuple[float, float]]:
    """Where each name stands beside its point, in typographic points: where it covers least of what is there."""
    spans = [high - low or 1.0 for low, high in box]
    at = [tuple(PANEL[way] * (point[way] - box[way][0]) / spans[way] for way in (0, 1)) for point in points]
    taken = [(x - 4.0, y - 4.0, x + 4.0, y + 4.0) for x, y in at]
    found = []
    for (x, y), name in zip(at, names, strict=True):
        ways = [(side, up) for up in (0.0, 9.0, -9.0, 18.0, -18.0) for side in (7.0, -7.0, 0.0) if side or up]
        best = min(ways, key=lambda way: sum(_overlap(_label(x, y, way, name), other) for other in taken))
        taken.append(_label(x, y, best, name))
        found.append(best)
    return found


def _label(x: float, y: float, way: tuple[float, float], name: str) -> tuple[float, float, float, float]:
    """The rectangle of a name: left, bottom, right, top."""
    width, left = 3.7 * len(name), x + way[0]
    left -= width if way[0] < 0 else width / 2 if way[0] == 0 else 0.0
    return left, y + way[1] - 4.0, left + width, y + way[1] + 4.0


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    across, up = (min(one[k + 2], other[k + 2]) - max(one[k], other[k]) for k in (0, 1))
    return max(across, 0.0) * max(up, 0.0)


def short(label: str) -> str:
    """The rule where a label names one, else the label."""
    return label.partition("rule=")[2] or label


def _is_lossy(row: TableRow) -> bool:
    return not row.is_peer and is_lossy(parse_methods(row.label, {})[-1])
