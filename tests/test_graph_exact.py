"""Captured forwards in exact mode, by the stand-in for a capture: the bits of a row are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from files import model_folder
from passes import TINIES, branch, build, random_parents, text, tiny
from turns import in_turn

import outpace
from outpace.core.errors import UserError
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda import runtime
from outpace.models.llama.cuda.runtime import ExactGraphLlama
from outpace.models.llama.torch import attention
from outpace.models.llama.torch.attention import ExactAttention, exact_weights
from outpace.models.llama.torch.linear import FIXED, Linear, rows_are_independent
from outpace.models.llama.torch.runtime import Llama
from outpace.models.options import KV_DTYPES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(config: LlamaConfig = reference.TINY, **options: Any) -> ExactGraphLlama:
    model = build(ExactGraphLlama, config, exact=True, **options)
    assert model.exact
    return model


def written(model: Llama, tokens: list[int], prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after each token but the prompt's, by plain decoding, token by token; and what is held in the end."""
    session = model.open(len(tokens) + 1, 64)
    for start in range(0, prompt, 50):
        model.score([chain(session, tokens[start : min(start + 50, prompt)], keep=range(session.pending))])
    rows = [model.score([chain(session, [token], [0], keep=range(session.pending))]) for token in tokens[prompt:]]
    session.keep([0])
    return torch.cat(rows), session.read(len(tokens))


def check_against_plain(model: Llama) -> None:
    """Score and keep trees of several sizes in a batch with other sessions, and the same texts token by token."""
    rng, prompts = random.Random(3), [text(model, 70 + 9 * number, number) for number in range(3)]
    sessions = [model.open(300, 200) for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        for start in range(0, len(prompt), 64):
            model.score([chain(session, prompt[start : start + 64], keep=range(session.pending))])
    keeps: list[list[int]] = [list(range(session.pending)) for session in sessions]
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]
    for turn in range(6):
        chosen = rng.sample(range(3), rng.randrange(1, 4))
        forest, trees = [], []
        for number in chosen:
            count = rng.choice([1, 3, 20, 41])
            trees.append((text(model, count, turn), random_parents(count, turn + number)))
            forest.append(Part(sessions[number], *trees[-1], range(count), keeps[number]))
        scores = model.score(forest).split([len(tokens) for tokens, _ in trees])
        for number, rows, (tokens, parents) in zip(chosen, scores, trees, strict=True):
            keeps[number] = branch(parents, rng.randrange(len(tokens)))
            texts[number] += [tokens[node] for node in keeps[number]]
            seen[number] += [rows[node] for node in keeps[number]]
    for number, session in enumerate(sessions):
        session.keep(keeps[number])
        scores, held = written(model, texts[number], len(prompts[number]))
        assert torch.equal(torch.stack(seen[number]), scores)
        assert torch.equal(session.read(len(texts[number])), held)


@pytest.mark.parametrize(("name", "dtype"), in_turn(TINIES, DTYPES), ids=str)
def test_trees_batches_and_kept_keys_have_the_bits_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    check_against_plain(exact(TINIES[name], dtype=dtype))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_exact_with_keys_and_values_in_fewer_bits(kv_dtype: str) -> None:
    check_against_plain(exact(kv_dtype=kv_dtype))


def test_a_long_chunk_is_not_captured_and_has_the_same_bits() -> None:
    model = exact(dtype=torch.bfloat16)
    prompt = text(model, 150)
    session = model.open(200, 200)
    scores = model.score([chain(session, prompt, range(40, 150))])
    session.keep(range(150))
    plain, held = written(model, prompt, 40)
    assert torch.equal(scores, plain)
    assert torch.equal(session.read(150), held)


def test_more_sessions_than_rows_of_a_product() -> None:
    config = replace(reference.TINY, num_layers=1)
    model = exact(config)
    texts = [text(model, 5, number) for number in range(20)]
    together = model.score([chain(model.open(9, 9), tokens, range(5)) for tokens in texts]).split(5)
    for tokens, rows in zip(texts, together, strict=True):
        assert torch.equal(model.score([chain(model.open(9, 9), tokens, range(5))]), rows)


