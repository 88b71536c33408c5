"""Recurrent layers in the native runtime: bits of the emulation, of one-by-one decoding, and logits near torch's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import outpace_kernels as kernels
import pytest
import recurrent
import torch
from doubles import make_request
from passes import build, fresh, native_tiny, pieces, prefilled, text
from torch import Tensor

import outpace
from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.core.types import Request
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part, Session, chain
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import UnsupportedShape
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model

SHAPE = {"vocab_size": 97, "hidden_size": 80, "intermediate_size": 96, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 256}
QWEN = from_dict(
    SHAPE
    | {"model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 48, "tie_word_embeddings": True}
)
assert QWEN.recurrence is not None
TILED = replace(QWEN, recurrence=replace(QWEN.recurrence, is_tiled=True))
LFM = from_dict(
    SHAPE
    | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    | {"layer_types": ["conv", "conv", "full_attention", "conv"]}
)
CONFIGS = {"qwen": QWEN, "tiled": TILED, "lfm": LFM}


def pieces_and_state(model: NativeLlama) -> list[Tensor]:
    """Logits of trees and late nodes, and the state after the last of them."""
    session, found = pieces(model, 7)
    session.keep([0, 1])
    return [*found, torch.as_tensor(session._save_state())]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_kernels_equal_their_emulation(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace_kernels import emulation

    got = pieces_and_state(native_tiny(config))
    monkeypatch.setattr(native, "kernels", emulation)
    for mine, its in zip(got, pieces_and_state(native_tiny(config)), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", kernels.instruction_sets())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_instruction_set_gives_the_same_bits(config: LlamaConfig, name: str) -> None:
    expected = pieces_and_state(native_tiny(config, instruction_set="portable", threads=1))
    for mine, its in zip(pieces_and_state(native_tiny(config, instruction_set=name)), expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_near_the_torch_runtimes(config: LlamaConfig) -> None:
    """int8 weights and activations against float32; a row whose key and query are at right angles may differ more."""
    ours, its = native_tiny(config), build(Llama, config)
    tokens = text(ours, 40)
    rows = range(len(tokens))
    got = torch.as_tensor(ours.score([chain(ours.open(64, 64), tokens, rows)]))
    expected = its.score([chain(its.open(64, 64), tokens, rows)])
    similarities = torch.nn.functional.cosine_similarity(got, expected)
    assert similarities.median() > 0.99
    assert similarities.min() > 0.5


@pytest.mark.parametrize("config", [QWEN, TILED], ids=["qwen", "tiled"])
def test_the_emulated_delta_net_follows_the_formulas(config: LlamaConfig) -> None:
    """The published formulas in float64."""
    from outpace_kernels import emulated_recurrence as emulated

    sizes, generator = config.recurrence, np.random.default_rng(0)
    assert sizes is not None
    heads = (sizes.key_heads, sizes.value_heads, sizes.key_depth, sizes.value_depth)
    its = emulated.Recurrence(1, sizes.filter_length, sizes.channels, *heads, sizes.is_tiled)

    def numbers(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    rates, bias, norm, filters = (
        -np.exp(numbers(4)),
        numbers(4),
        numbers(48),
        numbers(sizes.filter_length, sizes.channels),
    )
    weights = emulated.RecurrentWeights(filters, None, rates.tolist(), bias.tolist(), norm.tolist())
    state = emulated.State(numbers(4, 16, 48), numbers(3, sizes.channels))
    expected, history = state.heads.astype(np.float64), state.history
    for _ in range(3):
        mixed = numbers(sizes.channels + sizes.value_width + 2 * sizes.value_heads)
        row, node = emulated.compute_row(its, weights, mixed, state, 1e-6)
        state = state.with_node(node)
        taps = np.concatenate([history, mixed[None, : sizes.channels]]).astype(np.float64)
        history = taps[1:]
        x = (taps * filters).sum(0)
        x /= 1 + np.exp(-x)
        gates, strengths, steps = np.split(mixed[sizes.channels :].astype(np.float64), [192, 196])
        out = []
        for head in range(4):
            key_head = head % 2 if sizes.is_tiled else head // 2
            query, key = x[key_head * 16 :][:16], x[32 + key_head * 16 :][:16]
            value, gate = x[64 + head * 48 :][:48], gates[head * 48 :][:48]
            query, key = query / np.sqrt((query**2).sum() + 1e-6) / 4, key / np.sqrt((key**2).sum() + 1e-6)
            expected[head] *= np.exp(rates[head] * np.log1p(np.exp(steps[head] + bias[head])))
            delta = (value - key @ expected[head]) / (1 + np.exp(-strengths[head]))
            expected[head] += np.outer(key, delta)
            read = query @ expected[head]
            out.append(read / np.sqrt((read**2).mean() + 1e-6) * norm * gate / (1 + np.exp(-gate)))
        np.testing.assert_allclose(row.reshape(4, 64)[:, :48], out, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state.heads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_random_trees_have_the_bits_of_plain_decoding(config: LlamaConfig, seed: int) -> None:
    """Nodes anywhere, also below nodes of earlier passes; any path is kept, with some of the nodes below it."""
    model, rng = native_tiny(config), random.Random(seed)
    session, committed = model.open(200, 60), list[int]()
    parents, tokens = list[int](), list[int]()

    def text_of(node: int) -> list[int]:
        path = []
        while node != PREFIX:
            path.append(tokens[node])
            node = parents[node]
        return committed + path[::-1]

    for _ in range(8):
        before = len(parents)
        new = [rng.choice([PREFIX, *range(before + place), before + place - 1]) for place in range(rng.randint(1, 6))]
        parents += new
        tokens += (added := [rng.randrange(model.vocab_size) for _ in new])
        got = model.score([Part(session, added, new, range(len(new)))])
        for place in range(len(new)):
            assert torch.equal(torch.as_tensor(got[place]), decoded(model, text_of(before + place)))
        if rng.random() < 0.3:
            continue
        path = list[int]()
        for node, parent in enumerate(parents):
            if parent == (path[-1] if path else PREFIX) and rng.random() < 0.7:
                path.append(node)
        live, last = list[int](), path[-1] if path else PREFIX
        for node, parent in enumerate(parents):
            if (parent == last and node not in path) or parent in live:
                live.append(node)
        session.keep(path, live)
        committed += [tokens[node] for node in path]
        places = {last: PREFIX} | {node: place for place, node in enumerate(live)}
        parents, tokens = [places[parents[node]] for node in live], [tokens[node] for node in live]


def decoded(model: Any, tokens: list[int]) -> Tensor:
    """Logits after a text that is decoded one by one."""
    session = model.open(len(tokens), 8)
    for token in tokens:
        logits = model.score([chain(session, [token], [0])])
        session.keep([0])
    return torch.as_tensor(logits[0])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_prompt_read_at_once_has_the_bits_of_plain_decoding(config: LlamaConfig) -> None:
    model = native_tiny(config)
    tokens = text(model, 30)
    assert torch.equal(torch.as_tensor(fresh(model, tokens)), decoded(model, tokens))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
@pytest.mark.parametrize("method", [Speculative, Card])
@pytest.mark.parametrize("config", [QWEN, LFM], ids=["qwen", "lfm"])
def test_texts_beside_cancelled_and_paused_requests_are_plain(
    config: LlamaConfig, method: type[Speculative | Card], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, begin alike, wait, pause, are called off, and come again with what was written. The draft is the
    same model."""
    chance, counts = random.Random(seed), Counter[str]()
    for place, name in ((Scheduler, "_pause"), (Session, "start_from")):
        monkeypatch.setattr(place, name, counted(getattr(place, name), name, counts))
    monkeypatch.setattr("outpace.engine.kv_memory._SNAPSHOT_TOKENS", 24)
    target, drafter = native_tiny(config), ModelDrafter(native_tiny(config), Options(width=2, tree_nodes=12))
    monkeypatch.setattr(drafter, "observe", counted(drafter.observe, "observe", counts))
    budget = 4 * target.session_bytes(256) / 2**30
    options = EngineOptions(nodes=6, rows=24, chunk=16, batch=5, kv_memory=budget)
    drafters = (None, InlineWorker(drafter)) if method is Card else (drafter, None)
    runs: list[tuple[Request, TokenSequence]] = []
    with Engine(target, *drafters, options) as engine:
        for _ in range(40):
            start = list(range(3, 3 + chance.randrange(1, 40)))
            over = [(one, run) for one, run in runs if run.finish_reason == "length"]
            if over and chance.random() < 0.5:
                before, run = chance.choice(over)
                start = [*before.prompt, *run.tokens, chance.randrange(97)][:70]
            asked: dict[str, Any] = {"seed": chance.randrange(4), "temperature": chance.choice((0.0, 1.0))}
            request = make_request(
                start, "gumbel" if asked["temperature"] else "greedy", chance.randrange(1, 150), **asked
            )
            runs.append((request, engine.submit(request, method, method.Options())))
            for _ in range(chance.randrange(12)):
                engine.step()
                assert engine.memory.used <= engine.memory.budget
            if chance.random() < 0.3:
                engine.abort(chance.choice(runs)[1])
        while engine.running or engine.waiting:
            engine.step()
    assert counts["observe"] > 100
    assert method is Card or min(counts["_pause"], counts["start_from"]) > 0, counts  # Card's depend on times
    assert {run.finish_reason for _, run in runs} == {"length", "abort"}
    with Engine(target, options=EngineOptions(batch=1)) as engine:
        for request, run in runs:
            alone = engine.submit(request, Autoregressive, Autoregressive.Options())
            while alone.finish_reason is None:
                engine.step()
            assert run.error is None
            assert run.tokens == alone.tokens[: len(run.tokens)]


