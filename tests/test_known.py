"""What a bench has found so far is kept, and refused where another command asks for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from known import Known


def test_what_is_saved_is_known_the_next_time(tmp_path: Path) -> None:
    file = tmp_path / "state" / "known.json"
    first = Known(file, {"seed": 1}, texts=[], row={})
    assert (first.found, file.exists()) == ({"texts": [], "row": {}}, False)
    first.found["texts"].append([1, 2])
    first.save()
    assert Known(file, {"seed": 1}, texts=[], row={}).found == {"texts": [[1, 2]], "row": {}}
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(SystemExit, match=r"known\.json is of {'seed': 1}, not of {'seed': 2}: name another --state"):
        Known(file, {"seed": 2}, texts=[], row={})


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = Known(None, {}, texts=[])
    known.save()
    assert not list(tmp_path.iterdir())
