"""The library from the outside, on a tiny random model from a file: loading, text in, text out, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from doubles import within
from files import model_folder

import outpace
from outpace.api import pair
from outpace.api.llm import PreparedRequest
from outpace.core.sampling import Sampling
from outpace.engine.build import BuildOptions, find_rule
from outpace.engine.sequence import TokenSequence
from outpace.models.load import Loaded, Progress, load_draft, load_model
from outpace.models.options import LoadOptions

DRAFTS = {"card": "model+ngram", "speculative": "model+ngram"}
CHAT = [{"role": "user", "content": "hello world 12 hello world 12"}]


def folder(where: Path, name: str, seed: int = 0, **changes: object) -> str:
    return str(model_folder(where, name, seed, **changes))


@pytest.fixture(scope="module")
def target(tiny_folder: str) -> Loaded:
    return load_model(tiny_folder)


@pytest.mark.parametrize("method", sorted(DRAFTS))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3, "top_k": 40, "top_p": 0.95, "min_p": 0.01}])
def test_pieces_add_up_to_the_text_of_plain_decoding(tiny_folder: str, method: str, sampling: dict) -> None:
    with outpace.load(tiny_folder, "layers:0", method=method, drafter=DRAFTS[method]) as llm:
        plain = llm.stream(CHAT, max_tokens=40, plain=True, **sampling).finish()
        stream = llm.stream(CHAT, max_tokens=40, **sampling)
        pieces = list(stream)
        assert stream.finish().tokens == plain.tokens
        assert "".join(piece.text for piece in pieces) == stream.finish().text == plain.text
        assert tuple(token for piece in pieces for token in piece.tokens) == plain.tokens
        assert stream.finish().method == method
        assert plain.method == "autoregressive"


def test_a_batch_gives_what_each_gives_alone(tiny_folder: str) -> None:
    prompts = ["hello", "hello world", CHAT, "12 12 12 12"]
    with outpace.load(tiny_folder, drafter="ngram") as llm:
        together = llm.generate(prompts, max_tokens=30, temperature=1.0, seed=5)
        alone = [llm.stream(prompt, max_tokens=30, temperature=1.0, seed=5).finish() for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_a_batch_with_a_bad_prompt_leaves_nothing_behind(tiny_folder: str) -> None:
    with outpace.load(tiny_folder) as llm:
        with pytest.raises(outpace.UserError, match="context holds 128"):
            llm.generate(["hello", "hello " * 200], max_tokens=5)
        assert not llm.engine.waiting
        assert not llm.engine.running


def test_seed_and_choice_alone_change_a_sampled_answer(tiny_folder: str) -> None:
    with outpace.load(tiny_folder) as llm:

        def answer(**keys: int) -> tuple[int, ...]:
            return llm.stream("hello", max_tokens=20, temperature=1.0, **keys).finish().tokens

        assert answer(seed=1) == answer(seed=1)
        assert len({answer(seed=1), answer(seed=2), answer(seed=1, choice=1)}) == 3


def test_an_answer_may_be_left_early(tiny_folder: str) -> None:
    with outpace.load(tiny_folder) as llm:
        stream = llm.stream("hello", max_tokens=50)
        first = next(stream)
        stream.close()
        assert stream.finish().finish_reason == "abort"
        assert stream.finish().text.startswith(first.text)
        assert not llm.engine.running
        assert llm.stream("hello", max_tokens=5).finish().finish_reason in ("length", "stop")


def test_a_draft_with_a_padded_vocabulary(tiny_folder: str, tmp_path: Path) -> None:
    wide = folder(tmp_path, "wide", seed=1, vocab_size=300)
    for target, draft in ((tiny_folder, wide), (wide, tiny_folder)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with outpace.load(target, draft, method="speculative") as llm:
                plain = llm.stream(CHAT, max_tokens=30, plain=True).finish()
                drafted = llm.stream(CHAT, max_tokens=30).finish()
        assert drafted.tokens == plain.tokens
        assert drafted.figures.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_without_the_targets_last_tokens(tiny_folder: str, tmp_path: Path, temperature: float) -> None:
    """Some families' larger models have more special tokens at the end of the vocabulary."""
    short = folder(tmp_path, "short", seed=1, vocab_size=270)
    file = Path(short) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: number for token, number in vocab.items() if number < 270}
    assert len(tokenizer["model"]["vocab"]) < len(vocab)
    file.write_text(json.dumps(tokenizer))
    with outpace.load(tiny_folder, short, method="speculative") as llm:
        options = {"max_tokens": 30, "temperature": temperature, "logit_bias": {271: 3.0}}
        plain = llm.stream(CHAT, plain=True, **options).finish()
        drafted = llm.stream(CHAT, **options).finish()
    assert drafted.tokens == plain.tokens
    assert drafted.figures.drafted > 0


