"""The house's floors: imports go down only, heavy packages stay out of `import outpace`, sizes stay small."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "outpace"
FLOORS = {"core": 0, "models": 1, "rules": 1, "candidates": 1, "drafters": 2, "decoders": 3}
TOP = {"running": 4.0, "memory": 4.05, "drafting": 4.05, "engine": 4.1, "assemble": 4.2, "turns": 4.0, "asking": 4.0}
TOP |= {
    "machine": 4.0,
    "answer": 4.0,
    "trace": 4.25,
    "profiles": 4.25,
    "library": 4.3,
    "tuning": 4.35,
    "loading": 4.35,
    "__init__": 4.4,
}  # modules of the package itself
FIFTH = ("cli", "server", "bench", "distill", "simulate", "cluster", "timeseries", "edge")
ALLOWED_IN_CORE = {"torch", "numpy"}
HEAVY = ("transformers", "ray", "fastapi", "matplotlib", "huggingface_hub", "gguf")


class Edge(NamedTuple):
    """One import: from a module to a module, both by name without the package's own."""

    source: str
    target: str
    is_late: bool  # inside a function
    line: int


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Full names that one import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{module}.{alias.name}" for alias in node.names)


def edges_of(source: str, text: str, is_package: bool = False) -> Iterator[Edge]:
    """All imports of a module, wherever they stand."""
    full = ".".join(part for part in ("outpace", source) if part and part != "__init__")
    package = full if is_package or source == "__init__" else full.rpartition(".")[0]

    def walk(node: ast.AST, is_late: bool) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            for target in imported(child, package):
                yield Edge(source, target, is_late, child.lineno)
            yield from walk(child, is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(ast.parse(text), False)


def all_edges() -> Iterator[Edge]:
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__" and len(parts) > 1
        yield from edges_of(".".join(parts[:-1] if is_package else parts), file.read_text(), is_package)


def floor(name: str) -> float | None:
    """The floor of a module by its name inside the package; None where it has none."""
    first = name.partition(".")[0]
    if first in FIFTH:
        return 5.0
    return FLOORS.get(first, TOP.get(first))


def objection(edge: Edge) -> str | None:
    """What is wrong with an import, or None."""
    home, here = edge.source.partition(".")[0], floor(edge.source)
    top, _, target = edge.target.partition(".")
    if here is None:
        return f"{home} stands on no floor: give it one in this test and in docs/architecture.md"
    if top != "outpace":
        foreign = home == "core" and top not in ALLOWED_IN_CORE | sys.stdlib_module_names
        return f"core may import torch, numpy and the standard library, not {top}" if foreign else None
    target = target if floor(target) is not None else "__init__"  # a name of the package itself
    there, goal = floor(target), target.partition(".")[0]
    assert there is not None
    if goal == home:
        return among_methods(edge.source, target)
    if here == there == 5.0:
        return None if home == "cli" and edge.is_late else f"{home} imports {goal}: only cli may, inside a function"
    if there >= here:
        return f"{'an upward' if there > here else 'a sideways'} import: {home} (floor {here:g}) of {goal} ({there:g})"
    return None


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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("core.tree", "from outpace.models.base import Part"),
        ("core.tree", "import rich"),
        ("core.tree", "from ..rules import base"),
        ("core.tree", "def f():\n    import outpace.engine"),
        ("core.tree", "if TYPE_CHECKING:\n    from outpace.engine import Engine"),
        ("models.toy", "from outpace.rules.base import follow"),
        ("rules.greedy", "from outpace.candidates.cache import CandidateCache"),
        ("candidates.loop", "from outpace import drafters"),
        ("drafters.model", "from outpace.decoders.base import Place"),
        ("drafters.model", "from outpace.drafters.ngram import Ngram"),
        ("drafters.model", "from . import ngram"),
        ("decoders.card", "from outpace.decoders.speculative import decode"),
        ("decoders.card", "from outpace.engine import Engine"),
        ("engine", "from outpace.library import load"),
        ("library", "from outpace import UserError"),
        ("library", "from outpace.cli.main import main"),
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
        ("drafters.model", "from outpace.drafters._chance import Rate\nfrom outpace.rules.base import rank_rows"),
        ("decoders.card", "from outpace.decoders.base import Place\nfrom outpace.candidates.cache import Correction"),
        ("library", "from outpace.engine import Engine\nfrom outpace.core import registry"),
        ("cli.main", "def f():\n    from outpace.server.app import serve"),
        ("cli.main", "from outpace.library import load\nfrom outpace.cli import output"),
        ("__init__", "from outpace.library import load"),
    ],
)
def test_a_good_import_passes(source: str, text: str) -> None:
    assert [objection(edge) for edge in edges_of(source, text) if objection(edge)] == []


@pytest.mark.parametrize("module", ["outpace", "outpace.library", "outpace.engine"])
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
