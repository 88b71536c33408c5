"""Both runtimes of the Llama family against a slow reference, and against themselves: trees, kept keys and values,
forests, row by row."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from passes import (
    NATIVE_TINIES,
    TINIES,
    TINY,
    UNCAPTURED,
    assert_same,
    branch,
    fresh,
    models,
    native_tiny,
    prefilled,
    random_parents,
    text,
    tiny,
)

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX, depths
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig

RUNTIMES = [tiny, native_tiny]


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Row by row equality must hold with the threads that users run."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


# test_architectures.py compares the others with transformers
IN_REFERENCE, NATIVE_IN_REFERENCE = (
    {name: config for name, config in given.items() if not config.full_heads}
    for given in (TINIES | UNCAPTURED, NATIVE_TINIES)
)


@pytest.fixture(params=models(None))
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.parametrize("exact", [None, False])
@pytest.mark.parametrize("config", IN_REFERENCE.values(), ids=IN_REFERENCE)
def test_logits_agree_with_the_reference(config: LlamaConfig, exact: bool | None) -> None:
    assert difference_to_reference(tiny(config, exact), config).abs().max() < 1e-6


@pytest.mark.parametrize("config", NATIVE_IN_REFERENCE.values(), ids=NATIVE_IN_REFERENCE)
def test_native_logits_follow_the_reference(config: LlamaConfig) -> None:
    """Rounding to int8 moves random models by up to a fifth; a wrong wiring moves them by more than their norm."""
    assert difference_to_reference(native_tiny(config), config).norm() < 0.25


def difference_to_reference(model: Any, config: LlamaConfig) -> torch.Tensor:
    """Logits of a text minus the reference's, as a fraction of its norm."""
    tokens = text(model, 60)
    got = model.score([chain(model.open(100, 100), tokens, logit_rows=range(60))])
    expected = reference.logits(config, reference.random_tensors(config).__getitem__, tokens)
    return (got - expected) / expected.norm()


def test_exact_mode_is_the_default_where_it_is_available() -> None:
    assert not tiny(exact=False).exact
    if torch.backends.mkldnn.is_available():
        assert tiny().exact


def test_a_tree_scores_as_its_paths_do(model: Any) -> None:
    prompt, parents, tokens = text(model, 37), random_parents(24, 1), text(model, 24, 2)
    got = model.score([Part(prefilled(model, prompt), tokens, parents, range(24))])
    for node in range(0, 24, 1 if model.num_layers < 10 else 4):  # the shipped model's passes take long
        assert_same(model, got[node], fresh(model, prompt + [tokens[other] for other in branch(parents, node)]))


def test_a_tree_grown_in_pieces_scores_as_one(model: Any) -> None:
    prompt, parents, tokens = text(model, 20), random_parents(16, 3), text(model, 16, 4)
    whole = model.score([Part(prefilled(model, prompt), tokens, parents, range(16))])
    session = prefilled(model, prompt)
    pieces = [
        model.score([Part(session, tokens[start:stop], parents[start:stop], range(stop - start))])
        for start, stop in ((0, 1), (1, 6), (6, 16))
    ]
    assert_same(model, torch.cat(pieces), whole)


def test_kept_keys_and_values_equal_a_fresh_prefill(model: Any) -> None:
    written, keep = text(model, 30), list[int]()
    session = prefilled(model, written)
    for turn in range(6):
        parents, tokens = random_parents(12, turn), text(model, 12, 10 + turn)
        got = model.score([Part(session, tokens, parents, range(12), keep)])
        node = random.Random(turn).randrange(12)
        keep = branch(parents, node)
        written += [tokens[other] for other in keep]
        assert_same(model, got[node], fresh(model, written))
    session.keep(keep)
    assert session.length == len(written)
    assert_same(model, session.read(len(written)), prefilled(model, written).read(len(written)))


