"""The library from the outside: text in, text out, on a tiny random model from a file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from files import model_folder

import outpace
from outpace.core.sampling import Sampling
from outpace.engine.build import find_rule
from outpace.models.load import load_draft, load_model

DRAFTS = {"card": "model+ngram", "speculative": "model+ngram"}
CHAT = [{"role": "user", "content": "hello world 12 hello world 12"}]


def folder(where: Path, name: str, seed: int = 0, **changes: object) -> str:
    return str(model_folder(where, name, seed, **changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("models"), "target")


@pytest.mark.parametrize("method", sorted(DRAFTS))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.01}])
def test_pieces_add_up_to_the_text_of_plain_decoding(model: str, method: str, sampling: dict) -> None:
    with outpace.load(model, "layers:0", method=method, drafter=DRAFTS[method]) as llm:
        plain = llm.stream(CHAT, max_tokens=40, plain=True, **sampling).finish()
        stream = llm.stream(CHAT, max_tokens=40, **sampling)
        pieces = list(stream)
        assert stream.finish().tokens == plain.tokens
        assert "".join(piece.text for piece in pieces) == stream.finish().text == plain.text
        assert tuple(token for piece in pieces for token in piece.tokens) == plain.tokens
        assert stream.finish().method == method
        assert plain.method == "autoregressive"


def test_a_batch_gives_what_each_gives_alone(model: str) -> None:
    prompts = ["hello", "hello world", CHAT, "12 12 12 12"]
    with outpace.load(model, drafter="ngram") as llm:
        together = llm.generate(prompts, max_tokens=30, temperature=1.0, seed=5)
        alone = [llm.stream(prompt, max_tokens=30, temperature=1.0, seed=5).finish() for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_a_batch_with_a_bad_prompt_leaves_nothing_behind(model: str) -> None:
    with outpace.load(model) as llm:
        with pytest.raises(outpace.UserError, match="context holds 128"):
            llm.generate(["hello", "hello " * 200], max_tokens=5)
        assert not llm.engine.waiting
        assert not llm.engine.running


def test_seed_and_choice_alone_change_a_sampled_answer(model: str) -> None:
    with outpace.load(model) as llm:

        def answer(**keys: int) -> tuple[int, ...]:
            return llm.stream("hello", max_tokens=20, temperature=1.0, **keys).finish().tokens

        assert answer(seed=1) == answer(seed=1)
        assert len({answer(seed=1), answer(seed=2), answer(seed=1, choice=1)}) == 3


def test_an_answer_may_be_left_early(model: str) -> None:
    with outpace.load(model) as llm:
        stream = llm.stream("hello", max_tokens=50)
        first = next(stream)
        stream.close()
        assert stream.finish().finish_reason == "abort"
        assert stream.finish().text.startswith(first.text)
        assert not llm.engine.running
        assert llm.stream("hello", max_tokens=5).finish().finish_reason in ("length", "stop")


def test_a_padded_draft_just_works(model: str, tmp_path: Path) -> None:
    wide = folder(tmp_path, "wide", seed=1, vocab_size=300)
    for target, draft in ((model, wide), (wide, model)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with outpace.load(target, draft, method="speculative") as llm:
                plain = llm.stream(CHAT, max_tokens=30, plain=True).finish()
                drafted = llm.stream(CHAT, max_tokens=30).finish()
        assert drafted.tokens == plain.tokens
        assert drafted.figures.drafted > 0


def test_a_draft_with_other_tokens_is_refused(model: str, tmp_path: Path) -> None:
    other = folder(tmp_path, "other")
    file = Path(other) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["[PAD270]"], vocab["[PAD271]"] = vocab["[PAD271]"], vocab["[PAD270]"]
    file.write_text(json.dumps(tokenizer))
    target = load_model(model)
    with pytest.raises(outpace.UserError, match="does not fit the target"):
        load_draft(other, target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "crad"}, "unknown method 'crad', allowed are .*; did you mean 'card'"),
        ({"drafter": "ngrm"}, "unknown drafter 'ngrm'.*did you mean 'ngram'"),
        ({"rule": "gumble"}, "unknown rule 'gumble'.*did you mean 'gumbel'"),
        ({"worker": "proces"}, "unknown worker 'proces'"),
        ({"methd": "card"}, "LLM has no argument 'methd'; did you mean 'method'"),
        ({"dtyp": "int8"}, "LLM has no argument 'dtyp'; did you mean 'dtype'"),
        (
            {"draft_length": 3},
            r"'draft_length' \(--draft-length\) of method auto.*; it belongs to method pearl, speculative",
        ),
        ({"widht": 3, "draft": "layers:0"}, "unknown option 'widht' of .*did you mean 'width'"),
        ({"copies": 0}, "copies is 0, it must be between 1 and 256"),
        ({"copies": "many"}, "copies is 'many', it must be a number"),
        ({"method": "speculative", "draft_length": -1}, "draft_length is -1"),
        ({"method": "autoregressive", "drafter": "ngram"}, "uses no drafter"),
        ({"method": "card", "drafter": "model"}, "drafter model needs a draft model"),
        ({"draft": "layers:0,9"}, "a layer of layers:0,9 is 9, it must be between 0 and 1"),
        ({"draft": "layers:1,0"}, "out of order"),
        ({"draft": "layers:x"}, "names no layers"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not available here, allowed are cpu"),
        ({"device": "meta"}, "device 'meta' is not available here, allowed are cpu"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"nodes": 0}, "nodes is 0"),
    ],
)
def test_a_wrong_option_is_named(model: str, options: dict, says: str) -> None:
    def ask() -> None:
        with outpace.load(model, **options) as llm:
            llm.stream("hello", max_tokens=2)

    with pytest.raises(outpace.UserError, match=says):
        ask()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0, it must be between 0 and 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5, it must be a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5, it must be a whole number"),
        ({"max_tokens": 3.5}, "max_tokens is 3.5, it must be a whole number"),
    ],
)
def test_a_number_out_of_range_is_named(model: str, options: dict, says: str) -> None:
    with outpace.load(model) as llm:
        with pytest.raises(outpace.UserError, match=says):
            llm.stream("hello", **options)
        with pytest.raises(outpace.UserError, match="the prompt has no tokens"):
            llm.stream("")
        with pytest.raises(outpace.UserError, match="tokens, the target's context holds 128"):
            llm.stream("hello " * 200)


def test_a_rule_must_go_with_the_temperature() -> None:
    assert type(find_rule("auto", Sampling(0.0))).__name__ == "Greedy"
    assert type(find_rule("auto", Sampling(0.5))).__name__ == "Gumbel"
    for name, temperature in (("greedy", 0.5), ("gumbel", 0.0), ("match", 0.0)):
        with pytest.raises(outpace.UserError, match=f"rule {name} does not work with temperature"):
            find_rule(name, Sampling(temperature))
