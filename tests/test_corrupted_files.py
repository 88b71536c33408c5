"""Loads damaged model files: each is refused in one sentence, or loads.

There is no other error, crash, hang or unbounded memory, and nothing is executed. A damage that still loads cannot be
detected (a byte of a weight or of a token's text) or changes nothing (an unused field).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from files import folder_of, write_gguf

from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer

MEMORY = 2**29  # bytes beyond those that the process has in use before the first case
PATIENCE = 20  # seconds for one case; most take a few hundredths


def outcomes(cases: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of each damaged model."""
    here, folder = Path(__file__).parent, tmp_path_factory.mktemp("corrupted")
    command = [sys.executable, here / "corrupted_loads.py", folder, *map(str, (0, cases, MEMORY, PATIENCE))]
    paths = os.pathsep.join([str(here.parent), str(here)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, f"the process ended after {done.stdout[-500:]}:\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded on Linux alone")
@pytest.mark.parametrize("cases", [40, pytest.param(500, marks=pytest.mark.long)])
def test_each_is_refused_in_a_sentence_or_loads(cases: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = outcomes(cases, tmp_path_factory)
    assert [row["number"] for row in rows] == list(range(cases))
    failed = [row for row in rows if row["outcome"] != "loaded" and not row["outcome"].startswith("refused: ")]
    assert not failed, "\n".join(map(str, failed))
    loaded = sum(row["outcome"] == "loaded" for row in rows)
    assert loaded < 0.3 * cases, f"{loaded} of {cases} damaged models load"  # more, and the damage is no test
    assert not [row for row in rows if row["executed"]]
    named = [row for row in rows if row["outcome"].startswith(f"refused: {os.sep}")]
    assert len(named) > len(rows) / 2
    long = [row for row in named if len(row["outcome"]) > 1000]  # also of errors that quote a long value of the file
    assert not long, "\n".join(f"{row['number']} {row['damage']}: {row['outcome'][:300]}" for row in long)


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_tries_for_ever(tmp_path: Path, place: str) -> None:
    """Such a pattern takes time exponential in the text's length; the library gives up, and its panic is reported."""
    folder = folder_of(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")
    value = json.loads((folder / "tokenizer.json").read_text())
    kinds = {
        "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False},
        "normalizer": {"type": "Replace", "content": "x"},
    }
    value[place] = kinds[place] | {"pattern": {"Regex": "(a+)+$"}}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("b")
    with pytest.raises(UserError, match="the model's tokenizer cannot cut this text"):
        tokenizer.encode("a" * 2000 + "b")