def test_the_bits_are_those_of_the_exact_torch_runtime() -> None:
    model, twin = exact(), tiny()
    if FIXED not in twin.row_counts:
        pytest.skip(f"oneDNN's product of {FIXED} rows differs on this machine")
    prompt, parents = text(model, 40), random_parents(20, 1)
    rows = []
    for one in (model, twin):
        session = one.open(100, 100)
        one.score([chain(session, prompt)])
        rows.append(one.score([Part(session, text(model, 20), parents, range(20), range(40))]))
    assert torch.equal(*rows)


def test_exact_attention_has_no_order() -> None:
    """Slots, sessions and nodes elsewhere, more of them hidden: the same float64 bits."""
    generator = torch.Generator().manual_seed(1)

    def on_grid(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2**20).round() / 2**20

    query, (keys, values) = on_grid(2 * 3, 4, 8), on_grid(2, 2, 2, 30, 8)
    hidden = torch.rand(2, 3, 30, generator=generator) < 0.3
    expected = attention.attend_batch_exactly(query, keys, values, hidden)
    order = torch.randperm(30, generator=generator)
    moved = attention.attend_batch_exactly(
        query, *(held[:, :, order].contiguous() for held in (keys, values)), hidden[..., order]
    )
    assert torch.equal(moved, expected)
    wide = [
        torch.cat([held, torch.full((2, 2, 34, 8), 1e308, dtype=torch.float64)], 2).contiguous()
        for held in (keys, values)
    ]
    padded = torch.cat([hidden, torch.ones(2, 3, 34, dtype=torch.bool)], 2)
    assert torch.equal(attention.attend_batch_exactly(query, *wide, padded), expected)
    alone = attention.attend_batch_exactly(query.view(2, 3, 4, 8)[1, 1:2], keys[1:], values[1:], hidden[1:, 1:2])
    assert torch.equal(alone, expected.view(2, 3, 32)[1, 1:2])
    plain = (query[0, 0] @ keys[0, 0].T).masked_fill(hidden[0, 0], -torch.inf).softmax(-1) @ values[0, 0]
    torch.testing.assert_close(expected[0, :8], plain, atol=1e-6, rtol=1e-6)
    scores = on_grid(50, 1000)
    assert torch.equal(exact_weights(scores.clone()), exact_weights(scores.flip(-1).contiguous()).flip(-1))


def by_place(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return x * torch.linspace(1, 1.001, len(x))[:, None]


def by_neighbours(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return x + 1e-6 * x.abs().sum()


@pytest.mark.parametrize("linear", [by_place, by_neighbours])
def test_products_that_depend_on_place_or_neighbours_are_found(linear: Linear) -> None:
    assert rows_are_independent([(lambda x, residual=None: 2 * x, 8)], FIXED, torch.float32, torch.device("cpu"))
    assert not rows_are_independent([(linear, 8)], FIXED, torch.float32, torch.device("cpu"))


def test_exact_mode_is_refused_if_products_depend_on_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "rows_are_independent", lambda *_: False)
    with pytest.raises(UserError, match="whose products of 64 rows give a row other bits at another place"):
        outpace.load(model_folder(tmp_path), graphs="eager", exact=True)


def test_exact_attention_is_as_near_as_float32s() -> None:
    """Numbers are rounded to their heads' grids, not beyond: exact attention is as near as float32's."""
    model, twin = exact(), tiny(exact=False)
    assert all(isinstance(attention, ExactAttention) for attention in model._attention)
    tokens = text(model, 60)
    rows = [one.score([chain(one.open(60, 60), tokens, range(60))]) for one in (model, twin)]
    torch.testing.assert_close(*rows, atol=2e-4, rtol=2e-4)
