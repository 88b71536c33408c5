"""The runtime against a slow reference, and against itself: trees, kept keys and values, forests, row by row."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import reference
import torch
from files import smollm2_file
from passes import assert_same, branch, fresh, prefilled, random_parents, text

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX, depths
from outpace.models.base import Part, chain
from outpace.models.llama.config.footprint import ENTRY_BYTES
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model

TINY = reference.TINY
UNTIED = replace(TINY, tie_embeddings=False, attention_bias=True, output_bias=True, mlp_bias=True)
MIXED = replace(TINY, head_norm=True, windows=(5, None, 19), rotary_layers=(True, False, True), attention_bias=True)
TINIES = {"tiny": TINY, "untied": UNTIED, "mixed": MIXED, "gemma": reference.GEMMA, "phi": reference.PHI}


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Row by row equality must hold with the threads that users run."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


def tiny(config: LlamaConfig, exact: bool | None = None, kv_dtype: str = "auto") -> Llama:
    tensor = reference.random_tensors(config).__getitem__
    return Llama.from_tensors(config, tensor, exact=exact, kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def smollm2() -> Llama:
    smollm2_file()
    return load_model(None, dtype="float32").model


@pytest.fixture(params=[*TINIES, *ENTRY_BYTES, pytest.param("smollm2", marks=[pytest.mark.smollm2, pytest.mark.long])])
def model(request: pytest.FixtureRequest) -> Llama:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return tiny(TINIES[request.param]) if request.param in TINIES else tiny(MIXED, kv_dtype=request.param)


@pytest.mark.parametrize("exact", [None, False])
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_scores_agree_with_the_reference(config: LlamaConfig, exact: bool | None) -> None:
    model = tiny(config, exact)
    tokens = text(model, 60)
    session = model.open(100, 100)
    got = model.score([chain(session, tokens, wanted=range(60))])
    expected = reference.logits(config, reference.random_tensors(config).__getitem__, tokens)
    assert (got - expected).abs().max() < 2e-4


def test_exact_mode_is_on_where_it_is_claimed() -> None:
    assert not tiny(TINY, exact=False).exact
    if torch.backends.mkldnn.is_available():
        assert tiny(TINY).exact


def test_a_tree_scores_as_its_paths_do(model: Llama) -> None:
    prompt = text(model, 37)
    parents, tokens = random_parents(24, 1), text(model, 24, 2)
    session = prefilled(model, prompt)
    got = model.score([Part(session, tokens, parents, range(24))])
    for node in range(24):
        path = [tokens[other] for other in branch(parents, node)]
        assert_same(model, got[node], fresh(model, prompt + path))


@pytest.mark.long
@pytest.mark.smollm2
def test_a_small_tree_of_the_real_model_scores_as_its_paths_do_and_is_kept(smollm2: Llama) -> None:
    prompt = text(smollm2, 12)
    parents, tokens = random_parents(6, 1), text(smollm2, 6, 2)
    session = prefilled(smollm2, prompt)
    got = smollm2.score([Part(session, tokens, parents, range(6))])
    for node in range(6):
        path = [tokens[other] for other in branch(parents, node)]
        assert_same(smollm2, got[node], fresh(smollm2, prompt + path))
    session.keep(branch(parents, 5))
    full = prefilled(smollm2, prompt + path)
    assert_same(smollm2, session.read(full.length), full.read(full.length))


def test_a_tree_grown_in_pieces_scores_as_one(model: Llama) -> None:
    prompt = text(model, 20)
    parents, tokens = random_parents(16, 3), text(model, 16, 4)
    whole = model.score([Part(prefilled(model, prompt), tokens, parents, range(16))])
    session = prefilled(model, prompt)
    pieces = [
        model.score([Part(session, tokens[start:stop], parents[start:stop], range(stop - start))])
        for start, stop in ((0, 1), (1, 6), (6, 16))
    ]
    assert_same(model, torch.cat(pieces), whole)


def test_kept_keys_and_values_equal_a_fresh_prefill(model: Llama) -> None:
    prompt, written = text(model, 30), []
    session = prefilled(model, prompt)
    keep: list[int] = []
    kept_tokens: list[int] = []
    for turn in range(6):
        parents, tokens = random_parents(12, turn), text(model, 12, 10 + turn)
        got = model.score([Part(session, tokens, parents, range(12), keep)])
        written += kept_tokens
        node = random.Random(turn).randrange(12)
        path = branch(parents, node)
        assert_same(model, got[node], fresh(model, prompt + written + [tokens[other] for other in path]))
        keep, kept_tokens = path, [tokens[other] for other in path]
    session.keep(keep)
    full = prompt + written + kept_tokens
    assert session.length == len(full)
    other = prefilled(model, full)
    assert_same(model, session.read(len(full)), other.read(len(full)))


def test_a_session_that_starts_from_another_equals_a_fresh_prefill(model: Llama) -> None:
    tokens = text(model, 12)
    first, second = model.open(64, 64), model.open(32, 64)
    model.score([chain(first, tokens)])
    first.keep(range(12))
    second.start_from(first, 9)
    first.truncate(0)  # the copy is independent
    again = model.score([chain(second, tokens[9:], range(3))])
    alone = model.score([chain(model.open(64, 64), tokens, range(9, 12))])
    assert_same(model, again, alone)
    with pytest.raises(ValueError, match="cannot start"):
        second.start_from(first, 0)


def test_live_nodes_survive_a_correction(model: Llama) -> None:
    prompt, tokens = text(model, 15), text(model, 8, 5)
    parents = [PREFIX, 0, 0, 1, 2, 3, 5, 4]
    session = prefilled(model, prompt)
    model.score([Part(session, tokens, parents, [])])
    session.keep([0, 1], [3, 5, 6])  # 3 is the new root, 5 and 6 hang below it
    got = model.score([Part(session, [7], [2], [0])])[0]
    assert_same(model, got, fresh(model, [*prompt, *(tokens[n] for n in (0, 1, 3, 5, 6)), 7]))


def test_a_forest_scores_as_its_trees_one_by_one(model: Llama) -> None:
    prompts = [text(model, count, count) for count in (5, 33, 64)]
    sizes = (1, 7, 12)
    trees = [(text(model, size, 20 + size), random_parents(size, size)) for size in sizes]
    alone = [
        model.score([Part(prefilled(model, prompt), *tree, range(size))])
        for prompt, tree, size in zip(prompts, trees, sizes, strict=True)
    ]
    sessions = [prefilled(model, prompt) for prompt in prompts]
    piece = chain(model.open(300, 300), text(model, 40, 9))  # a prompt's chunk travels along
    parts = [Part(s, *tree, range(size)) for s, tree, size in zip(sessions, trees, sizes, strict=True)]
    assert_same(model, model.score([parts[0], piece, *parts[1:]]), torch.cat(alone))


def test_chunks_of_a_prompt_equal_the_whole(model: Llama) -> None:
    prompt = text(model, 300)
    session = model.open(320, 300)
    start = 0
    for size in (1, 2, 64, 100, 132):
        model.score([chain(session, prompt[start : start + size], keep=range(session.pending))])
        start += size
    got = model.score([chain(session, [prompt[-1]], wanted=[0], keep=range(session.pending))])[0]
    assert_same(model, got, fresh(model, prompt))


def test_only_wanted_rows_are_scored(model: Llama) -> None:
    session = model.open(50, 50)
    got = model.score([chain(session, text(model, 10), wanted=[3, 9])])
    assert got.shape == (2, model.vocab_size)
    assert model.score([chain(session, [1], keep=range(10))]).shape == (0, model.vocab_size)


def test_a_shallow_model_shares_the_layers() -> None:
    model = tiny(TINY)
    same = model.select_layers([0, 1, 2])
    assert_same(model, fresh(same, [1, 2, 3]), fresh(model, [1, 2, 3]))
    assert not torch.equal(fresh(model.select_layers([0, 2]), [1, 2, 3]), fresh(model, [1, 2, 3]))


def test_a_full_session_says_so() -> None:
    session = tiny(TINY).open(4, 2)
    with pytest.raises(UserError, match="7 more tokens do not fit"):
        session.extend(range(PREFIX, 6))
    session.extend(range(PREFIX, 5))
    with pytest.raises(UserError, match="past 4 tokens"):
        session.keep(range(5))
    assert depths([PREFIX, 0, 1]) == [0, 1, 2]
