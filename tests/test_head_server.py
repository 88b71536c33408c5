"""A server's process with a trained head: clients that leave, and texts that begin alike."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from block_heads import write_block
from files import model_folder
from heads import LAYERS, write_head

from outpace.api.llm import LLM

PATIENCE = 300.0
PROMPTS = [f"one two three four five six {word}" for word in ("seven", "eight", "hello", "world")]
WRITERS = {"eagle": write_head, "block": write_block}


@pytest.fixture(params=WRITERS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server with a head of random weights."""
    target = model_folder(tmp_path, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    head = WRITERS[request.param](tmp_path / "head")
    command = [sys.executable, "-m", "outpace", "serve", "--target", str(target), "--draft", str(head), "--port", "0"]
    options = ["--method", "speculative", "--batch", "4"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    found = None
    while not found and (line := process.stdout.readline()):
        found = re.search(r"http://[\w.]+:\d+", line)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(process.stdout.read)
        try:
            assert found is not None
            yield found.group()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
        assert "the drafter" not in rest.result(), "the drafter was given up"


def ask(address: str, prompt: str, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", data, kind), timeout=PATIENCE)


def text_of(address: str, prompt: str) -> str:
    with ask(address, prompt) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def leave(address: str, number: int) -> None:
    """Close a stream after some of its bytes."""
    with ask(address, PROMPTS[number % len(PROMPTS)], stream=True, max_tokens=300) as answer:
        answer.read(40 + 97 * number)


def test_clients_that_leave_change_no_other_text(address: str, tmp_path: Path) -> None:
    with LLM(str(tmp_path / "target"), method="autoregressive", profile=False) as llm:
        plain = [one.text for one in llm.generate(PROMPTS, max_tokens=60, temperature=0, ignore_eos=True)]
    with ThreadPoolExecutor(8) as pool:
        gone = [pool.submit(leave, address, number) for number in range(12)]
        texts = [pool.submit(text_of, address, prompt) for _ in range(3) for prompt in PROMPTS]
        assert [one.result() for one in texts] == plain * 3
        for one in gone:
            one.result()
    assert [text_of(address, prompt) for prompt in PROMPTS] == plain
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE) as answer:
        metrics = answer.read().decode()
    drafted = re.search(r"^outpace:spec_decode_num_draft_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    assert drafted is not None
    assert float(drafted.group(1)) > 100
