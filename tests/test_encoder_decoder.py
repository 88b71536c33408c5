"""Encoder-decoder models against transformers' own passes and `generate`: scores, texts by all methods, sources."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import encoder_decoders
import pytest
import tiny
import torch
from encoder_decoders import EOS, PAD, fresh, generated, opened, prefilled, sources
from engine_runs import finish, num_pauses, submit
from passes import branch, random_parents, text
from serving import served
from torch import Tensor

import outpace
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.core.types import Adjustments, LogprobsOptions, Request
from outpace.engine.engine import Engine
from outpace.engine.options import EngineOptions
from outpace.models.base import Part, chain, read_text
from outpace.models.files.model_kind import ENCODER_DECODERS
from outpace.models.hf.encoder_decoder import EncoderDecoderModel
from outpace.models.hf.load import adapt
from outpace.models.load import load_model
from outpace.rules.greedy import Greedy
from outpace.simulate import trace

NAMES = sorted(ENCODER_DECODERS)
PROMPTS = ("translate English to German: the house", "summarize: a b c d", "the house is small, the dog is big")
TOKENS = 16


@lru_cache
def load(name: str) -> Any:
    return adapt(encoder_decoders.build(name))


def assert_close(got: Tensor, expected: Tensor, model: Any) -> None:
    expected = expected.clone()
    expected[model._suppressed] = -torch.inf
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def assert_paths(model: Any, got: Tensor, source: list[int], before: list[int], part: Part) -> None:
    """Every node's scores equal those of its path."""
    for node in range(len(part.tokens)):
        path = [part.tokens[other] for other in branch(part.parents, node)]
        assert_close(got[node], fresh(model, source, [*before, *path]), model)


@pytest.mark.parametrize("name", NAMES)
def test_trees_score_as_their_paths_after_their_own_source(name: str) -> None:
    model = load(name)
    assert isinstance(model, EncoderDecoderModel)
    assert not model.supports_trees
    keeps: list[list[int]] = [[], []]
    texts = [text(model, 4), []]
    both = [(source, prefilled(model, source, own)) for source, own in zip(sources(model, 5, 19), texts, strict=True)]
    for turn in range(3):
        parts = [
            Part(session, text(model, 8, turn), random_parents(8, turn + number), range(8), keeps[number])
            for number, (_, session) in enumerate(both)
        ]
        got = model.score(parts)
        for number, (source, _) in enumerate(both):
            assert_paths(model, got[8 * number : 8 * number + 8], source, texts[number], parts[number])
            keeps[number] = branch(parts[number].parents, random.Random(turn).randrange(2, 8))
            texts[number] = texts[number] + [parts[number].tokens[node] for node in keeps[number]]


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_a_source_may_be_read_in_pieces_and_with_the_answer(name: str) -> None:
    model = load(name)
    source, tokens = sources(model, 11)[0], text(model, 5, 3)
    session = opened(model, source)
    known = [*source, *model.decoder_start, *tokens]
    model.score([chain(session, known[:3])])
    session.keep(range(3))
    model.score([chain(session, known[3:4])])  # stays pending
    pending = [PREFIX, *range(1, len(known) - 4)]
    got = model.score([Part(session, known[4:], [0, *pending[1:]], range(len(known) - 4))])
    rows = len(known) - 4 - len(tokens)
    for number in range(len(tokens)):
        assert_close(got[rows + number], fresh(model, source, tokens[: number + 1]), model)
    session.keep(range(len(source) - 3), range(len(source) - 3, len(known) - 3))  # the answer stays pending
    got = model.score([Part(session, [9], [len(known) - len(source) - 1], [0])])[0]
    assert_close(got, fresh(model, source, [*tokens, 9]), model)


def test_a_session_starts_from_another_and_is_cut_at_its_source() -> None:
    model = load("t5")
    source, tokens = sources(model, 9)[0], text(model, 6, 1)
    first, second = prefilled(model, source, tokens), opened(model, source)
    assert [first.cut_below(length) for length in (16, 10, 9, 8, 1)] == [16, 10, 9, 0, 0]
    second.start_from(first, 12)
    first.truncate(0)
    assert_close(model.score([chain(second, [7], [0])])[0], fresh(model, source, [*tokens[:2], 7]), model)
    other = sources(model, 9, 9)[1]
    model.score([chain(first, other)])  # a session is reused for another text, as after a pause
    first.keep(range(9))
    assert_close(model.score([chain(first, [*model.decoder_start, 7], [1])])[0], fresh(model, other, [7]), model)


