"""An answer that is prepared, and stepped by hand: what a server does."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_library import folder

import outpace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("prepared"), "target")


def test_a_prepared_answer_gives_the_text_of_the_library(model: str) -> None:
    params = outpace.SamplingParams(max_tokens=20, ignore_eos=True)
    with outpace.load(model, drafter="ngram") as llm:
        plain = llm.generate("hello world 12", params, plain=True)[0]
        for is_plain, method in ((False, llm.method), (True, "autoregressive")):
            asked = llm.prepare("hello world 12", params, plain=is_plain)
            run = llm.engine.submit(asked.request, asked.decoder, asked.options, asked.text.watch)
            while run.finish_reason is None:
                llm.engine.step()
            asked.text.finish()
            assert "".join(piece.text for piece in asked.text.pieces) == plain.text
            assert (tuple(run.tokens), asked.method) == (plain.tokens, method)


def test_a_request_knows_when_it_began_and_what_it_did_not_read(model: str) -> None:
    with outpace.load(model) as llm:
        runs = []
        for _ in range(2):
            asked = llm.prepare("hello " * 20, outpace.SamplingParams(max_tokens=4))
            run = llm.engine.submit(asked.request, asked.decoder, asked.options, asked.text.watch)
            assert run.history.began == 0.0
            while run.finish_reason is None:
                llm.engine.step()
            assert run.history.submitted <= run.history.began <= run.history.first_token
            runs.append(run)
    assert runs[0].history.reused == 0
    assert 0 < runs[1].history.reused < len(runs[1].request.prompt)


def test_the_stop_string_that_ended_a_text_is_told(model: str) -> None:
    with outpace.load(model) as llm:
        whole = llm.generate("hello", max_tokens=20, ignore_eos=True)[0].text
        for stops, found in ((["\0never"], None), ([whole[3:5]], whole[3:5])):
            asked = llm.prepare("hello", outpace.SamplingParams(max_tokens=20, ignore_eos=True, stop=stops))
            run = llm.engine.submit(asked.request, asked.decoder, asked.options, asked.text.watch)
            while run.finish_reason is None:
                llm.engine.step()
            assert asked.text.stop_string == found


def test_preparing_tells_a_wrong_prompt(model: str, tmp_path: Path) -> None:
    with outpace.load(model) as llm, pytest.raises(outpace.UserError, match="it must be text"):
        llm.prepare(5, outpace.SamplingParams())  # type: ignore[arg-type]
