"""Checks in vLLM itself, run by `run.py`: greedy float32 texts equal vLLM's own, drafts are accepted, bad options stop
vLLM when it starts, and a failing drafter does not stop it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm

from outpace.integrations.row_drafter import RowDrafter
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.pairs import shipped_draft

PROPOSER = "outpace.integrations.vllm.Proposer"
LETTER = (
    "Correct the spelling of this letter and write it out in full:\n\nDear Sir,\nI am writting to complain about the"
    " table wich I orderd in May. It arived two weeks late, and one leg was brokn. Please send me a new table.\nAnna"
)
TEXTS = (
    LETTER,
    "Write a story about a fox that wants to learn to read.",
    "Name five uses of paper.",
    "Why is it dark?",
)
TOKENS = 48


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve(None))


@contextmanager
def engine(model: str, options: dict[str, Any] | None, drafts: int = 6) -> Iterator[Any]:
    """vLLM with outpace's proposer and these options; None: without speculation."""
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "block_size": 32}
    if options is not None:
        given["speculative_config"] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafts}
        given["additional_config"] = {"outpace": options}
    llm = vllm.LLM(model, enforce_eager=True, disable_log_stats=False, **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def written(llm: Any, texts: tuple[str, ...] = TEXTS) -> list[list[int]]:
    """Greedy answers: the letter alone, then all at once."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS)
    chats = [[{"role": "user", "content": text}] for text in texts]
    outputs = [*llm.chat(chats[:1], params, use_tqdm=False), *llm.chat(chats, params, use_tqdm=False)]
    return [list(output.outputs[0].token_ids) for output in outputs]


def accepted(llm: Any) -> int:
    """Draft tokens that vLLM has accepted."""
    return sum(int(one.value) for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens")


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[int]]:
    with engine(model, None) as llm:
        return written(llm)


@pytest.mark.parametrize("kind", ["ngram+suffix", "model+ngram", "remote"])
def test_texts_equal_those_without_drafts(kind: str, model: str, plain: list[list[int]]) -> None:
    options: dict[str, Any] = {"drafter": kind}
    command = [sys.executable, "-m", "outpace", "draft-worker", "--listen", "127.0.0.1:0"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True) if kind == "remote" else None
    try:
        if worker is not None:
            assert worker.stderr is not None
            lines = iter(worker.stderr.readline, "")
            address = next(found[1] for line in lines if (found := re.search(r" drafts on .*?([\d.]+:\d+)", line)))
            options = {"worker": f"grpc://{address}"}
        elif kind.startswith("model"):
            options["draft"] = str(shipped_draft(shipped_model().stem))
        with engine(model, options) as llm:
            assert written(llm) == plain
            assert accepted(llm) > TOKENS // 4  # of the letter; a batch may get none
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait(30)


def test_a_proposer_that_fails_gives_one_warning(
    model: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    monkeypatch.setattr(RowDrafter, "_draft", fail)
    with engine(model, {}) as llm, pytest.warns(UserWarning, match="vLLM continues without drafts") as warned:
        assert written(llm) == plain
    assert sum("of the test" in str(one.message) for one in warned) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafter": "eagle"}, "unknown drafter for vLLM 'eagle', allowed are"),
        ({"longst": 3}, "unknown option 'longst'"),
        ({"worker": "here"}, "must be the address of a draft worker"),
    ],
)
def test_bad_options_stop_vllm_at_the_start(options: dict[str, Any], sentence: str, model: str) -> None:
    with pytest.raises(Exception, match=sentence), engine(model, options):
        pass


def test_another_version_stops_vllm_at_the_start(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    with pytest.raises(Exception, match=r"vLLM is version 0\.40\.1, outpace works with"), engine(model, {}):
        pass


def test_this_runs_from_the_checkout() -> None:
    import outpace

    assert Path(outpace.__file__).parents[1] == Path(__file__).parents[2]