def test_memory_is_a_slot_for_each_token_of_source_and_answer() -> None:
    model = load("t5")
    session = prefilled(model, sources(model, 40)[0], text(model, 20))
    held = sum(part.nbytes for layer in session.layers for part in layer.stored)
    assert held == model.session_bytes(session.slots)
    assert all(layer.keys is None for layer in session._crossed), "views keep storage that was left"


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A model, its folder, and the folder of a smaller one."""
    where, name = tmp_path_factory.mktemp(request.param), request.param
    module = encoder_decoders.build(name)
    smaller = {"num_decoder_layers": 1, "num_layers": 1} if name == "t5" else {"decoder_layers": 1}
    return module, encoder_decoders.folder(where, name, 0, module), encoder_decoders.folder(where, name, 1, **smaller)


METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {"method": "autoregressive"},
    "chains": {"method": "speculative", "drafter": "model"},
    "the target itself": {"method": "speculative", "drafter": "model", "draft": "target"},
    "trees": {"method": "speculative", "drafter": "model", "width": 3, "draft_length": 3},
    "auto": {"method": "auto"},
    "auto without a model": {"method": "auto", "draft": "none"},
    "n-grams": {"method": "speculative", "drafter": "ngram", "draft": "none"},
    "suffixes": {"method": "speculative", "drafter": "suffix", "draft": "none"},
    "lookahead": {"method": "speculative", "drafter": "lookahead", "draft": "none"},
    "card, thread": {"method": "card", "worker": "thread"},
    "card, inline": {"method": "card", "worker": "inline"},
    "card, process": {"method": "card", "worker": "process"},
    "planned": {"method": "planned"},
    "pearl": {"method": "pearl"},
    "bild by the target itself": {"method": "bild", "draft": "target"},
    "ssd": {"method": "ssd"},
}
QUICK = ("chains", "n-grams")
CASES = [  # every method with one model, and some with the others
    *(("t5", name) for name in METHODS),
    *(("bart", name) for name in ("chains", "trees", "auto", "suffixes", "card, thread", "planned")),
    *(("marian", name) for name in ("chains", "auto without a model", "card, process")),
]


@pytest.mark.parametrize(
    ("folders", "name"),
    [pytest.param(*case, marks=() if case[1] in QUICK else pytest.mark.long) for case in CASES],
    indirect=["folders"],
)
def test_texts_are_those_of_generate(folders: tuple[Any, Path, Path], name: str) -> None:
    module, target, draft = folders
    options = METHODS[name] | {"profile": False}
    given = options.pop("draft", draft)
    with outpace.LLM(target, draft=target if given == "target" else given, **options) as llm:
        encoded = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        expected = [generated(module, source, TOKENS) for source in encoded]
        assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the texts do not depend on their sources"
        results = [*llm.generate(PROMPTS, max_tokens=TOKENS), *llm.generate(PROMPTS[0], max_tokens=TOKENS)]
    for result, tokens in zip(results, [*expected, expected[0]], strict=True):
        assert list(result.tokens) == tokens
        assert result.text == llm.tokenizer.decode(tokens)
        assert given != "target" or result.figures.accepted == result.figures.drafted, "the draft read something else"
    assert {source[-1] for source in encoded} == {EOS}


@pytest.mark.long
@pytest.mark.parametrize(("folders", "rule"), [("t5", "gumbel"), ("bart", "match")], indirect=["folders"])
def test_sampled_texts_do_not_depend_on_drafts(folders: tuple[Any, Path, Path], rule: str) -> None:
    _, target, draft = folders
    asked = {"max_tokens": TOKENS, "temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2}
    with outpace.LLM(target, draft=draft, method="speculative", rule=rule, profile=False) as llm:
        drafted = [result.tokens for result in llm.generate(PROMPTS, **asked)]
        plain = [result.tokens for result in llm.generate(PROMPTS, plain=True, **asked)]
    assert drafted == plain
    assert len(set(plain)) == 2 * len(PROMPTS)


SOURCE = [token for token in (9, 10, 11, 12) for _ in range(8)]  # the prefix cache compares blocks of 16


def asked(model: Any, source: Sequence[int], **more: Any) -> Request:
    return model.complete(Request(tuple(source), Greedy(), **{"max_tokens": 12, **more}))


@pytest.mark.parametrize(
    ("other", "reused"),
    [
        (SOURCE, len(SOURCE)),
        ([*SOURCE, PAD, 13], 0),  # begins as the first one's text, whose decoder starts with this token
        ([*SOURCE, PAD], 0),
        (SOURCE[:-1], 0),
        ([8, *SOURCE[1:]], 0),
        ([*SOURCE[:-1], 8], 0),
    ],
    ids=["same", "with the start and more", "with the start", "shorter", "another first token", "another last token"],
)
@pytest.mark.parametrize("together", [True, False])
def test_the_prefix_cache_never_mixes_sources(other: list[int], reused: int, together: bool) -> None:
    model = load("t5")
    expected = [generated(model.module, source, 12) for source in (SOURCE, other)]
    with Engine(model, options=EngineOptions(batch=2)) as engine:
        runs = submit(engine, asked(model, SOURCE))
        for _ in range(3) if together else ():  # the second copies from a text that grows
            engine.step()
        first = [] if together else finish(engine, *runs)
        runs += submit(engine, asked(model, other))
        texts = finish(engine, *runs)
    assert first in ([], expected[:1])
    assert texts == expected
    assert runs[1].history.reused == reused


def test_one_source_is_read_once_for_several_answers() -> None:
    model = load("t5")
    source = [token for token in range(20, 90) for _ in range(2)]
    with Engine(model, options=EngineOptions(batch=3)) as engine:
        runs = submit(engine, *(asked(model, source, seed=seed) for seed in range(3)))
        texts = finish(engine, *runs)
    assert texts == [generated(model.module, source, 12)] * 3
    assert sorted(run.history.reused for run in runs) == [0, len(source), len(source)]


def test_paused_requests_read_their_sources_again() -> None:
    model = load("bart")
    three = sources(model, 40, 45, 50)
    budget = 6.2 * 64 * model.token_bytes / (1 << 30)  # GiB, for blocks of 64 slots: each request takes 2, then more
    with Engine(model, options=EngineOptions(batch=3, kv_memory=budget, nodes=4)) as engine:
        runs = submit(engine, *(asked(model, source, max_tokens=90) for source in three))
        texts = finish(engine, *runs)
    assert texts == [generated(model.module, source, 90) for source in three]
    assert any(map(num_pauses, runs))


def test_copies_of_the_source_are_accepted(tmp_path: Path) -> None:
    """The task: write the source again, of 60 random tokens that no text before had. The lookups see it as a part of
    their text. Plain decoding takes a round for each token."""
    module = encoder_decoders.copying()
    source = [int(token) for token in torch.randperm(250, generator=torch.Generator().manual_seed(5))[:60] + 8]
    whole = [1, *source, EOS]  # as BART's tokenizer marks a text
    expected = generated(module, whole, 61)
    assert expected == [*source, EOS], "the model does not do the task"
    folder, rounds = encoder_decoders.folder(tmp_path, "bart", 0, module), {}
    for drafter in ("ngram", "suffix", None):
        given = {"method": "autoregressive"} if drafter is None else {"method": "speculative", "drafter": drafter}
        with outpace.LLM(folder, profile=False, **given | ({"draft_length": 5} if drafter else {})) as llm:
            result = llm.generate([whole], max_tokens=61, temperature=0)[0]
        assert list(result.tokens) == expected
        rounds[drafter] = result.figures.passes
    assert rounds[None] == 61
    assert max(rounds["ngram"], rounds["suffix"]) <= 12


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"forced_eos_token_id": EOS}, {"max_tokens": 1}),
        ({"forced_bos_token_id": 7, "forced_eos_token_id": EOS}, {}),
        ({"suppress_tokens": list(range(3, 200))}, {}),
        ({"bad_words_ids": [[token] for token in range(3, 200)]}, {}),
        ({"min_length": 10, "suppress_tokens": list(range(3, 272))}, {}),
        ({"min_length": 99, "suppress_tokens": list(range(3, 272)), "forced_eos_token_id": EOS}, {}),
        ({"decoder_start_token_id": 5}, {}),
        ({"no_repeat_ngram_size": 1}, {}),
        ({"no_repeat_ngram_size": 2, "suppress_tokens": list(range(6, 272))}, {}),
        ({"no_repeat_ngram_size": 3, "suppress_tokens": list(range(5, 272))}, {"max_tokens": 30}),
        ({"repetition_penalty": 1.7}, {"adjustments": Adjustments(repetition_penalty=1.7)}),
        ({"decoder_start_token_id": None, "bos_token_id": 6}, {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_the_generation_config_is_followed(fields: dict[str, Any], options: dict[str, Any]) -> None:
    module = encoder_decoders.build("t5")
    for name, value in fields.items():
        setattr(module.generation_config, name, value)
    model, source = adapt(module), [20, 21, 22, 3, 4, 138, EOS]
    asked_for = {"max_tokens": 12, "stop_ids": frozenset({EOS}), **options}
    with Engine(model) as engine:
        runs = submit(engine, asked(model, source, **asked_for))
        texts = finish(engine, *runs)
    assert texts == [generated(module, source, asked_for["max_tokens"])]
    if "min_length" in fields:
        assert len(texts[0]) >= 9
    is_cut = len(texts[0]) == asked_for["max_tokens"]
    assert runs[0].finish_reason == ("length" if is_cut else "stop")


def test_what_of_the_generation_config_is_left_out_is_said() -> None:
    module = encoder_decoders.build("bart")
    module.generation_config.num_beams, module.generation_config.encoder_no_repeat_ngram_size = 4, 3
    module.generation_config.bad_words_ids = [[9, 10], [11]]
    notice = adapt(module).notice
    left_out = "num_beams 4, encoder_no_repeat_ngram_size 3, bad_words_ids [[9, 10]], which outpace leaves out"
    assert str(notice).endswith(f"its generation config asks for {left_out}")


@pytest.mark.parametrize(
    ("prompt", "more", "says"),
    [
        ([], {}, r"the source has no text, its tokens are \[\]: give one to read"),
        ([EOS], {}, r"the source has no text, its tokens are \[2\]"),
        ([9] * 97, {}, "the source has 97 tokens, the target's encoder takes 1 to 96"),
        ([9], {"logprobs": LogprobsOptions(prompt=True)}, "which gives no log-probabilities of prompt tokens"),
        ([999], {}, "the prompt has token 999, allowed are 0 to 271"),
    ],
)
def test_bad_sources_are_refused(prompt: list[int], more: dict[str, Any], says: str) -> None:
    model = load("bart")
    with Engine(model) as engine, pytest.raises(UserError, match=says):
        submit(engine, asked(model, prompt, **more))


def test_the_longest_source_and_answer_fit() -> None:
    model = load("bart")
    source = sources(model, 96)[0]
    with Engine(model) as engine:
        runs = submit(engine, asked(model, source, max_tokens=500))
        texts = finish(engine, *runs)
    assert [len(texts[0]), runs[0].finish_reason] == [94, "length"]  # of 96 positions, after two tokens of the start
    assert texts == [generated(model.module, source, 94)]


def test_a_text_without_a_source_is_no_input() -> None:
    with pytest.raises(UserError, match="an encoder-decoder model scores what follows a source, this text has none"):
        list(read_text(load("t5"), [9, 10], 0))


def test_a_draft_whose_encoder_is_smaller_than_the_source_drafts_nothing(tmp_path: Path) -> None:
    large = encoder_decoders.folder(tmp_path, "bart", 0)
    small = encoder_decoders.folder(tmp_path, "bart", 1, max_position_embeddings=16)
    prompt = sources(load("bart"), 30)[0]
    with outpace.LLM(large, draft=small, method="speculative", profile=False) as llm:
        result = llm.generate([prompt], max_tokens=8)[0]
    assert list(result.tokens) == generated(load("bart").module, prompt, 8)
    assert result.figures.drafted == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("pair")
    return encoder_decoders.folder(where, "t5"), tiny.folder(where, "gpt2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft": "gpt2"}, "the draft .*gpt2-0 is a decoder-only model, the target .*t5-0 is an encoder-decoder"),
        ({"target": "gpt2", "draft": "t5"}, "the draft .*t5-0 is an encoder-decoder model, the target .*gpt2-0 is a d"),
        ({"draft": "bart"}, r"does not fit the target .*: its answers start with the tokens \[2, 1\], the target's"),
        ({"draft": "t5", "drafter": "translated"}, "is an encoder-decoder model: drafter translated takes decoder"),
        ({"draft": "t5", "draft_window": 8}, "is an encoder-decoder model: draft_window takes decoder-only models"),
        ({"drafter": "layer_skip"}, "an encoder-decoder model cannot leave out sublayers"),
        ({"runtime": "native"}, "model_type 't5' .* is not supported by the runtime llama; --runtime transformers"),
        ({"runtime": "llama"}, "model_type 't5' .* is not supported by the runtime llama; --runtime transformers runs"),
    ],
    ids=str,
)
def test_what_takes_decoder_only_models_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    folders = dict(zip(("t5", "gpt2"), pair, strict=True))
    given = {name: folders.get(value, value) for name, value in options.items()}
    if given.get("draft") == "bart":
        given["draft"] = encoder_decoders.folder(tmp_path, "bart")
    with pytest.raises(UserError, match=says):
        outpace.LLM(given.pop("target", folders["t5"]), method="speculative", profile=False, **given)


def test_a_draft_of_another_tokenizer_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = encoder_decoders.folder(tmp_path, "t5", 3)
    file = other / "tokenizer.json"
    fields = json.loads(file.read_text())
    words = fields["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"does not fit the target .*: id \d+ is '.*' in one and '.*' in the other$"):
        outpace.LLM(pair[0], draft=other, method="speculative", profile=False)


def test_a_trace_is_of_decoder_only_models(pair: tuple[Path, Path]) -> None:
    loaded = load_model(pair[0])
    with pytest.raises(UserError, match="t5-0 is an encoder-decoder model: a trace takes decoder-only models"):
        trace.record(loaded, loaded, [[9]], trace.RecordOptions())


def test_marian_needs_a_tokenizer_file(tmp_path: Path) -> None:
    folder = encoder_decoders.folder(tmp_path, "marian")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"marian-0 is a Marian model without a tokenizer\.json that loads, its source"):
        load_model(folder)


def test_the_command_takes_the_prompt_as_the_source(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", PROMPTS[0], "--target", str(pair[0]), "--max-tokens", "6"]
    with pytest.raises(SystemExit) as done:
        main(command)
    assert not done.value.code
    tokenizer = load_model(pair[0]).tokenizer
    expected = generated(encoder_decoders.build("t5"), tokenizer.encode(PROMPTS[0]), 6)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(expected).strip("\n")
    with pytest.raises(SystemExit):
        main([*command, "--system", "Be brief."])
    assert "--system needs the chat template" in capsys.readouterr().err


def test_the_server_completes_sources_and_refuses_chats(pair: tuple[Path, Path]) -> None:
    with outpace.LLM(pair[0], method="autoregressive", profile=False) as llm:
        expected = llm.generate(PROMPTS[:2], max_tokens=6)
        num_tokens = sum(len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS[:2])
        with pytest.raises(UserError, match="draft_port takes decoder-only models"), served(llm, draft_port=0):
            pass
        with served(llm) as site:
            found = site.complete(PROMPTS[:2], max_tokens=6, temperature=0).json
            assert [choice["text"] for choice in found["choices"]] == [result.text for result in expected]
            assert found["usage"]["prompt_tokens"] == num_tokens
            image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
            for refused, says in (
                (site.complete(""), "the source has no text"),
                (site.complete("x", echo=True, logprobs=1), "no log-probabilities of prompt tokens"),
                (site.chat("hi"), "no chat template"),
                (site.chat([{"role": "user", "content": image}]), "image"),
            ):
                assert (refused.status, says in refused.error["message"]) == (400, True), refused.error
