"""The runtime of captured forwards, by the stand-in for a capture, against the runtime that it is made from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from doubles import make_request
from files import model_folder
from graph_rules import CheckedCapture
from passes import TINIES, branch, build, random_parents, text
from turns import in_turn

import outpace
from outpace.core import registry
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda.captures import Captures, HostRead
from outpace.models.llama.cuda.pool import GraphSession
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.llama.torch.attention import FastAttention, attend_folded
from outpace.models.llama.torch.runtime import Llama
from outpace.models.options import KV_DTYPES

HALVES = [torch.bfloat16, torch.float16]


graphs, slow = partial(build, GraphLlama), partial(build, Llama, exact=False)


def fed(model: Llama, prompt: list[int]) -> GraphSession:
    session = model.open(len(prompt) + 200, 300)
    for start in range(0, len(prompt), 64):
        model.score([chain(session, prompt[start : start + 64], keep=range(session.pending))])
    session.keep(range(session.pending))
    return session


def after(model: Llama, tokens: list[int]) -> torch.Tensor:
    """Scores after a text, by a session of its own."""
    return model.score([chain(fed(model, tokens[:-1]), tokens[-1:], [0])])[0]


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_a_tree_scores_as_its_paths_do_and_as_the_slow_runtime(config: LlamaConfig) -> None:
    model, twin = graphs(config), slow(config)
    prompt, parents, tokens = text(model, 37), random_parents(24, 1), text(model, 24, 2)
    got = model.score([Part(fed(model, prompt), tokens, parents, range(24))])
    near(got, twin.score([Part(fed(twin, prompt), tokens, parents, range(24))]))
    for node in (0, 7, 23):
        near(got[node], after(model, prompt + [tokens[other] for other in branch(parents, node)]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precisions_are_as_near_to_float32_as_those_of_the_slow_runtime(dtype: torch.dtype) -> None:
    runtimes = slow(), graphs(dtype=dtype), slow(dtype=dtype)
    prompt, parents, tokens = text(runtimes[0], 20), random_parents(9, 1), text(runtimes[0], 9, 2)
    rows = [runtime.score([Part(fed(runtime, prompt), tokens, parents, range(9))]) for runtime in runtimes]
    assert rows[1].dtype == dtype
    errors = [float((row.float() - rows[0]).abs().mean()) for row in rows]
    assert 0 < errors[1] < 1.5 * errors[2]


def test_walks_of_many_sessions_equal_the_slow_runtime() -> None:
    """Sessions come and go, trees of all sizes, kept paths, long pieces: rows move, the pool grows, graphs replay."""
    rng, model, twin = random.Random(5), graphs(), slow()
    pairs: list[tuple[GraphSession, object]] = []
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(40):
        if len(pairs) < 2 or (len(pairs) < 6 and rng.random() < 0.4):
            pairs.append((model.open(400, 100), twin.open(400, 100)))
        if len(pairs) > 3 and rng.random() < 0.2:
            pairs.pop(rng.randrange(len(pairs)))
        forests: tuple[list[Part], list[Part]] = ([], [])
        for pair in rng.sample(pairs, rng.randrange(1, len(pairs) + 1)):
            count = rng.choice([1, 2, 5, 12, 33, 70])
            if pair[1].length + pair[1].pending + count > 380:
                continue
            path = None
            if rng.random() < 0.7:
                path = branch(pair[1]._nodes.parents(), rng.randrange(pair[1].pending)) if pair[1].pending else []
            tokens, parents = text(model, count, turn), random_parents(count, turn)
            if path is None:
                parents = [parent + pair[1].pending if parent >= 0 else parent for parent in parents]
            for session, forest in zip(pair, forests, strict=True):
                forest.append(Part(session, tokens, parents, range(0, count, 2), path))
        if forests[0]:
            got, expected = model.score(forests[0]), twin.score(forests[1])
            near(got, expected)
            before.append((got, got.clone()))
        if rng.random() < 0.2:
            mine, other = rng.choice(pairs)
            path = branch(other._nodes.parents(), rng.randrange(other.pending)) if other.pending else []
            mine.keep(path), other.keep(path)
            near(mine.read(mine.length), other.read(other.length))
    for given, copy in before:
        assert torch.equal(given, copy), "a pass wrote into what an earlier one gave"
    for mine, other in pairs:
        near(mine.read(mine.length), other.read(other.length))
    assert model.captures.count > 10


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_fewer_bits_are_stored_like_the_slow_runtimes(kv_dtype: str) -> None:
    model, twin = graphs(kv_dtype=kv_dtype), slow(kv_dtype=kv_dtype)
    prompt, parents, tokens = text(model, 37), random_parents(24, 1), text(model, 24, 2)
    mine, its = fed(model, prompt), fed(twin, prompt)
    got, expected = (one.score([Part(s, tokens, parents, range(24))]) for one, s in ((model, mine), (twin, its)))
    assert (got - expected).norm() < 1e-3 * expected.norm(), "numbers on a border fall to either side, few do"
    count = mine.length + mine.pending
    before = mine.read(count).view(model.num_layers, 2 * model.config.num_kv_heads, count, -1)
    path = branch(parents, 23)
    mine.keep(path)
    kept = before[:, :, [*range(37), *(37 + node for node in path)]]
    assert torch.equal(mine.read(mine.length), kept.flatten())
    assert model.pool.kv.dtype == getattr(torch, kv_dtype)


@pytest.mark.parametrize("kind", [GraphLlama, ExactGraphLlama])
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_captured_passes_return_hidden_states(config: LlamaConfig, kind: Any) -> None:
    """Of chains, trees and long chunks in one call, by passes that are captured once."""
    model, twin = build(kind, config), slow(config)
    layers = (config.num_layers, 0, 2)
    prompts = [text(model, count, count) for count in (37, 5, 90, 1)]
    parts = [
        [
            Part(fed(one, prompt), text(one, nodes, nodes), random_parents(nodes, 1), rows, hidden_rows=shown)
            for prompt, nodes, rows, shown in zip(
                prompts, (24, 3, 70, 1), (range(24), [2], [69], []), ([0, 7, 23], [1], [3, 69], []), strict=True
            )
        ]
        for one in (model, twin)
    ]
    got, expected = model.score_hidden(parts[0], layers), twin.score_hidden(parts[1], layers)
    assert got.hidden is not None
    assert got.hidden.shape == (3, 6, config.hidden_size)
    near(got.logits, expected.logits)
    near(got.hidden, expected.hidden)
    session, kept = fed(model, prompts[0]), got.hidden.clone()
    part = chain(session, [1, 2, 3], [2])._replace(hidden_rows=[0, 1, 2])
    model.score_hidden([part], layers)
    before = model.captures.count
    for token in range(9):
        model.score_hidden([part._replace(tokens=[token, 1, 2], keep=[0])], layers)
    assert model.captures.count == before
    assert torch.equal(got.hidden, kept), "a pass wrote into what an earlier one gave"


def test_few_captures_serve_many_passes() -> None:
    model = graphs()
    session = fed(model, text(model, 10))
    model.score([chain(session, [1, 2, 3], [2])])
    before = model.captures.count
    for token in range(20):
        model.score([chain(session, [token, 1, 2], [2], keep=[0])])
    assert model.captures.count == before


@pytest.mark.parametrize("hidden", [(), (0, 2)])
def test_prompts_are_read_in_one_captured_pass_or_in_one_other(
    hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 tokens by a captured pass; longer ones, and too many of them for a bucket, together in one pass."""
    model, twin, uncaptured = graphs(), slow(), list[int]()
    run = Llama._score_hidden
    for counts, expected in (((100, 3, 200), []), ((300, 5, 310), [2]), ((90,) * 40, [40])):
        runtimes = model, twin
        parts = [
            [
                chain(one.open(320, 320), text(one, count, count), [count - 1])._replace(hidden_rows=[0, count - 2])
                for count in counts
            ]
            for one in runtimes
        ]
        wanted = twin.score_hidden(parts[1], hidden)
        with monkeypatch.context() as patched:
            patched.setattr(Llama, "_score_hidden", lambda *given: (uncaptured.append(len(given[1])), run(*given))[1])
            got = model.score_hidden(parts[0], hidden)
        assert uncaptured == expected
        uncaptured.clear()
        near(got.logits, wanted.logits)
        if hidden:
            near(got.hidden, wanted.hidden)