def counted(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def count(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return call(*arguments, **options)

    return count


def test_a_session_starts_from_anothers_snapshot() -> None:
    model = native_tiny(QWEN)
    first, tokens = prefilled(model, text(model, 9)), text(model, 9)
    first.take_snapshot()
    model.score([chain(first, [1, 2, 3])])
    first.keep([0, 1, 2])
    assert [first.cut_below(length) for length in (8, 9, 11, 12)] == [0, 9, 9, 12]
    for length, more in ((9, []), (12, [1, 2, 3])):
        second = model.open(64, 16)
        second.start_from(first, length)
        got = model.score([chain(second, [5], [0])])
        assert torch.equal(torch.as_tensor(got[0]), decoded(model, [*tokens, *more, 5]))
    first.truncate(9)
    got = model.score([chain(first, [7], [0])])
    assert torch.equal(torch.as_tensor(got[0]), decoded(model, [*tokens, 7]))


def test_states_are_counted_as_memory() -> None:
    model, plain = native_tiny(QWEN), native_tiny(replace(QWEN, recurrence=None, recurrent_layers=()))
    sizes = QWEN.recurrence
    assert sizes is not None
    states = model.session_bytes(64) - model.kernels.Store.bytes_of([model.heads], 64)
    assert states >= QWEN.num_recurrent_layers * sizes.state_size * 4
    assert model.token_bytes == plain.token_bytes // 4  # only one layer of four has keys and values


def test_depths_that_are_no_multiples_of_sixteen_are_refused_with_the_number() -> None:
    assert QWEN.recurrence is not None
    for depth in (24, 528):
        sizes = replace(QWEN.recurrence, value_depth=depth, channels=64 + 4 * depth)
        with pytest.raises(UnsupportedShape, match=f"linear_value_head_dim is {depth}, .* multiples of 16 up to 512"):
            native_tiny(replace(QWEN, recurrence=sizes))


def test_states_leave_out_no_tokens() -> None:
    model = native_tiny(QWEN)
    session = prefilled(model, text(model, 9))
    with pytest.raises(UserError, match="cannot score after a prefix"):
        model.score([chain(session, [1])._replace(length=5)])


def test_a_bias_of_each_node_is_added() -> None:
    """Nodes with biases of their own are one tree all the same."""
    model = native_tiny(QWEN)
    session = prefilled(model, text(model, 9))
    bias = np.zeros((3, QWEN.num_layers, QWEN.intermediate_size), np.float32)
    part = Part(session, [1, 2, 3], [PREFIX, 0, 0], range(3))
    got = model.score([part._replace(mlp_bias=bias)])
    session.keep([])
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(model.score([part])))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Models by transformers, and their GGUF files in Q8_0; value heads are tiled in the first."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
        patch.setitem(recurrent.SHAPES, "native", ("Qwen3_5", recurrent.QWEN | sizes))
        patch.setitem(recurrent.SHAPES, "next", ("Qwen3Next", recurrent.QWEN | sizes | {"num_experts": 0}))
        for name in ("native", "next", "lfm2"):
            folder = tmp_path_factory.mktemp(name)
            model = recurrent.make(name, folder)
            found[name] = model, recurrent.write_gguf(folder, folder / "model.gguf", name, "Q8_0")
    return found


@pytest.mark.parametrize("name", ["native", "next", "lfm2"])
def test_a_files_logits_are_near_those_of_transformers(files: dict[str, tuple[Any, Path]], name: str) -> None:
    reference, file = files[name]
    ours, tokens = load_model(str(file), runtime="native").model, [3 * place % 250 + 3 for place in range(40)]
    assert isinstance(ours, NativeLlama)
    got = torch.as_tensor(ours.score([chain(ours.open(64, 64), tokens, range(len(tokens)))]))
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    similarities = torch.nn.functional.cosine_similarity(got, expected)
    assert similarities.median() > 0.99


@pytest.mark.parametrize("name", ["native", "lfm2"])
def test_texts_are_equal_under_all_methods(files: dict[str, tuple[Any, Path]], name: str) -> None:
    file, prompts = str(files[name][1]), ["abc abc abc abc", "the other one " * 9]
    settings: list[dict[str, Any]] = [
        {"method": "autoregressive"},
        {"method": "speculative", "draft": file},
        {"method": "speculative", "drafter": "ngram"},
        {"method": "speculative", "drafter": "lookahead"},
        {"method": "card", "draft": file},
        {"method": "auto", "draft": file},
    ]
    texts = []
    for options in settings:
        with outpace.LLM(file, **options) as llm:
            for _ in range(2):  # the second time, a part of the prompt is there already
                params = outpace.SamplingParams(max_tokens=24, temperature=0.7, seed=3)
                texts.append([answer.text for answer in llm.generate(prompts, params)])
    assert all(text == texts[0] for text in texts), texts


@pytest.mark.parametrize(("name", "layers"), [("native", "3"), ("native", "0-2"), ("lfm2", "0"), ("lfm2", "1-3")])
def test_any_layers_of_a_model_draft_for_it(files: dict[str, tuple[Any, Path]], name: str, layers: str) -> None:
    """The kinds of layers are those of the file's layers; torch runs a draft without attention."""
    with outpace.LLM(str(files[name][1]), f"layers:{layers}", method="speculative") as llm:
        fast = llm.stream("abc abc", max_tokens=24).finish()
        plain = llm.stream("abc abc", max_tokens=24, plain=True).finish()
    assert fast.tokens == plain.tokens
    assert fast.figures.drafted > 0