def test_a_session_that_starts_from_another_equals_a_fresh_prefill(model: Any) -> None:
    tokens = text(model, 12)
    first, second = model.open(64, 64), model.open(32, 64)
    model.score([chain(first, tokens)])
    first.keep(range(12))
    second.start_from(first, 9)
    first.truncate(0)
    model.score([chain(first, text(model, 12, 3))])  # the copy is independent
    again = model.score([chain(second, tokens[9:], range(3))])
    assert_same(model, again, model.score([chain(model.open(64, 64), tokens, range(9, 12))]))
    with pytest.raises(ValueError, match="cannot start"):
        second.start_from(first, 0)


def test_live_nodes_survive_a_correction(model: Any) -> None:
    prompt, tokens = text(model, 15), text(model, 8, 5)
    session = prefilled(model, prompt)
    model.score([Part(session, tokens, [PREFIX, 0, 0, 1, 2, 3, 5, 4], [])])
    session.keep([0, 1], [3, 5, 6])  # 3 is the new root, 5 and 6 hang below it
    got = model.score([Part(session, [7], [2], [0])])[0]
    assert_same(model, got, fresh(model, [*prompt, *(tokens[n] for n in (0, 1, 3, 5, 6)), 7]))


def test_a_forest_scores_as_its_trees_one_by_one(model: Any) -> None:
    prompts, sizes = [text(model, count, count) for count in (5, 33, 64)], (1, 7, 12)
    trees = [(text(model, size, 20 + size), random_parents(size, size), range(size)) for size in sizes]
    alone, parts = (
        [Part(prefilled(model, prompt), *tree) for prompt, tree in zip(prompts, trees, strict=True)] for _ in range(2)
    )
    piece = chain(model.open(300, 300), text(model, 40, 9))  # a prompt's chunk in the same pass
    expected = torch.cat([model.score([part]) for part in alone])
    assert_same(model, model.score([parts[0], piece, *parts[1:]]), expected)


def test_chunks_of_a_prompt_equal_the_whole(model: Any) -> None:
    prompt, session, start = text(model, 300), model.open(320, 300), 0
    for size in (1, 2, 64, 100, 132):
        model.score([chain(session, prompt[start : start + size], keep=range(session.pending))])
        start += size
    got = model.score([chain(session, [prompt[-1]], logit_rows=[0], keep=range(session.pending))])[0]
    assert_same(model, got, fresh(model, prompt))


def test_only_wanted_rows_are_scored(model: Any) -> None:
    session = model.open(50, 50)
    assert model.score([chain(session, text(model, 10), logit_rows=[3, 9])]).shape == (2, model.vocab_size)
    assert model.score([chain(session, [1], keep=range(10))]).shape == (0, model.vocab_size)


@pytest.mark.parametrize("build", RUNTIMES)
@pytest.mark.parametrize("config", [TINIES["tiny"], TINIES["untied"]], ids=["tied", "untied"])
def test_a_reduced_output_layer_scores_its_tokens_only(build: Any, config: LlamaConfig) -> None:
    ids = torch.tensor([90, 3, 41, 7])
    whole, some = build(config), build(config, head_ids=ids)
    expected = fresh(whole, [5, 6, 7])
    got = fresh(some, [5, 6, 7])
    torch.testing.assert_close(got[ids], expected[ids], atol=1e-5, rtol=1e-5)
    assert set(torch.where(got > -torch.inf)[0].tolist()) == set(ids.tolist())
    some.vocab_size = 50  # a draft padded further than its target
    assert fresh(some, [5, 6, 7]).shape == (50,)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [97], [[1, 2]], [1.0]])
@pytest.mark.parametrize("build", RUNTIMES)
def test_a_reduced_output_layer_of_invalid_tokens_is_refused(build: Any, ids: list[Any]) -> None:
    with pytest.raises(UserError, match="output layer's tokens"):
        build(head_ids=torch.tensor(ids))


def test_a_full_session_raises() -> None:
    session = tiny(TINY).open(4, 2)
    with pytest.raises(UserError, match="7 more tokens do not fit"):
        session.extend(range(PREFIX, 6))
    session.extend(range(PREFIX, 5))
    with pytest.raises(UserError, match="past 4 tokens"):
        session.keep(range(5))
    assert depths([PREFIX, 0, 1]) == [0, 1, 2]
