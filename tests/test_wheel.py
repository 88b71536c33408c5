"""A wheel of outpace, installed in a folder of its own: whatever it needs is in it, the shipped draft too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from files import smollm2_file

HERE = Path(__file__).parents[1]
NO_BUILD = ("distribution found for setuptools", "failure in name resolution", "No module named pip")
PROMPT = "The three primary colours are"

pytestmark = pytest.mark.long

PLACES = """
import sys, outpace, outpace.api.llm
from outpace.core import registry
from outpace.models.files.pairs import SHIPPED_FOLDER
names = {kind: registry.names(kind) for kind in registry.KINDS}
files = {str(m.__file__) for n, m in sys.modules.items() if n.partition(".")[0] == "outpace" and m.__file__}
import json
print(json.dumps({"names": names, "files": sorted(files), "draft": str(SHIPPED_FOLDER)}))
"""


def run(command: list[str], where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=500, check=False, env=env)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the sources, as a build leaves its folders there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(HERE / "outpace", source / "outpace", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HERE / file, source)
    done = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(out), str(source)], out)
    reason = next((words for words in NO_BUILD if words in done.stderr), None)
    if done.returncode and reason is not None:
        pytest.skip(f"a wheel cannot be built here: {reason}")
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which it is installed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(folder)]
    done = run([*command, str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    sources = (path for path in (HERE / "outpace").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert inside == {path.relative_to(HERE).as_posix() for path in sources}
    licences = {name.partition("/licenses/")[2] for name in names - inside}
    assert {"LICENSE", *(f"outpace/server/vendor/LICENSE-{name}" for name in ("marked", "dompurify"))} <= licences


def test_nothing_is_taken_from_elsewhere(site: Path, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", PLACES], tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [path for path in [*found["files"], found["draft"]] if not path.startswith(f"{site}{os.sep}")] == []
    for kind, names in found["names"].items():
        files = {path.stem for path in (HERE / "outpace" / kind).glob("*.py") if not path.stem.startswith("_")}
        assert set(names) == files - {"base"}


@pytest.mark.smollm2
def test_it_answers_with_its_shipped_draft(site: Path, tmp_path: Path) -> None:
    smollm2_file()

    def answer(*arguments: str) -> dict[str, Any]:
        script = [sys.executable, str(site / "bin" / "outpace"), "generate", PROMPT, "--max-tokens", "32", "--json"]
        done = run([*script, *arguments], tmp_path, PYTHONPATH=str(site))
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    plain = answer("--method", "autoregressive")
    drafted = answer("--method", "speculative", "--drafter", "model")
    assert drafted["mean_accepted_length"] > 1.5
    assert (drafted["text"], drafted["tokens"]) == (plain["text"], plain["tokens"])
