"""The documents: links lead somewhere, named files exist, generated pages are current, sizes have bounds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from versions import is_dated, versions

import outpace
from outpace.cli.main import COMMANDS
from outpace.models.files.pairs import DRAFT_FAMILIES

REPOSITORY = Path(__file__).parents[1]
FOLDERS = (
    REPOSITORY,
    REPOSITORY / "docs",
    REPOSITORY / "kernels",
    REPOSITORY / "outpace" / "studies" / "timeseries" / "pair",
    *sorted((REPOSITORY / "outpace" / "drafts").iterdir()),
)
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
FILES = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cpp|sh|md|toml|yml))`")
INVENTED = {"drafters/foo.py", "DIR/notes.md"}
TARGETS = re.compile(r"`make ([\w-]+)")


def prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub and MkDocs form them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead_links(page: Path) -> Iterator[str]:
    for goal in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = goal.partition("#")
        if ":" in goal:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield goal


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not list(dead_links(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_and_command_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    places = (REPOSITORY, REPOSITORY / "outpace", page.parent)
    named = set(FILES.findall(text)) - INVENTED
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    made = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert not set(TARGETS.findall(text)) - made


CODE = "\n".join(
    path.read_text()
    for folder, kinds in (("outpace", "py"), ("kernels/src", "[ch]*"), ("tests", "py"))
    for path in sorted((REPOSITORY / folder).rglob(f"*.{kinds}"))
)


def unknown_names(text: str) -> Iterator[str]:
    """Yield the names of code in a page that the code does not have, or not in the file that is named after them."""
    text = " ".join(text.split())
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
        if not re.search(rf"\b{name.rpartition('.')[2]}\b", CODE):
            yield name
    for name, file in re.findall(r"`([A-Za-z_][\w.]*)` \(`((?:\w+/)+\w+\.(?:py|cpp|h))`", text):
        path = next((at for at in (REPOSITORY / file, REPOSITORY / "outpace" / file) if at.exists()), None)
        if path is None or not re.search(rf"(def|class) {name.rpartition('.')[2]}\b", path.read_text()):
            yield f"{name} in {file}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/card.md", "docs/drafters.md", "CONTRIBUTING.md"])
def test_every_name_of_code_is_in_the_code(page: str) -> None:
    assert not list(unknown_names(prose(REPOSITORY / page)))


def test_an_unknown_name_is_noticed() -> None:
    gone = "Draft" + "Heads"  # in one piece this file would have it
    text = f"`Engine.submit` (`engine/engine.py`), `{gone}`, `Engine.submit` (`engine/scheduler.py`)"
    assert list(unknown_names(text)) == [gone, "Engine.submit in engine/scheduler.py"]


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One title, here\n[a](#one-title-here) [b](#two) [c](page.md#one-title-here) [d](gone.md) [e](x:y)\n"
    )
    assert list(dead_links(page)) == ["#two", "gone.md"]


def test_the_readme_names_the_two_commands() -> None:
    assert {"demo", "test"} <= set(re.findall(r"^make ([\w-]+)", (REPOSITORY / "README.md").read_text(), re.MULTILINE))


def test_the_readme_keeps_its_order() -> None:
    """What to expect, then what a new user needs, in the order of need; figures after it."""
    text = (REPOSITORY / "README.md").read_text()
    first, last = ("Install", "Chat", "Serve", "Five lines", "Speed", "CARD"), ("What it cannot do yet", "Papers")
    heads = (*first, "Commands", "The text is the same", "What it supports", *last)
    places = [text.index(f"\n## {head}\n") for head in heads]
    assert places == sorted(places)
    assert text.index("What to expect") < places[0]


def test_the_table_of_drafts_is_that_of_the_code() -> None:
    found: dict[str, list[str]] = {}
    for family in DRAFT_FAMILIES:
        draft = f"`{family.draft}`" + (f" ({family.suffix})" if family.suffix else "")
        found.setdefault(family.name, []).append(draft)
    rows = re.findall(r"^\| ([^|]+) \| (`.*) \|$", (REPOSITORY / "docs" / "which-draft.md").read_text(), re.MULTILINE)
    assert rows == [(name, ", ".join(drafts)) for name, drafts in found.items()]


def unknown_messages(text: str, code: str) -> Iterator[str]:
    """Yield the parts of messages in the first column of a table that the code does not write."""
    code = re.sub(r'"\s*f?"', "", code)  # adjacent strings are one
    for message in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE):
        yield from (part for part in re.split(r" ?\.\.\. ?", message) if part not in code)


def test_the_messages_that_are_explained_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) >= 10
    assert not list(unknown_messages(text, CODE + (REPOSITORY / "Makefile").read_text()))
    assert list(unknown_messages("| `no model ... loved` | x |", 'f"no" " model"')) == ["loved"]


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/troubleshooting.md", "docs/which-draft.md"])
def test_commands_and_flags_for_new_users_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert set(re.findall(r"(?:\$ |`|^    )outpace ([a-z-]+)", text, re.MULTILINE)) <= set(COMMANDS)
    flags = re.findall(r"outpace [a-z-]+ [^\n]*|`--[a-z-]+", text)
    names = {name.replace("-", "_") for line in flags for name in re.findall(r"--([a-z][a-z-]+)", line)}
    assert names
    assert not [name for name in names - {"help", "help_all"} if not re.search(rf"\b{name}\b", CODE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_number_has_a_digit_before_its_point(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    assert not re.findall(r"(?:^|[ (\[*|~<>=+-])\.\d.*", text, re.MULTILINE), "0.59, not .59"


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: outpace\.(\w+)$", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(outpace.__all__)
    assert {name for name in dir(outpace) if not name.startswith("_")} == set(outpace.__all__)


def test_all_packages_have_one_version_and_the_changelog_knows_it() -> None:
    assert set(versions().values()) == {outpace.__version__}
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert is_dated(outpace.__version__) or f"## [Unreleased]: {outpace.__version__}" in changes


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("awk") is None, reason="make or awk is not installed")
def test_make_help_says_what_every_target_is_for() -> None:
    done = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    [phony] = re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+) +\S", done.stdout, re.MULTILINE)) == set(phony.split())


def printed(script: str) -> str:
    """What a script in docs/ prints."""
    command = [sys.executable, str(REPOSITORY / "docs" / script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_page_of_methods_is_current() -> None:
    assert (REPOSITORY / "docs" / "methods.md").read_text() == printed("methods_page.py"), "run `make methods-page`"


def test_the_page_of_the_protocol_is_current() -> None:
    assert (REPOSITORY / "docs" / "protocol.md").read_text() == printed("protocol_page.py"), "run `make protocol-page`"


def test_documents_are_short() -> None:
    pages = [page for page in REPOSITORY.rglob("*.md") if not {".venv", "build", ".pytest_cache"} & set(page.parts)]
    pages.remove(REPOSITORY / "docs" / "protocol.md")  # made from the comments of protocol.proto
    words = {page: len(page.read_text().split()) for page in pages}
    assert words[REPOSITORY / "README.md"] <= 1_100
    assert words[REPOSITORY / "docs" / "architecture.md"] <= 3_500
    assert sum(words.values()) <= 47_000
    assert len((REPOSITORY / "docs" / "log.md").read_text().splitlines()) <= 400
