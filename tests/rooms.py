"""The rooms of the package as its imports show them: read here, judged by test_floors.py, drawn for the documents.

python tests/rooms.py           # rewrites the drawing and the folder tree in docs/architecture.md, and docs/methods.md
python tests/rooms.py --check   # says whether they are stale
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

HOUSE = Path(__file__).parents[1]
ROOT = HOUSE / "outpace"
PAGE = HOUSE / "docs" / "architecture.md"
METHODS = HOUSE / "docs" / "methods.md"
COMMAND = "python tests/rooms.py"
FLOORS = {"core": 0, "models": 1, "rules": 1, "candidates": 1, "drafters": 2, "grammar": 2, "decoders": 3}
FLOORS |= {"tools": 3, "engine": 4, "api": 5}
SIDE_HOUSES = ("cli", "server", "bench", "distill", "simulate", "cluster", "integrations", "timeseries", "edge")
FLOORS |= dict.fromkeys(SIDE_HOUSES, 6)
HOMES = {"__init__": "api", "__main__": "cli", "_moved": "core"}  # modules of the package itself, and their rooms
MODELS = {
    "base": 0,
    "options": 0,
    "devices": 1,
    "toy": 1,
    "llama": 1,
    "files": 2,
    "host": 2,
    "text": 3,
    "hf": 4,
    "runtimes": 5,
    "load": 6,
}  # inside `models`
WIDTH = 118  # columns of the drawing and the tree


class Edge(NamedTuple):
    """One import: from a module to a module, both by name without the package's own."""

    source: str
    target: str
    is_late: bool  # inside a function, or for types alone
    line: int


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Full names that one import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{module}.{alias.name}" for alias in node.names)


def runs_later(node: ast.AST) -> bool:
    """Whether what stands in it is not imported with its module: a function's body, or what types alone need."""
    is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return is_for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def edges_of(source: str, text: str, is_package: bool = False) -> Iterator[Edge]:
    """All imports of a module, wherever they stand."""
    full = ".".join(part for part in ("outpace", source) if part and part != "__init__")
    package = full if is_package or source == "__init__" else full.rpartition(".")[0]

    def walk(node: ast.AST, is_late: bool) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            for target in imported(child, package):
                yield Edge(source, target, is_late, child.lineno)
            yield from walk(child, is_late or runs_later(child))

    yield from walk(ast.parse(text), False)


def module_files() -> Iterator[tuple[str, Path]]:
    """Every module by its name inside the package; a folder is one by its `__init__`."""
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), file


@cache
def all_edges() -> tuple[Edge, ...]:
    """Of the whole package, read once."""
    found = [
        edges_of(name, file.read_text(), file.stem == "__init__" and file.parent != ROOT)
        for name, file in module_files()
    ]
    return tuple(itertools.chain.from_iterable(found))


def room(name: str) -> str:
    """The room in which a module stands, by its name inside the package."""
    first = name.partition(".")[0]
    return HOMES.get(first, first)


def room_of_models(name: str) -> str:
    """The room or module of `models` in which a module stands; "" for what stands elsewhere."""
    return name.split(".")[1] if name.startswith("models.") else ""


def arrows(room_of: Callable[[str], str], rooms: Iterable[str]) -> dict[str, dict[str, bool]]:
    """Which room imports which others; True where every such import is late."""
    found: dict[str, dict[str, bool]] = {name: {} for name in rooms}
    for edge in all_edges():
        source, target = room_of(edge.source), room_of(edge.target.removeprefix("outpace."))
        if edge.target.startswith("outpace.") and source in found and target in found and source != target:
            found[source][target] = found[source].get(target, True) and edge.is_late
    return found


def box(name: str, count: int, goals: Mapping[str, bool], order: Mapping[str, int], width: int) -> list[str]:
    """One room: its name, its number of modules, and an arrow to each room that it imports, the highest first."""
    inner = width - 4
    lines = [f"{count} module{'s' * (count != 1)}"]
    for mark, is_late in (("─▶ ", False), ("late ─▶ ", True)):
        names = sorted((goal for goal in goals if goals[goal] is is_late), key=lambda goal: (-order[goal], goal))
        if names:
            lines += textwrap.wrap(", ".join(names), inner, initial_indent=mark, subsequent_indent=" " * len(mark))
    top = f"┌ {name} ".ljust(width - 1, "─") + "┐"
    return [top, *(f"│ {line.ljust(inner)} │" for line in lines), "└" + "─" * (width - 2) + "┘"]


def drawing(room_of: Callable[[str], str], floors: Mapping[str, int]) -> str:
    """All rooms that hold a module as boxes, floor above floor."""
    counts: dict[str, int] = {}
    for name, _ in module_files():
        counts[room_of(name)] = counts.get(room_of(name), 0) + 1
    found = arrows(room_of, [name for name in floors if name in counts])
    lines = []
    for floor in sorted({floors[name] for name in found}, reverse=True):
        names = sorted(name for name in found if floors[name] == floor)
        width = min((WIDTH - 4) // len(names) - 1, 56)
        boxes = [box(name, counts[name], found[name], floors, width) for name in names]
        height = max(map(len, boxes))
        for one in boxes:
            one[-1:-1] = [f"│{' ' * (width - 2)}│"] * (height - len(one))
        for number, row in enumerate(zip(*boxes, strict=True)):
            lines.append(f"{floor if number == 1 else ' ':>2}  {' '.join(row)}".rstrip())
    return "\n".join(lines)


def tree() -> str:
    """Every folder and file of the package with the first sentence of its docstring."""
    lines = ["outpace/"]
    for file in _in_order(ROOT):
        depth = len(file.relative_to(ROOT).parts)
        name = "  " * depth + file.name + "/" * file.is_dir()
        source = file / "__init__.py" if file.is_dir() else file
        text = ast.get_docstring(ast.parse(source.read_text())) or "" if source.exists() else ""
        said = re.split(r"(?<=[^.])\.(?:\s|$)", text.partition("\n")[0], maxsplit=1)[0]
        lines += textwrap.wrap(said, WIDTH, initial_indent=name.ljust(33) + " ", subsequent_indent=" " * 34) or [name]
    return "\n".join(lines)


def _in_order(folder: Path) -> Iterator[Path]:
    """Folders, each followed by what it holds, then modules; `__init__` speaks for its folder."""
    entries = [e for e in folder.iterdir() if e.suffix == ".py" or (e.is_dir() and any(e.rglob("*.py")))]
    for entry in sorted(entries, key=lambda entry: (not entry.is_dir(), entry.name)):
        if entry.name != "__init__.py" or folder == ROOT:
            yield entry
        if entry.is_dir():
            yield from _in_order(entry)


SECTIONS: dict[str, Callable[[], str]] = {
    "rooms": lambda: drawing(room, FLOORS),
    "models": lambda: drawing(room_of_models, MODELS),
    "tree": tree,
}


def renewed(page: str) -> str:
    """The page with every marked section made anew."""
    for name, make in SECTIONS.items():
        start, end = f"<!-- {name}: made by {COMMAND} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"docs/architecture.md has no section between {start.strip()!r} and {end!r}")
        page = f"{before}{start}```text\n{make()}\n```\n{end}{after}"
    return page


def methods() -> str:
    """docs/methods.md as the methods themselves have it now."""
    from outpace.cli.methods import page

    return page()


def main() -> None:
    for file, new in ((PAGE, renewed(PAGE.read_text())), (METHODS, methods())):
        if "--check" not in sys.argv:
            file.write_text(new)
        elif new != file.read_text():
            sys.exit(f"docs/{file.name} is stale: {COMMAND}")


if __name__ == "__main__":
    main()