def test_a_draft_with_other_tokens_is_refused(tiny_folder: str, tmp_path: Path) -> None:
    other = folder(tmp_path, "other")
    file = Path(other) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["[PAD270]"], vocab["[PAD271]"] = vocab["[PAD271]"], vocab["[PAD270]"]
    file.write_text(json.dumps(tokenizer))
    target = load_model(tiny_folder)
    with pytest.raises(outpace.UserError, match="does not fit the target"):
        load_draft(other, target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methd": "card"}, "LLM has no argument 'methd'; did you mean 'method'"),
        ({"max_tokens": 5}, "max_tokens is an argument of `generate` and of `SamplingParams`, not of LLM"),
        ({"draft_length": 3}, r"'draft_length' \(--draft-length\) of method auto.*; it belongs to method pearl, spec"),
        ({"widht": 3, "draft": "layers:0"}, "unknown option 'widht' of .*did you mean 'width'"),
        ({"copies": 0}, "copies is 0, it must be between 1 and 256"),
        ({"method": "speculative", "draft_length": -1}, "draft_length is -1"),
        (
            {"method": "speculative", "draft_length": 8, "nodes": 8},
            "^draft_length is 8, which takes 9 nodes in a pass, the root included, and nodes is 8: raise nodes or",
        ),
        ({"method": "pearl", "draft_length": "9", "nodes": 8}, "^draft_length is 9, which takes 9 nodes in a pass"),
        ({"method": "bild", "most": 12}, "option 'most' .--most. was removed, leave it out: it is always 10 for bild"),
        (
            {"drafter": "suffix", "copies": 3},
            "option 'copies' .--copies. was removed, leave it out: it is always 32 for suffix",
        ),
        (
            {"method": "autoregressive", "drafter": "ngram"},
            "takes no drafter: leave out drafter 'ngram', or choose method auto, ",
        ),
        ({"draft": "layers:1,0"}, "layers is '1,0', it must be numbers from 0 to 1 in rising order"),
        ({"draft": "layers:x"}, "layers is 'x', it must be numbers"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not available here, allowed are cpu"),
    ],
)
def test_a_wrong_option_is_named(tiny_folder: str, options: dict, says: str) -> None:
    def ask() -> None:
        with outpace.load(tiny_folder, **options) as llm:
            llm.stream("hello", max_tokens=2)

    with pytest.raises(outpace.UserError, match=says):
        ask()


@pytest.mark.parametrize(
    ("method", "length", "nodes"), [("speculative", 12, 13), ("speculative", 2, 8), ("pearl", 12, 12), ("ssd", 12, 13)]
)
def test_all_of_a_long_draft_is_verified(tiny_folder: str, method: str, length: int, nodes: int) -> None:
    """By default the limit on nodes is as high as the draft length needs."""
    options: dict[str, Any] = {"draft_length": length, "width": 1, "floor": 0, "draft_dtype": "int8"}
    options |= {} if method == "speculative" else {"worker": "inline"}
    with outpace.load(tiny_folder, "layers:0,1", method=method, **options) as llm:
        assert llm.engine.options.nodes == nodes
        run = llm.stream("hello", max_tokens=40, min_tokens=40).finish()
    assert len(run.figures.positions) == length + (method == "ssd")  # ssd accepts a late token too


def test_an_empty_and_a_too_long_prompt_are_refused(tiny_folder: str) -> None:
    with outpace.load(tiny_folder) as llm:
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


def run_prepared(
    llm: outpace.LLM, prompt: str, params: outpace.SamplingParams, plain: bool = False
) -> tuple[PreparedRequest, TokenSequence]:
    """Step the engine by hand to the end of an answer, as a server does."""
    asked = llm.prepare(prompt, params, plain=plain)
    run = llm.engine.submit(asked.request, asked.decoder, asked.options, asked.text.watch)
    assert run.history.began == 0.0
    while run.finish_reason is None:
        llm.engine.step()
    return asked, run


def test_a_prepared_answer_gives_the_text_of_the_library(tiny_folder: str) -> None:
    params = outpace.SamplingParams(max_tokens=20, ignore_eos=True)
    with outpace.load(tiny_folder, drafter="ngram") as llm:
        plain = llm.generate("hello world 12", params, plain=True)[0]
        for is_plain, method in ((False, llm.method), (True, "autoregressive")):
            asked, run = run_prepared(llm, "hello world 12", params, is_plain)
            asked.text.finish()
            assert "".join(piece.text for piece in asked.text.pieces) == plain.text
            assert (tuple(run.tokens), asked.method) == (plain.tokens, method)


def tokens(llm: outpace.LLM) -> tuple[int, ...]:
    with llm:
        assert llm.target.name
        (result,) = llm.generate("hello hello hello", outpace.SamplingParams(max_tokens=8))
    return result.tokens


