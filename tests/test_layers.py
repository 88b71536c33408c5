"""The package's layers: imports go down only, no import cycles, and `import outpace` stays light."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOT = REPOSITORY / "outpace"
# A package may import from packages with a lower number.
LAYERS = {
    "core": 0,
    "models": 1,
    "rules": 1,
    "grammar": 2,
    "drafters": 2,
    "planning": 3,
    "card": 3,
    "tools": 3,
    "decoders": 4,
    "engine": 5,
    "api": 6,
}
TOP = ("cli", "server", "bench", "distill", "simulate", "cluster", "integrations", "studies")
LAYERS |= dict.fromkeys(TOP, 7)
HOMES = {"__init__": "api", "__main__": "cli"}  # modules of the package itself, and the package that they count as
# The same inside `models`.
MODELS = {
    "base": 0,
    "options": 0,
    "devices": 2,
    "llama": 1,
    "files": 2,
    "host": 2,
    "distributed": 3,
    "text": 3,
    "hf": 4,
    "heads": 4,
    "runtimes": 5,
    "load": 6,
}
ALLOWED_IN_CORE = {"torch", "numpy", "outpace_kernels", "triton"}  # triton comes with torch for CUDA
HEAVY = ("torch", "transformers", "ray", "fastapi", "matplotlib", "huggingface_hub", "gguf")
REGISTRIES = ("drafters", "decoders")  # one method per file; methods never import each other


class Import(NamedTuple):
    """One import statement's edge: from a module (without the package's name) to a full module name."""

    source: str
    target: str
    is_late: bool  # inside a function, or for type checking only
    line: int


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the full names that one import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{module}.{alias.name}" for alias in node.names)


def is_deferred(node: ast.AST) -> bool:
    """Whether imports inside the node do not run when the module is loaded."""
    is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports_of(source: str, text: str, is_package: bool = False) -> Iterator[Import]:
    """Yield all imports of a module's text."""
    full = ".".join(part for part in ("outpace", source) if part and part != "__init__")
    package = full if is_package or source == "__init__" else full.rpartition(".")[0]

    def walk(node: ast.AST, is_late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in imported_names(child, package):
                yield Import(source, target, is_late, child.lineno)
            yield from walk(child, is_late or is_deferred(child))

    yield from walk(ast.parse(text), False)


def module_files() -> Iterator[tuple[str, Path]]:
    """Yield every module by its name inside the package; a folder is named for its `__init__`."""
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), file


@cache
def all_imports() -> tuple[Import, ...]:
    """Read the imports of the whole package once."""
    found = (
        imports_of(name, file.read_text(), file.stem == "__init__" and file.parent != ROOT)
        for name, file in module_files()
    )
    return tuple(itertools.chain.from_iterable(found))


def package_of(name: str) -> str:
    """Return the top-level package of a module inside `outpace`."""
    first = name.partition(".")[0]
    return HOMES.get(first, first)


def objection(edge: Import) -> str | None:
    """Return what is wrong with an import, or None."""
    home = package_of(edge.source)
    if home not in LAYERS:
        return f"{home} has no layer: give it one in tests/test_layers.py"
    top, _, target = edge.target.partition(".")
    if top != "outpace":
        is_foreign = home == "core" and top not in ALLOWED_IN_CORE | sys.stdlib_module_names
        return f"core may import torch, numpy, triton and the standard library, not {top}" if is_foreign else None
    goal = package_of(target) if package_of(target) in LAYERS else "api"  # else a name of `outpace` itself
    if goal == home:
        return objection_within(edge.source, target)
    if home in TOP and goal in TOP:
        is_record = target.startswith(("server.options.", "studies.edge.settings."))  # whose fields are flags
        return (
            None
            if home == "cli" and (edge.is_late or is_record)
            else f"{home} imports {goal}: only cli may, inside a function"
        )
    if LAYERS[goal] >= LAYERS[home]:
        return f"{home} (layer {LAYERS[home]}) imports {goal} (layer {LAYERS[goal]}): imports go down only"
    return None


