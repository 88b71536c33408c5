"""The house's floors: imports go down only, heavy packages stay out of `import outpace`, sizes stay small."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from rooms import (
    COMMAND,
    FLOORS,
    METHODS,
    MODELS,
    PAGE,
    ROOT,
    SIDE_HOUSES,
    Edge,
    all_edges,
    edges_of,
    methods,
    module_files,
    renewed,
    room,
)

ALLOWED_IN_CORE = {"torch", "numpy", "triton"}  # triton comes with torch for CUDA; fused_noise.py alone imports it
HEAVY = ("torch", "transformers", "ray", "fastapi", "matplotlib", "huggingface_hub", "gguf")


def objection(edge: Edge) -> str | None:
    """What is wrong with an import, or None."""
    home = room(edge.source)
    if home not in FLOORS:
        return f"{home} stands on no floor: give it one in tests/rooms.py"
    top, _, target = edge.target.partition(".")
    if top != "outpace":
        foreign = home == "core" and top not in ALLOWED_IN_CORE | sys.stdlib_module_names
        return f"core may import torch, numpy, triton and the standard library, not {top}" if foreign else None
    goal = room(target) if room(target) in FLOORS else "api"  # else a name of the package itself
    here, there = FLOORS[home], FLOORS[goal]
    if goal == home:
        return inside_a_room(edge.source, target)
    if home in SIDE_HOUSES and goal in SIDE_HOUSES:
        return None if home == "cli" and edge.is_late else f"{home} imports {goal}: only cli may, inside a function"
    if there >= here:
        return f"{'an upward' if there > here else 'a sideways'} import: {home} (floor {here}) of {goal} ({there})"
    return None


def inside_a_room(source: str, target: str) -> str | None:
    """Methods of one package never import each other; the rooms inside `models` have an order of their own."""
    if room(source) != "models":
        return among_methods(source, target)
    one, other = (name.split(".")[1] if name.count(".") else "" for name in (source, target))
    if one not in MODELS or one == other or other not in MODELS:
        return None if one in MODELS or not one else f"models/{one} has no place in the order of models/"
    return None if MODELS[one] > MODELS[other] else f"models/{one} imports models/{other}, which stands above it"


def among_methods(source: str, target: str) -> str | None:
    """Methods of one package never import each other; `base` and underscored parts are shared."""
    home, _, name = source.partition(".")
    other = target.split(".")[1] if target.count(".") else ""
    is_shared = not other or other.startswith("_") or (home == "decoders" and other == "base")
    if home in ("drafters", "decoders") and name and not is_shared and other != name:
        return f"{home} never import each other: {name} imports {other}"
    return None


def test_imports_go_down_only() -> None:
    edges = list(all_edges())
    assert len(edges) > 100, "too few imports were read"
    found = [f"outpace/{e.source.replace('.', '/')}, line {e.line}: {objection(e)}" for e in edges if objection(e)]
    assert not found, "\n".join(["", *found])


def test_the_drawing_shows_the_rooms_as_they_are() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, f"docs/architecture.md is stale: {COMMAND}"


def test_the_page_of_methods_shows_them_as_they_are() -> None:
    assert methods() == METHODS.read_text(), f"docs/methods.md is stale: {COMMAND}"


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that import one another, straight or by way of others (Tarjan's components)."""
    goals: dict[str, set[str]] = {}
    for source, target in edges:
        goals.setdefault(source, set()).add(target)
        goals.setdefault(target, set())
    reached = {module: closure(module, goals) for module in goals}
    groups = {frozenset(other for other in reached[m] if m in reached[other]) for m in goals if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def closure(module: str, goals: dict[str, set[str]]) -> set[str]:
    """All that a module imports, straight or by way of others."""
    found: set[str] = set()
    left = [module]
    while left:
        new = goals[left.pop()] - found
        found |= new
        left += new
    return found


def inner_edges() -> Iterator[tuple[str, str]]:
    """Which module of the package imports which, late imports and those for types included."""
    modules = {name for name, _ in module_files()}
    for edge in all_edges():
        parts = edge.target.split(".")[1:]
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        target = next((name for name in names if name in modules), None)
        if edge.target.startswith("outpace.") and target is not None and target != edge.source:
            yield edge.source, target


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = circles(inner_edges())
    assert not found, "\n".join(["", *map(" <-> ".join, found)])


def test_a_circle_is_caught() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [["a", "b", "c"]]
    assert circles([("a", "b"), ("b", "c")]) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("core.tree", "from outpace.models.base import Part"),
        ("core.tree", "import rich"),
        ("core.tree", "from ..rules import base"),
        ("core.tree", "def f():\n    import outpace.engine.engine"),
        ("core.tree", "if TYPE_CHECKING:\n    from outpace.engine.engine import Engine"),
        ("models.toy", "from outpace.rules.base import follow"),
        ("rules.greedy", "from outpace.card.cache import CandidateCache"),
        ("candidates.loop", "from outpace import drafters"),
        ("drafters.model", "from outpace.decoders.base import Place"),
        ("drafters.model", "from outpace.drafters.ngram import Ngram"),
        ("drafters.model", "from . import ngram"),
        ("decoders.card", "from outpace.decoders.speculative import decode"),
        ("decoders.card", "from outpace.engine.engine import Engine"),
        ("engine.engine", "from outpace.api.llm import LLM"),
        ("engine.build", "from outpace import UserError"),
        ("api.llm", "from outpace.cli.main import main"),
        ("models.llama.rope", "from outpace.models.files.find import resolve"),
        ("models.files.find", "def f():\n    from outpace.models.load import load_model"),
        ("models.stray", "from outpace.models.base import Model"),
        ("server.app", "def f():\n    from outpace.bench.tasks import run"),
        ("cli.main", "from outpace.server.app import serve"),
        ("nowhere", "import torch"),
    ],
)
def test_a_bad_import_is_caught(source: str, text: str) -> None:
    assert [objection(edge) for edge in edges_of(source, text)] != [None] * len(list(edges_of(source, text)))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("core.tree", "import torch, heapq\nimport numpy as np\nfrom outpace.core.errors import UserError"),
        ("models.toy", "from outpace.models.base import Part\nfrom . import base"),
        ("drafters.model", "from outpace.drafters._chance import Rate\nfrom outpace.rules.base import best_rows"),
        ("decoders.card", "from outpace.decoders.base import Place\nfrom outpace.card.cache import Correction"),
        ("api.llm", "from outpace.engine.engine import Engine\nfrom outpace.core import registry"),
        ("cli.main", "def f():\n    from outpace.server.app import serve"),
        ("cli.main", "from outpace.api.load import load\nfrom outpace.cli import output"),
        ("__init__", "from outpace.api.load import load"),
    ],
)
def test_a_good_import_passes(source: str, text: str) -> None:
    assert [objection(edge) for edge in edges_of(source, text) if objection(edge)] == []


@pytest.mark.parametrize("module", ["outpace", "outpace.api.llm", "outpace.engine.engine"])
def test_import_pulls_in_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} loads {done.stdout}"


def functions() -> dict[str, int]:
    """Lines of every function, its decorators not counted."""
    sizes = {}
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes[f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    return sizes


def test_no_file_is_long() -> None:
    sizes = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in ROOT.rglob("*.py")}
    assert not {name: size for name, size in sizes.items() if size > 300}
    median = statistics.median(size for size in sizes.values() if size > 1)
    assert median <= 140, f"the median file has {median} lines"


def test_functions_are_short() -> None:
    sizes = functions()
    assert not {name: size for name, size in sizes.items() if size > 60}
    over = {name: size for name, size in sizes.items() if size > 25}
    longest = "\n".join(f"{size} {name}" for name, size in sorted(over.items(), key=lambda item: -item[1]))
    assert len(over) <= len(sizes) / 10, f"{len(over)} of {len(sizes)} functions have more than 25 lines:\n{longest}"
