"""Lists the setups that can be simulated: all decoders, and CARD with each of its parts disabled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outpace.core import registry
from outpace.core.errors import check_whole, unknown
from outpace.decoders.base import Decoder

PLAIN, EVERY, ALL = "autoregressive", "every", "all"
DEFAULT = "speculative,card,planned"
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # draft lengths to try for methods that have one
_MOST_NODES = 16384
_TITLES = {"card": "CARD", "planned": "planned"}
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # title and options by name, which begins with the method
    "planned": ("planned", {}),
    "planned-no-wait": ("planned, never waits", {"deepest": 0}),
    "card": ("CARD", {}),
    "card-chain": ("CARD, verifies a chain", {"chain": True}),
    "card-no-b": ("CARD, without B", {"secondary": False}),
    "card-no-wait": ("CARD, never waits", {"just_in_time": 0}),
    "card-no-late": ("CARD, without late nodes", {"late": False}),
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
        check_whole("tree_nodes", self.tree_nodes, 2, _MOST_NODES)


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
        published = {"as_published": True, "width": width, "tree_nodes": 1 << 16}
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