def objection_within(source: str, target: str) -> str | None:
    """Return what is wrong with an import between two modules of one package, or None."""
    home, _, name = source.partition(".")
    if home == "models":
        one, other = (name.split(".")[1] if name.count(".") else "" for name in (source, target))
        if one not in MODELS or one == other or other not in MODELS:
            return None if one in MODELS or not one else f"models/{one} has no layer: give it one in MODELS"
        return None if MODELS[one] > MODELS[other] else f"models/{one} imports models/{other}, which is not below it"
    other = target.split(".")[1] if target.count(".") else ""
    if home == "studies" and other != name.partition(".")[0]:
        return f"{source} imports another study, {other}: they are independent"
    is_shared = not other or other.startswith("_") or other == "base"
    if home in REGISTRIES and name and not is_shared and other != name:
        return f"{home} never import each other: {name} imports {other}"
    return None


def test_imports_go_down_only() -> None:
    edges = all_imports()
    assert len(edges) > 100, "too few imports were read"
    found = [f"outpace/{e.source.replace('.', '/')}, line {e.line}: {objection(e)}" for e in edges if objection(e)]
    assert not found, "\n".join(["", *found])


def test_the_architecture_page_lists_every_package() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted({path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/*.py")})


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return groups of modules that import one another, directly or through others (strongly connected components)."""
    goals: dict[str, set[str]] = {}
    for source, target in edges:
        goals.setdefault(source, set()).add(target)
        goals.setdefault(target, set())
    reached = {module: reachable(module, goals) for module in goals}
    groups = {frozenset(other for other in reached[m] if m in reached[other]) for m in goals if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def reachable(module: str, goals: dict[str, set[str]]) -> set[str]:
    """Return all modules that a module imports, directly or through others."""
    found: set[str] = set()
    left = [module]
    while left:
        new = goals[left.pop()] - found
        found |= new
        left += new
    return found


def inner_imports() -> Iterator[tuple[str, str]]:
    """Yield pairs of the package's own modules, importer first; deferred imports are included."""
    modules = {name for name, _ in module_files()}
    for edge in all_imports():
        parts = edge.target.split(".")[1:]
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        target = next((name for name in names if name in modules), None)
        if edge.target.startswith("outpace.") and target is not None and target != edge.source:
            yield edge.source, target


def test_no_import_cycles() -> None:
    found = cycles(inner_imports())
    assert not found, "\n".join(["", *map(" <-> ".join, found)])


def test_a_cycle_is_found() -> None:
    assert cycles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]) == [["a", "b", "c"]]
    assert cycles([("a", "b"), ("b", "c")]) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("core.tree", "from outpace.models.base import Part"),
        ("core.tree", "import rich"),
        ("core.tree", "from ..rules import base"),
        ("core.tree", "def f():\n    import outpace.engine.engine"),
        ("core.tree", "if TYPE_CHECKING:\n    from outpace.engine.engine import Engine"),
        ("models.devices", "from outpace.rules.base import follow"),
        ("rules.greedy", "from outpace.card.cache import CandidateCache"),
        ("card.loop", "from outpace.decoders import card"),
        ("drafters.model", "from outpace.decoders.base import RequestContext"),
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
        ("studies.edge.run", "from outpace.studies.timeseries.patch_models import PatchModel"),
        ("api.llm", "from outpace.studies.edge.settings import EdgeSettings"),
        ("nowhere", "import torch"),
    ],
)
def test_a_bad_import_is_caught(source: str, text: str) -> None:
    assert all(objection(edge) for edge in imports_of(source, text))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("core.tree", "import torch, heapq\nimport numpy as np\nfrom outpace.core.errors import UserError"),
        ("models.devices", "from outpace.models.base import Part\nfrom . import base"),
        (
            "drafters.model",
            "from outpace.drafters._model_drafter import Draws\nfrom outpace.rules.base import best_rows",
        ),
        ("decoders.card", "from outpace.decoders.base import Decoder\nfrom outpace.card.cache import Correction"),
        ("api.llm", "from outpace.engine.engine import Engine\nfrom outpace.core import registry"),
        ("cli.main", "def f():\n    from outpace.server.app import serve"),
        ("cli.main", "from outpace.api.llm import load\nfrom outpace.cli import output"),
        ("__init__", "from outpace.api.llm import load"),
    ],
)
def test_a_good_import_passes(source: str, text: str) -> None:
    assert not any(objection(edge) for edge in imports_of(source, text))


@pytest.mark.parametrize("module", ["outpace", "outpace.api.llm", "outpace.engine.engine"])
def test_import_loads_no_heavy_package(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} loads {done.stdout}"