def test_models_by_name_or_loaded_or_one_of_each(tiny_folder: str, target: Loaded) -> None:
    draft = load_draft("layers:0", target)
    made = [
        outpace.LLM(tiny_folder, "layers:0", method="speculative"),
        outpace.LLM(model=tiny_folder, draft="layers:0", method="speculative"),
        outpace.load(tiny_folder, "layers:0", method="speculative"),
        outpace.load(tiny_folder, "layers:0", LoadOptions(), method="speculative"),
        outpace.LLM(target, draft, method="speculative"),
        outpace.LLM(target, "layers:0", method="speculative"),
        outpace.LLM(tiny_folder, draft, method="speculative"),
    ]
    assert [llm.draft.name if llm.draft else None for llm in made] == ["layers:0"] * len(made)
    assert len({tokens(llm) for llm in made}) == 1
    alone = outpace.LLM(target), outpace.LLM(target, "none"), outpace.LLM(tiny_folder)
    assert [llm.draft for llm in alone] == [None] * 3
    for llm in alone:
        llm.close()


def test_a_result_prints_as_three_lines_and_has_vllms_names(target: Loaded) -> None:
    with outpace.LLM(target, method="autoregressive") as llm:
        first, second = llm.generate(["hello world", "hello"], max_tokens=8, ignore_eos=True)
        messages = llm.generate([[1, 2, 3]], max_tokens=2)[0]
    shown = str(first).splitlines()
    assert len(shown) == 3
    assert repr(first.text) in shown[0]
    assert "tokens: 8 (length)" in shown[1]
    assert len(repr(first)) < 100
    assert [(one.prompt, one.outputs[0].text, one.outputs[0].token_ids) for one in (first, second)] == [
        ("hello world", first.text, first.tokens),
        ("hello", second.text, second.tokens),
    ]
    assert messages.prompt is None


@pytest.mark.parametrize(
    "copies",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        ForkingPickler.dumps,  # a new process of multiprocessing gets its arguments by it
        lambda llm: pickle.dumps(llm.generate, protocol=2),
        lambda llm: pickle.dumps({"llm": [llm]}),
    ],
)
def test_an_llm_cannot_be_pickled_or_copied(tiny_folder: str, copies: Callable[[Any], Any]) -> None:
    with outpace.load(tiny_folder) as llm:
        with pytest.raises(outpace.UserError, match=r"an LLM cannot be pickled or copied, .*: pass the model's name"):
            copies(llm)
        assert llm.generate("hello", max_tokens=2)


def test_repr_names_model_and_method(target: Loaded) -> None:
    with outpace.LLM(target, method="autoregressive") as llm:
        assert repr(llm) == f"<LLM of {target.name} by autoregressive>"
    assert repr(llm) == repr(object.__new__(outpace.LLM)) == "<closed LLM>"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32"}, "dtype is for models that are loaded by name, these are loaded already: leave it out"),
        ({"options": LoadOptions(exact=False)}, "exact is for models that are loaded by name"),
        ({"draft_device": "cpu"}, "draft_device is for models that are loaded by name"),
        ({"tokenizer": object()}, "tokenizer is for models that are loaded by name"),
        ({"model": "x"}, "model is another name for target, give one of them"),
        ({"widht": 3}, "unknown option 'widht' of method auto"),
    ],
)
def test_options_without_a_model_to_load_are_refused(target: Loaded, options: dict[str, Any], says: str) -> None:
    for draft in (None, "none", load_draft("layers:0", target)):
        with pytest.raises(outpace.UserError, match=says):
            outpace.LLM(target, draft, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "crad"}, "unknown method 'crad', allowed are .*; did you mean 'card'"),
        ({"rule": "gumble"}, "unknown rule 'gumble'.*did you mean 'gumbel'"),
        ({"worker": "proces"}, "unknown worker 'proces'"),
    ],
)
def test_option_errors_are_raised_before_a_model_is_loaded(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded first"))
    with pytest.raises(outpace.UserError, match=says):
        outpace.LLM("somewhere", **options)


@pytest.mark.parametrize("is_early", [True, False], ids=["while the target is loaded", "while the draft is awaited"])
def test_an_interrupt_ends_the_loading_of_both_shipped_models(is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended_by = threading.Event(), list[str]()

    def open_draft(*given: Any, progress: Progress) -> Any:
        try:
            while True:
                progress("converting", 0.5)
                began.set()
                threading.Event().wait(0.001)
        except BaseException as error:
            ended_by.append(type(error).__name__)
            raise

    def interrupted(stage: str, fraction: float) -> None:
        assert began.wait(30.0)
        raise KeyboardInterrupt

    def load_target(spec: None, options: LoadOptions, *, progress: Progress) -> Any:
        return progress("loading", 0.5) if is_early else None

    monkeypatch.setattr(pair, "shipped_draft", lambda name: "draft")
    monkeypatch.setattr(pair, "open_draft", open_draft)
    monkeypatch.setattr(pair, "load_model", load_target)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            pair.load_pair(None, None, LoadOptions(), BuildOptions(), progress=interrupted)

    within(30.0, work)
    assert ended_by == ["CancelledError"]