def test_passes_that_were_captured_in_advance_are_used() -> None:
    model = graphs()
    model.reserve_sessions(6, 1 << 30)
    model.capture_passes([(1, 1), (1, 4), (4, 4), (1, 128), (64, 64)], (1,))
    before, kv = model.captures.count, model.pool.kv
    sessions = [model.open(100, 40) for _ in range(4)]
    for session in sessions:
        session.reserve(60)
    model.score_hidden([chain(session, [1, 2, 3], [2]) for session in sessions], (1,))
    model.score_hidden([chain(sessions[0], [5], [0], keep=[0, 1, 2])], (1,))
    assert model.pool.kv is kv
    assert model.captures.count <= before + 2, "what moves the kept nodes, and an output layer of four rows"


@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_an_engine_captures_what_its_rounds_need(rule: str) -> None:
    """Of target and draft: rounds of full batches move no store, and capture rows of logits alone."""
    models = graphs(), build(GraphLlama, replace(reference.TINY, num_layers=1), is_eager=True)
    drafter = ModelDrafter(models[1], Options(width=2))
    speculative = registry.find("decoders", "speculative")
    with Engine(models[0], drafter, options=EngineOptions(nodes=4, batch=2)) as engine:
        engine.capture_passes()
        before = [(model.pool.kv, set(model.captures._made)) for model in models]
        requests = [make_request(text(models[0], 20 * n + 5, n), rule, max_tokens=9) for n in range(2)]
        runs = [engine.submit(one, speculative, speculative.Options(2)) for one in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
    assert [len(run.tokens) for run in runs] == [9, 9]
    for model, (store, made) in zip(models, before, strict=True):
        assert model.pool.kv is store
        assert {key[0] for key in model.captures._made if key not in made} <= {"head"}


def test_more_sessions_than_a_pass_takes() -> None:
    config = replace(reference.TINY, num_layers=1)
    model, twin = graphs(config), slow(config)
    texts = [text(model, 3 + number % 5, number) for number in range(37)]
    pairs = [(model.open(20, 10), twin.open(20, 10)) for _ in texts]
    for which, runtime in enumerate((model, twin)):
        runtime.score([chain(pair[which], tokens) for pair, tokens in zip(pairs, texts, strict=True)])
    order = list(range(37))
    random.Random(1).shuffle(order)
    rows = [
        runtime.score([chain(pairs[n][which], [n], [0], keep=range(len(texts[n]))) for n in order])
        for which, runtime in enumerate((model, twin))
    ]
    near(*rows)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("is_hidden", [True, False])
def test_folded_attention_over_chunks_of_prompts(heads: tuple[int, int], is_hidden: bool) -> None:
    """It may run on a CPU too: the heads that share keys are laid out as on a GPU."""
    queries, groups = heads
    numbers = torch.Generator().manual_seed(1)
    query = torch.randn(9, queries, 16, generator=numbers)
    keys, values = (torch.randn(groups, 21, 16, generator=numbers) for _ in range(2))
    hidden = torch.full((9, 9), -torch.inf).triu(1).double() if is_hidden else None
    expected, got = (torch.empty(9, queries * 16) for _ in range(2))
    FastAttention(torch.float32).attend(query, keys, values, hidden, expected)
    mask = None if hidden is None else torch.nn.functional.pad(hidden.float(), (12, 0))
    attend_folded(query, keys, values, mask, got)
    near(got, expected)


def test_a_chunk_of_a_prompt_has_a_pass_apart_from_short_trees() -> None:
    model, twin = graphs(), slow()
    prompts, piece = [text(model, 5 + number, number) for number in range(9)], text(model, 40, 99)
    pairs = [(fed(model, prompt), fed(twin, prompt)) for prompt in prompts]
    rows = []
    for which, runtime in enumerate((model, twin)):
        parts = [chain(pair[which], [7, 8], [1]) for pair in pairs]
        parts.insert(4, chain(runtime.open(60, 60), piece, [39, 3]))
        rows.append(runtime.score(parts))
    near(*rows)
    sizes = {key[2:4] for key in model.captures._made if key[0] == "pass"}
    assert {(16, 2), (1, 64)} <= sizes
    assert (16, 64) not in sizes


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0]) + x,
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.to("meta"),
        lambda x: x.resize_(9),
    ],
)
def test_the_stand_in_refuses_what_no_graph_replays(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(HostRead):
        CheckedCapture(lambda: read(torch.ones(4)), [torch.ones(1)])


def test_the_stand_in_runs_the_same_callable_on_what_the_buffers_hold_now() -> None:
    given, result = torch.ones(3), torch.zeros(3)
    replayed = CheckedCapture(lambda: result.copy_(given * 2), [given, result])
    given.fill_(4)
    replayed.replay()
    assert result.tolist() == [8, 8, 8]


def test_a_buffer_that_moves_or_is_made_within_a_pass_is_refused() -> None:
    given = torch.ones(3)
    replayed = CheckedCapture(lambda: given.add_(1), [given])
    given.data = torch.ones(3)
    with pytest.raises(HostRead, match="moved"):
        replayed.replay()
    captures = Captures(True)
    with pytest.raises(HostRead, match="made within"):
        captures.prepare("pass", partial(captures.buffers, "late", lambda: torch.ones(1)), given)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_numbers_that_overflow_spoil_no_other_request(kv_dtype: str) -> None:
    config = replace(reference.TINY, tie_embeddings=False)
    tensors = reference.random_tensors(config)
    tensors["model.embed_tokens.weight"][7] = torch.inf
    model = GraphLlama.from_tensors(config, tensors.__getitem__, kv_dtype=kv_dtype)
    expected = after(model, [1, 2, 3])
    bad, good = fed(model, [7] * 40), fed(model, [1, 2])
    rows = model.score([chain(bad, [7], [0]), chain(good, [3], [0])])
    assert not rows[0].isfinite().all()
    assert model.pool.kv.isfinite().all()
    near(rows[1], expected)
    del bad
    near(after(model, [1, 2, 3]), expected)  # in the row that the other had


STEPS = {"drafter": "multi_step", "steps": 4}  # several steps in one graph
EXACT = {"dtype": "bfloat16", "exact": True}
METHODS: list[dict[str, Any]] = [
    {"method": "speculative", "drafter": "ngram"},
    {"method": "speculative"},
    {"method": "speculative", **STEPS},
    {"method": "card", "worker": "thread", **STEPS},
    {"method": "auto", **STEPS},
    {"method": "auto", **EXACT},
    {"method": "card", "worker": "thread", **EXACT},
    {"method": "card", "worker": "inline", "drafter": "model+ngram", **EXACT},
    {"method": "speculative", **EXACT},
]


@pytest.mark.parametrize(("options", "temperature"), in_turn(METHODS, [0.0, 0.9]), ids=str)
def test_texts_are_those_of_plain_decoding(tmp_path: Path, options: dict[str, Any], temperature: float) -> None:
    folder = model_folder(tmp_path)
    draft = None if options.get("drafter") == "ngram" else "layers:0"
    prompts = ["the cat sat on the cat sat on the", "a b a b a b", "the"]
    sampling = {"max_tokens": 24, "temperature": temperature, "seed": 5}
    with outpace.load(folder, draft, graphs="eager", profile=False, **options) as llm:
        assert isinstance(llm.target.model, ExactGraphLlama if "exact" in options else GraphLlama)
        plain = [llm.generate([prompt], plain=True, **sampling)[0].tokens for prompt in prompts]
        assert [result.tokens for result in llm.generate(prompts, **sampling)] == plain
        if "steps" in options and options["method"] != "auto":
            assert any(key[0] == "steps" for key in llm.draft.model.captures._made)
    if "exact" not in options:
        with outpace.load(folder, None, graphs="off", dtype="float32", exact=False, method="autoregressive") as llm:
            assert [result.tokens for result in llm.generate(prompts, **sampling)] == plain
