"""Every script in examples/ runs, on a tiny random model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from files import model_folder

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script: Path, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, script, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
