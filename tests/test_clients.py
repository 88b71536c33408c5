"""The two most used third-party clients against a real server; `make test-clients` runs all."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from files import smollm2_file

RUN = Path(__file__).parent / "clients" / "run.py"
CLIENTS = ("openai_client", "anthropic_client")


@pytest.fixture(scope="module")
def environments() -> None:
    """Make the environments before a server is started; skip if packages cannot be installed."""
    environment = runpy.run_path(str(RUN))["environment"]
    for name in CLIENTS:
        try:
            environment(RUN.parent / f"{name}.py")
        except subprocess.CalledProcessError:
            pytest.skip(f"what {name} needs cannot be installed here")


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.usefixtures("environments")
def test_openai_and_anthropic_pass() -> None:
    smollm2_file()
    done = subprocess.run([sys.executable, RUN, *CLIENTS], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 clients passed" in done.stdout
