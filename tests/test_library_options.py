"""Every option of `SamplingParams` through the library, on a tiny random Llama and on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from commands import last_line, run_command
from files import CONFIG, smollm2_file, weights, write_gguf
from test_library import folder
from twins import adjusted_slowly, cut_slowly, log_softmax_slowly, processed_slowly

from outpace.api.llm import LLM, Result, Stream
from outpace.api.params import SamplingParams
from outpace.core.noise import gumbel, row_key
from outpace.models.llama.config import llama_config as llama
from outpace.models.load import Loaded, load_draft, load_model

METHODS: dict[str, dict[str, Any]] = {  # test_options.py has all of them, on a toy
    "speculative, tree": {"method": "speculative", "drafter": "model+ngram", "draft_length": 3},
    "card, thread": {"method": "card", "drafter": "model+ngram", "worker": "thread"},
}
SAMPLED = {"temperature": 1.0, "seed": 3}
PROCESSED = {"logprobs": 5, "logprobs_mode": "processed"}
INCLUDED = {"include_stop_str_in_output": True}
Ask = Callable[[Result, Sequence[str]], dict[str, Any]]  # from the bare answer and its tokens' texts to what is asked

ASKED: dict[str, Ask] = {
    "bare": lambda bare, texts: {},
    "ended": lambda bare, texts: {"ignore_eos": False},
    "sampled": lambda bare, texts: {"ignore_eos": False, **SAMPLED},
    "repetition": lambda bare, texts: {"repetition_penalty": 1.4, **SAMPLED},
    "presence": lambda bare, texts: {"presence_penalty": 1.5},
    "frequency": lambda bare, texts: {"frequency_penalty": 1.2, **SAMPLED},
    "bias": lambda bare, texts: {"logit_bias": {bare.tokens[1]: -4.0, str(bare.tokens[2]): 2}},
    "bad words": lambda bare, texts: {"bad_words": ["".join(texts[2:4]).strip() or "x", texts[5] or "x"]},
    "min tokens": lambda bare, texts: {"min_tokens": 8, "ignore_eos": False, **SAMPLED},
    "ignored end": lambda bare, texts: {"seed": 11, "temperature": 1.5},
    "filters": lambda bare, texts: {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "seed": 1 << 50},
    "stop strings": lambda bare, texts: {"stop": [across(texts, 4), "zzz"]},
    "stop string, included": lambda bare, texts: {"stop": across(texts, 3), "logprobs": 2, **INCLUDED},
    "chosen logprobs": lambda bare, texts: {"logprobs": 0},
    "five logprobs, processed": lambda bare, texts: {"presence_penalty": 0.7, "top_k": 4, **PROCESSED, **SAMPLED},
    "echo": lambda bare, texts: {"echo": True, "max_tokens": 5},
    "echo with logprobs": lambda bare, texts: {"echo": True, "logprobs": 5},
    "everything": lambda bare, texts: {
        **{"temperature": 0.9, "top_p": 0.95, "seed": 17, "min_tokens": 4, "ignore_eos": False, "echo": True},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, **PROCESSED},
        "logit_bias": {bare.tokens[0]: 1.5},
        "bad_words": ("".join(texts[2:4]).strip() or "x",),
        "stop": [across(texts, 6), "hello"],
    },
    "stop strings after eight tokens": lambda bare, texts: {"stop": [across(texts, 4), "zzz", "o"], "min_tokens": 8},
}


def across(texts: Sequence[str], place: int) -> str:
    """The end of one token's text and the beginning of the next's."""
    place = next(n for n in range(place, len(texts) - 1) if texts[n] and texts[n + 1])
    return texts[place][-1] + texts[place + 1][0]


@dataclass
class Bench:
    """A target with a draft, prompts, and what every request asks for."""

    target: Loaded
    draft: Loaded
    prompts: Sequence[Any]
    base: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] | None = None
    names: Sequence[str] = tuple(ASKED)
    asked: list[tuple[str, Any, SamplingParams]] = field(default_factory=list)
    plain: list[Result] = field(default_factory=list)

    def prepare(self) -> Bench:
        """What is asked, made from bare answers, and plain decoding's answers, each written alone."""
        with closing(LLM(self.target, method="autoregressive", reuse=False)) as llm:
            bare = [llm.stream(prompt, **self.base).finish() for prompt in self.prompts]
            for number, name in enumerate(self.names):
                place = number % len(self.prompts)
                asked = ASKED[name](bare[place], self.texts_of(bare[place].tokens))
                base = self.base.get("logit_bias", {})
                own = {
                    int(token): value + base.get(int(token), 0.0)
                    for token, value in asked.get("logit_bias", {}).items()
                }
                asked = {**self.base, **asked, "logit_bias": {**base, **own}}
                self.asked.append((name, self.prompts[place], SamplingParams(**asked)))
            self.plain = [llm.stream(prompt, params).finish() for _, prompt, params in self.asked]
        return self

    def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        stream = self.target.tokenizer.stream()
        return ["" if token in self.target.tokenizer.stop_ids else stream.push([token]) for token in tokens]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tiny random model, biased to a dozen tokens so that its text repeats."""
    target = load_model(folder(tmp_path_factory.mktemp("tiny"), "target"), dtype="float32")  # like the reference
    words = ("a", "b", "d", "e", " ", "hello", " world", "o", "12", "é", ".")
    known = {token for word in words for token in target.tokenizer.continuation(word)} | target.tokenizer.stop_ids
    base = {"max_tokens": 20, "logit_bias": dict.fromkeys(known, 50.0), "ignore_eos": True}
    tensors = {name: torch.from_numpy(values) for name, values in weights().items()}
    prompts = ("hello world 12 hello world 12", [{"role": "user", "content": "hello hello"}], "ab ab ab")
    return Bench(target, load_draft("layers:0", target), prompts, base, tensors).prepare()


@pytest.fixture(scope="module")
def smollm2() -> Bench:
    smollm2_file()
    target = load_model(None)
    draft = load_draft("layers:0,1,2,3,4,5,6,7,8,9,20,21,22,23,24,25,26,27,28,29", target)  # right one time in five
    prompts = ("one two three one two three one", "The sea, the sea, the")
    names = ("repetition", "bias", "bad words", "min tokens", "filters")
    names += ("stop strings", "echo with logprobs", "everything")
    return Bench(target, draft, prompts, {"max_tokens": 10, "ignore_eos": True}, None, names).prepare()


def parts_of(result: Result) -> tuple[Any, ...]:
    """Return the fields that must not depend on the method."""
    ends = (result.finish_reason, result.prompt_tokens)
    return (result.text, result.tokens, *ends, result.logprobs, result.prompt_logprobs)


def read(stream: Stream) -> Result:
    """Read a stream and check that its pieces make up the result."""
    pieces = list(stream)
    result = stream.finish()
    assert "".join(piece.text for piece in pieces) == result.text
    assert tuple(token for piece in pieces for token in piece.tokens) == result.tokens
    assert tuple(record for piece in pieces for record in piece.logprobs) == result.logprobs
    return result


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=[pytest.mark.smollm2, pytest.mark.long])])
@pytest.mark.parametrize("method", METHODS)
def test_every_option_at_once(request: pytest.FixtureRequest, method: str, name: str) -> None:
    bench: Bench = request.getfixturevalue(name)
    with closing(LLM(bench.target, bench.draft, batch=8, **METHODS[method])) as llm:
        streams = [llm.stream(prompt, params) for _, prompt, params in bench.asked]
        results = [read(stream) for stream in streams]
        assert llm.engine.worker is None or llm.engine.worker.failure is None
    for (option, _, _), mine, plain in zip(bench.asked, results, bench.plain, strict=True):
        assert parts_of(mine) == parts_of(plain), option
    assert sum(result.figures.accepted for result in results) > 0


def test_plain_decoding_equals_the_reference(tiny: Bench) -> None:
    """Every token is the choice of the float64 reference up to rounding."""
    assert tiny.tensors is not None
    texts = bytes_of(tiny)
    with closing(LLM(tiny.target, method="autoregressive")) as llm:
        for (name, prompt, params), plain in zip(tiny.asked, tiny.plain, strict=True):
            stream = llm.stream(prompt, params)
            request = stream._run.request
            stream.close()
            whole = [*request.prompt, *plain.tokens]
            rows = reference.logits(llama.from_dict(CONFIG), tiny.tensors.__getitem__, whole).tolist()
            for place, token in enumerate(plain.tokens):
                before = whole[: len(request.prompt) + place]
                row = rows[len(before) - 1]
                scores = log_softmax_slowly(adjusted_slowly(row, request, before, texts))
                if not request.sampling.is_greedy:
                    p = processed_slowly(row, request, before, texts)
                    assert p[token] > 0, f"{name}: token {place} is filtered out"
                    noise = gumbel([row_key(request.seed, request.choice, len(before))], len(p))[0].tolist()
                    scores = torch.log(torch.tensor(p)).tolist()
                    scores = [score + g for score, g in zip(scores, noise, strict=True)]
                assert scores[token] > max(scores) - 1e-2, f"{name}: token {place} is not the reference's"
            check_ends(tiny, params, plain, request.stop_ids)


def bytes_of(bench: Bench) -> list[bytes]:
    """Return the bytes that each token adds to an answer."""
    texts = bench.target.tokenizer.texts
    return [*(texts[token] for token in range(len(texts))), *[b""] * (bench.target.model.vocab_size - len(texts))]


def check_ends(bench: Bench, params: SamplingParams, plain: Result, stop_ids: frozenset[int]) -> None:
    texts = bench.texts_of(plain.tokens)
    count, text, is_stopped = cut_slowly(texts, params.stop, params.include_stop_str_in_output, params.min_tokens)
    assert count == len(plain.tokens)
    ended = plain.tokens[-1] in stop_ids
    assert plain.finish_reason == ("stop" if is_stopped or ended else "length")
    assert is_stopped or ended or count == params.max_tokens
    assert not stop_ids.intersection(plain.tokens[: max(params.min_tokens, len(plain.tokens) - 1)])
    shown = plain.text if not params.echo else plain.text[-len(text) :] if text else ""
    assert shown.rstrip("\ufffd") == text.rstrip("\ufffd")


def test_the_options_change_texts_and_finish_reasons(tiny: Bench) -> None:
    """The comparison above needs options that have an effect."""
    by_name = {name: result for (name, _, _), result in zip(tiny.asked, tiny.plain, strict=True)}
    assert {result.finish_reason for result in tiny.plain} == {"stop", "length"}
    assert len({result.tokens for result in tiny.plain}) > 8
    assert by_name["stop strings"].finish_reason == "stop"
    assert by_name["stop string, included"].finish_reason == "stop"
    assert by_name["echo"].text.startswith(str(tiny.asked[list(ASKED).index("echo")][1])[:2])
    assert set(ASKED) == set(by_name)


@pytest.mark.parametrize("method", ["autoregressive", "auto"])
def test_the_command_writes_no_bad_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    asked = ["generate", "hello", "--target", write_gguf(tmp_path / "tiny.gguf"), "--method", method]
    asked += ["--max-tokens", "40", "--ignore-eos", "--temperature", "1.5", "--json"]
    free = last_line(run_command(*asked)[1])["text"]
    words = [word for word in (free[3:5], free[11:14], free[20]) if "\ufffd" not in word]
    held = last_line(run_command(*asked, *(flag for word in words for flag in ("--bad-words", word)))[1])["text"]
    assert words
    assert held
    assert not any(word in held for word in words)
