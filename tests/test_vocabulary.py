"""The project is written in plain English and the field's terms: no private phrases, no class name used twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("outpace", "kernels", "bench", "examples", "tests")
# Phrases that say less than the plain word, and the plain word to use instead.
AVOID = {
    r"so many": "the number, by name",
    r"of (?:which|those)": "two sentences",
    r"whoever|nobody|somebody": "the caller, the thread, the drafter: the object's name",
    r"(?:is|are|was|were|be|been|being) told|tells": "receives, is given, is passed, says",
    r"stands|stood": "is, has, comes",
    r"held to": "assumed, required",
    r"beside": "in parallel with, concurrently, besides, next to",
    r"in turn": "sequentially, one after the other",
    r"apart": "separately, independent",
    r"(?:carry|carries|carried|carrying) out": "run, execute, apply",
}
PATTERN = re.compile(
    "|".join(rf"(?P<p{number}>\b(?:{phrase})\b)" for number, phrase in enumerate(AVOID)), re.IGNORECASE
)
# Private words that named functions, classes and arguments, and the names that replaced them.
PRIVATE = {
    "doubtful": "trial_level",
    "gave": "record_gain",
    "guarded": "run_guarded",
    "isolate": "run_guarded",
    "is_far": "is_round_trip_long",
    "lend_session": "attach_target_session",
    "looked_up": "record_lookup",
    "on_base": "uses_target_session",
    "reach": "what is reached: a distance, a length, the visible slots",
    "score_held": "score_sparse",
    "settle": "commit_pending, apply_moves, update_slots",
    "work_in": "flush",
}
# The same in the kernels.
PRIVATE_IN_CPP = re.compile(
    r"\b(?:Following|Held\w+|Podium|Possible|Reach|Room|climb|fed_norm|mixed_norm|podium|reaches|steer|turns)\b"
)
# Files that may use the phrases, and why.
ALLOWED = {"tests/test_vocabulary.py": "lists the phrases"}
# Class names that may occur more than once, and why.
REPEATED = {"Options": "every plug-in of a registry has a dataclass of this name, whose fields become its flags"}


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments and of strings with a space: docstrings, help and error messages."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def cpp_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of // and /* */ comments."""
    for found in re.finditer(r"//[^\n]*(?:\n\s*//[^\n]*)*|/\*.*?\*/", source, re.DOTALL):
        yield source.count("\n", 0, found.start()) + 1, found[0]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a document without blocks of code and without code in backticks."""
    blank = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
    yield 1, re.sub(r"`[^`\n]*`", "", blank)


def readable_files() -> Iterator[Path]:
    """Yield every file whose words people read."""
    yield from sorted(REPOSITORY.glob("*.md"))
    yield from sorted((REPOSITORY / "docs").glob("*.md"))
    for folder in FOLDERS:
        yield from sorted(
            path for path in (REPOSITORY / folder).rglob("*") if path.suffix in {".py", ".md", ".h", ".cpp"}
        )


def phrases_in(path: Path) -> Iterator[str]:
    """Yield "line: phrase, use ..." for every phrase to avoid in a file."""
    read = {".py": python_texts, ".md": prose}.get(path.suffix, cpp_comments)
    for line, text in read(path.read_text()):
        # A comment or docstring may wrap inside a phrase.
        flat = re.sub(r"\n[ \t]*(?://|#)?[ \t]*", lambda gap: " " * len(gap[0]), text)
        for found in PATTERN.finditer(re.sub(r"\s", " ", flat)):
            phrase = next(p for number, p in enumerate(AVOID) if found[f"p{number}"])
            yield f"{line + text.count(chr(10), 0, found.start())}: {found[0]!r}, better: {AVOID[phrase]}"


def defined_names(source: str) -> Iterator[str]:
    """Yield the names of functions, classes and arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def class_names() -> dict[str, list[str]]:
    """Return the files of the package that define each class name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((REPOSITORY / "outpace").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(REPOSITORY)))
    return homes


@pytest.mark.parametrize("path", list(readable_files()), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_plain_words(path: Path) -> None:
    name = str(path.relative_to(REPOSITORY))
    if name in ALLOWED:
        pytest.skip(ALLOWED[name])
    found = list(phrases_in(path))
    assert not found, "\n".join(["", *(f"{name}:{one}" for one in found)])


def test_no_private_name_returns() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}, better: {PRIVATE[name]}"
        for path in sorted((REPOSITORY / "outpace").rglob("*.py"))
        for name in PRIVATE.keys() & set(defined_names(path.read_text()))
    ]
    for path in sorted((REPOSITORY / "kernels" / "src").iterdir()):
        code = re.sub(r"//[^\n]*", "", path.read_text())
        found += [f"{path.relative_to(REPOSITORY)}: {name}" for name in PRIVATE_IN_CPP.findall(code)]
    assert not found, "\n".join(["", *found])


def test_no_class_name_is_used_twice() -> None:
    twice = {name: files for name, files in class_names().items() if len(files) > 1 and name not in REPEATED}
    assert not twice, "\n".join(["", *(f"{name}: {', '.join(files)}" for name, files in twice.items())])


def test_a_phrase_is_found_where_a_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_vocabulary.REPOSITORY", tmp_path)
    (tmp_path / "a.py").write_text('"""Draws so\nmany tokens."""\n\nx = 1  # grows beside the target\n')
    (tmp_path / "b.h").write_text("int x;  // what nobody\n        // reads\n")
    (tmp_path / "c.md").write_text("Both are\ntold. `in turn`\n```\nso many\n```\n")
    counts = [len(list(phrases_in(tmp_path / name))) for name in ("a.py", "b.h", "c.md")]
    assert counts == [2, 1, 1]
