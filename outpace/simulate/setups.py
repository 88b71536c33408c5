"""Lists what can be simulated: setups (all decoders, and CARD with each of its parts disabled), and times of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from outpace.core import registry
from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.core.theory import travel_time
from outpace.decoders.base import Decoder
from outpace.decoders.card import Card

PLAIN, EVERY, ALL = "autoregressive", "every", "all"
DEFAULT = "speculative,card,planned"
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # draft lengths to try for methods that have one
_MAX_NODES = 16384
_TITLES = {"card": "CARD", "planned": "planned"}
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # title and options by name, which begins with the method
    "planned": ("planned", {}),
    "planned-no-wait": ("planned, never waits", {"deepest": 0}),
    "card": ("CARD", {}),
    "card-chain": ("CARD, verifies a chain", {"chain": True}),
    "card-no-b": ("CARD, without B", {"secondary": False}),
    "card-no-wait": ("CARD, never waits", {"just_in_time": 0}),
    "card-no-late": ("CARD, without late nodes", {"late": False}),
    "card-no-correction": ("CARD, without correction", {"correction": False}),
}
_PUBLISHED_WIDTH = 100  # the authors' K for a 1B that drafts for a 70B


@dataclass(frozen=True)
class SetupSizes:
    """The sizes of token trees.

    The target verifies `nodes` nodes per pass, the root included; the drafter expands `width` nodes (the paper's K) per
    forward, up to a tree of `tree_nodes`. CARD and its planned variant are also simulated with the widths `others`.
    """

    nodes: int = 32
    width: int = 16
    tree_nodes: int = 2048
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_whole("nodes", self.nodes, 1, 4096)
        for width in (self.width, *self.others):
            check_whole("width", width, 1, 512)
        check_whole("tree_nodes", self.tree_nodes, 2, _MAX_NODES)


@dataclass(frozen=True)
class Setup:
    """A row of the table: a decoder `method` with options, which are the decoder's and the drafter's.

    The best of the draft `lengths` is used for each ratio. `ranks` is the number of draft tokens per node (None: all).
    """

    name: str
    title: str
    method: str
    nodes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    ranks: int | None = None
    drafter: str = "model"

    @property
    def decoder(self) -> type[Decoder]:
        found: type[Decoder] = registry.find("decoders", self.method)
        return found


def setups(sizes: SetupSizes) -> list[Setup]:
    """Return all setups, plain decoding first and CARD's last."""
    tree = {"width": sizes.width, "tree_nodes": sizes.tree_nodes}
    chain = {"width": 1, "tree_nodes": max(LENGTHS) + 2, "floor": 0.0}
    n = sizes.nodes
    found = [
        Setup(PLAIN, "plain", PLAIN, 1),
        Setup("speculative-chain", "sequential, chain", "speculative", max(LENGTHS) + 1, chain, LENGTHS),
        Setup("speculative-tree", f"sequential, {n}-node tree", "speculative", n, tree, LENGTHS),
    ]
    for name in registry.names("decoders"):
        if name not in (PLAIN, "speculative", *_TITLES):
            has_length = "draft_length" in {one.name for one in fields(registry.find("decoders", name).Options)}
            found.append(Setup(name, name, name, n, tree, LENGTHS if has_length else ()))
    for name, (title, options) in _PARTS.items():
        found.append(Setup(name, title, name.partition("-")[0], n, tree | options))
    for width in dict.fromkeys((_PUBLISHED_WIDTH, sizes.width, *sizes.others)):
        suffix = "" if width == _PUBLISHED_WIDTH else f"-k{width}"
        defaults = Card.drafter_defaults(Card.Options(as_published=True), {"width": width})
        published = defaults | {"as_published": True, "width": width}
        found.append(Setup(f"card-published{suffix}", f"CARD as published, K={width}, r=7", "card", n, published))
    for method in ("auto", *_TITLES):
        title = f"{_TITLES.get(method, method)}, n-grams too"
        found.append(Setup(f"{method}-ngram", title, method, n, tree, drafter="model+ngram"))
    for method, title in _TITLES.items():
        for width in sizes.others:
            found.append(Setup(f"{method}-k{width}", f"{title}, {width} wide", method, n, tree | {"width": width}))
    return found


def select_setups(sizes: SetupSizes, names: Sequence[str]) -> list[Setup]:
    """Select setups by their names or their decoder's; plain decoding is always included.

    "all" selects every setup, "every" each method, without the setups that disable a part of it.
    """
    every = setups(sizes)
    if ALL in names:
        return every
    if EVERY in names:
        usual = {f"{method}-k{width}" for method in _TITLES for width in sizes.others}
        return [one for one in every if one.name == one.method or one.method == "speculative" or one.name in usual]
    known = {setup.name for setup in every}
    allowed = known | {setup.method for setup in every}
    for name in names:
        if name not in allowed:
            raise unknown("method", name, (EVERY, ALL, *allowed))
    by_method = {name for name in names if name not in known}
    return [one for one in every if one.name in names or one.method == PLAIN or one.method in by_method]


Cost = Callable[[int], float]
"""Returns the time of a pass, in seconds or any other unit, from its number of rows."""


@dataclass(frozen=True)
class PassCosts:
    """The times of target and draft passes by rows, in one unit; `name` is for tables."""

    name: str
    target: Cost
    draft: Cost

    @property
    def ratio(self) -> float:
        """Time of a target pass of one row over that of a draft pass of one row."""
        return self.target(1) / self.draft(1)


def by_ratio(ratio: float) -> PassCosts:
    """Return costs where a target pass takes `ratio` draft forwards, whatever the rows, as on a memory-bound GPU."""
    check_range("ratio", ratio, 1e-6, 1e6)
    return PassCosts(f"{ratio:g}", lambda rows: ratio, lambda rows: 1.0)


def measured(target: str, draft: str) -> PassCosts:
    """Parse measured times of rows, as in `1:6.0,4:6.2,8:7.0`."""
    costs = PassCosts("measured", parse_curve("target-times", target), parse_curve("draft-times", draft))
    return PassCosts(f"{costs.ratio:.3g} measured", costs.target, costs.draft)


def in_pipeline(costs: PassCosts, stages: int, hop: float) -> PassCosts:
    """Add the travel time of a pipeline to each target pass; `hop`: in plain target passes."""
    travel = travel_time(stages, hop) * costs.target(1)
    return replace(costs, target=lambda rows: costs.target(rows) + travel) if travel else costs


def parse_curve(name: str, text: str) -> Cost:
    """Parse points and interpolate linearly; the first value holds before them, the last slope after them."""
    points: dict[int, float] = {}
    for part in text.split(","):
        rows, _, time = part.partition(":")
        try:
            points[int(rows)] = float(time)
        except ValueError:
            raise UserError(f"{name} has {part!r}, it must be rows and their time such as 1:6.0,4:6.2,8:7.0") from None
        check_range(f"rows of {name}", int(rows), 1)
        check_range(f"a time of {name}", points[int(rows)], 1e-12, 1e12)
    known, times = zip(*sorted(points.items()), strict=True)
    slope = (times[-1] - times[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0

    def cost(rows: int) -> float:
        return float(np.interp(rows, known, times)) + max(slope, 0.0) * max(rows - known[-1], 0)

    return cost
