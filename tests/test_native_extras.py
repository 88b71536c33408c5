"""The native pass: hidden states, skipped sublayers, shorter texts, vectors and steering, against passes without them
and against the emulation, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from contract_parts import Head, Skipping, Witness, answered
from doubles import make_request
from passes import branch, prefilled, random_parents, text
from test_native import SETS, TINIES, open_smollm2, tiny
from torch import Tensor

from outpace.core.drafting import Needs
from outpace.core.tree import PREFIX
from outpace.decoders import Autoregressive, Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part, chain
from outpace.models.llama.config.footprint import ENTRY_BYTES
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.runtime import NativeLlama

kernels = pytest.importorskip("outpace_kernels")

LAYERS = (2, 0, 3)


@pytest.fixture(scope="module")
def smollm2() -> NativeLlama:
    return open_smollm2()


@pytest.fixture(params=[*TINIES, "half", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def model(request: pytest.FixtureRequest) -> NativeLlama:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return tiny(TINIES["tiny"], kv_dtype="float16") if request.param == "half" else tiny(TINIES[request.param])


def fresh_hidden(model: Model, tokens: Sequence[int], layers: Sequence[int] = LAYERS) -> tuple[Tensor, Tensor]:
    """Scores and hidden states after the last token of a text that is fed at once."""
    last = [len(tokens) - 1]
    part = chain(model.open(len(tokens) + 1, 300), tokens, last)._replace(shown=last)
    scored = model.score_hidden([part], layers)
    assert scored.hidden is not None
    return torch.as_tensor(scored.logits)[0], scored.hidden[:, 0]


def everything(model: NativeLlama) -> list[np.ndarray]:
    """A forest in which each part asks for something else, by the model whole and without some sublayers."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    vectors = torch.randn(9, config.hidden_size, generator=generator)
    mlp_bias = torch.randn(config.num_layers, config.intermediate_size, generator=generator)
    found: list[np.ndarray] = []
    for one in (model, model.skip_sublayers([1], [0, 2])):
        sessions = [prefilled(model, text(model, 12, seed)) for seed in range(4)]
        nodes, parents = text(model, 9, 7), random_parents(9, 2)
        parts = [Part(session, nodes, parents, (0, 4, 8), shown=(1, 8)) for session in sessions]
        parts[1] = parts[1]._replace(inputs=vectors)
        parts[2] = parts[2]._replace(mlp_bias=mlp_bias)
        parts[3] = parts[3]._replace(length=5, shown=())
        scored = one.score_hidden(parts, LAYERS)
        assert scored.hidden is not None
        assert scored.hidden.shape == (3, 6, config.hidden_size)
        found += [np.asarray(scored.logits), scored.hidden.numpy(), np.asarray(one.project(scored.hidden[2]).values)]
    return found


def in_turn() -> Iterator[Any]:
    """Each model with one precision of keys and values, alternating; with all of them in the long tests."""
    for number, (name, config) in enumerate(TINIES.items()):
        for place, kv_dtype in enumerate(ENTRY_BYTES):
            marks = [pytest.mark.long] if (number + place) % len(ENTRY_BYTES) else []
            yield pytest.param(config, kv_dtype, id=f"{name}-{kv_dtype}", marks=marks)


@pytest.mark.parametrize(("config", "kv_dtype"), list(in_turn()))
def test_the_kernels_are_what_their_emulation_says(
    config: object, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outpace_kernels import emulation

    got = everything(tiny(config, kv_dtype=kv_dtype))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "load_kernels", lambda: emulation)
    expected = everything(tiny(config, kv_dtype=kv_dtype))  # type: ignore[arg-type]
    assert all(np.array_equal(mine, its) for mine, its in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_gives_the_same_bits(name: str) -> None:
    for config in TINIES.values():
        expected = everything(tiny(config, instruction_set="portable", threads=1))
        got = everything(tiny(config, instruction_set=name))
        assert all(np.array_equal(mine, its) for mine, its in zip(got, expected, strict=True))


def test_hidden_states_of_a_tree_are_those_of_each_path(model: NativeLlama) -> None:
    prompt, nodes, parents = text(model, 20), text(model, 14, 1), random_parents(14, 3)
    session = prefilled(model, prompt)
    part = Part(session, nodes, parents, (3, 5), shown=(0, 5, 13))
    scored = model.score_hidden([part, chain(model.open(9, 0), prompt[:3])], LAYERS)
    assert scored.hidden is not None
    for place, node in enumerate(part.shown):
        logits, hidden = fresh_hidden(model, [*prompt, *(nodes[n] for n in branch(parents, node))])
        assert torch.equal(scored.hidden[:, place], hidden)
        if model.num_layers == LAYERS[-1]:
            assert torch.equal(model.project(scored.hidden[-1:, place]).wide()[0], logits)
        if node == 5:
            assert torch.equal(torch.as_tensor(scored.logits)[1], logits)
    plain = model.score([Part(prefilled(model, prompt), nodes, parents, (3, 5))])
    assert torch.equal(torch.as_tensor(scored.logits), plain), "who asks for them changes no score"


def test_hidden_states_after_keep_are_those_of_a_fresh_text(model: NativeLlama) -> None:
    prompt, written = text(model, 15), []
    session, keep = prefilled(model, prompt), list[int]()
    for turn in range(4):
        parents, nodes = random_parents(8, turn), text(model, 8, 10 + turn)
        scored = model.score_hidden([Part(session, nodes, parents, (), keep, (7, 3))], LAYERS)
        assert scored.hidden is not None
        for place, node in enumerate((7, 3)):
            path = [nodes[other] for other in branch(parents, node)]
            assert torch.equal(scored.hidden[:, place], fresh_hidden(model, prompt + written + path)[1])
        keep = branch(parents, 7)
        written += [nodes[other] for other in keep]


def test_a_drafter_is_told_the_same_of_a_prompt_that_is_known_already() -> None:
    """Of the prompt's tokens and of all judged nodes: what a fresh text gives, the second time too."""
    model = tiny(TINIES["tiny"])
    witness = Witness(Needs(top=1, layers=(1, 3), prompt=True), ((1, 2), (3,)))
    requests = [make_request(text(model, 40, seed), max_tokens=8) for seed in (1, 1, 2)]
    with Engine(model, witness, options=EngineOptions(chunk=16)) as engine:
        for request in requests:
            run = engine.submit(request, Speculative, Speculative.Options(1))
            while run.finish_reason is None:
                engine.step()
            assert run.error is None
    told = [(context, top, hidden) for state in witness.states for context, top, hidden in state.told]
    assert len(told) > 3 * 40
    for context, top, hidden in told:
        logits, expected = fresh_hidden(model, context, (1, 3))
        assert hidden is not None
        assert torch.equal(hidden, expected)
        assert top == [int(logits.argmax())]


def test_hidden_states_are_what_the_layers_before_them_give() -> None:
    model = tiny(TINIES["tiny"])
    tokens, embedding = text(model, 9), np.empty((1, model.config.hidden_size), np.float32)
    assert torch.equal(fresh_hidden(model, tokens, (2,))[1], fresh_hidden(model.select_layers([0, 1]), tokens, (2,))[1])
    model._ends.embedding.read(np.array(tokens[-1:], np.int32), embedding)
    assert np.array_equal(fresh_hidden(model, tokens, (0,))[1].numpy(), embedding)


def test_without_layers_it_is_the_model_of_the_others(model: NativeLlama) -> None:
    tokens = text(model, 20)

    def last(one: NativeLlama) -> Tensor:
        return one.score([chain(one.open(30, 30), tokens, [19])])[0]

    less, other = model.skip_sublayers([1], [1]), model.select_layers([0, *range(2, model.num_layers)])
    assert torch.equal(last(less), last(other))
    again, both = less.skip_sublayers([0], []).skip_sublayers([], [2]), model.skip_sublayers([0, 1], [1, 2])
    assert torch.equal(last(again), last(both))
    assert not torch.equal(last(both), last(less))
    assert torch.equal(last(model.skip_sublayers([], [])), last(model))


def test_skipped_sublayers_are_a_forward_without_them() -> None:
    """Attention adds nothing where it is skipped, nor does an MLP: as one whose output projection is zero."""
    config = replace(TINIES["tiny"], num_layers=1)
    weights = reference.random_tensors(config)
    tokens = text(tiny(TINIES["tiny"]), 10)
    for attention, mlp, silenced in (((0,), (), "self_attn.o_proj"), ((), (0,), "mlp.down_proj")):
        muted = weights | {f"model.layers.0.{silenced}.weight": 0 * weights[f"model.layers.0.{silenced}.weight"]}
        one, other = (NativeLlama.from_tensors(config, kind.__getitem__) for kind in (weights, muted))
        got = one.skip_sublayers(attention, mlp)
        pair = [m.score([chain(m.open(20, 20), tokens, range(10))]) for m in (got, other)]
        assert torch.equal(*pair)


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_shorter_text_is_all_that_a_part_with_a_length_sees(model: NativeLlama, skipped: tuple[int, ...]) -> None:
    prompt, nodes = text(model, 30), text(model, 6, 1)
    parents, less = [PREFIX, 0, 1, 1, 0, 4], model.skip_sublayers(skipped, skipped)
    for length in (0, 7, 30):
        long, short = prefilled(model, prompt), prefilled(model, prompt[:length]) if length else model.open(60, 60)
        before = long.read(30)
        got = less.score([Part(long, nodes, parents, range(6), (), length=length)])
        assert torch.equal(got, less.score([Part(short, nodes, parents, range(6), ())]))
        assert np.array_equal(long.read(30), before), "what is stored stays"
        long.keep(())
        plain = chain(long, nodes[:1], [0])
        assert torch.equal(model.score([plain]), model.score([chain(prefilled(model, prompt), nodes[:1], [0])]))


def test_vectors_in_place_of_tokens(model: NativeLlama) -> None:
    tokens, others = text(model, 10), text(model, 10, 1)
    vectors = np.empty((10, model.config.hidden_size), np.float32)
    model._ends.embedding.read(np.array(tokens, np.int32), vectors)
    vectors *= np.float32(model.config.embedding_scale)
    own = chain(model.open(20, 20), others, range(10))
    plain = model.score([chain(model.open(20, 20), tokens, range(10))])
    both = model.score([own._replace(inputs=torch.from_numpy(vectors)), chain(model.open(20, 20), others, range(10))])
    assert torch.equal(both[:10], plain)
    assert torch.equal(both[10:], model.score([chain(model.open(20, 20), others, range(10))]))


def test_steering_is_a_bias_of_the_up_projection() -> None:
    """The same sums in another order, so equal to rounding: then activations may fall to a neighbouring int8."""
    biased = TINIES["biased"]
    weights = reference.random_tensors(biased)
    model = NativeLlama.from_tensors(biased, weights.__getitem__)
    mlp_bias = torch.randn(biased.num_layers, biased.intermediate_size, generator=torch.Generator().manual_seed(5))
    for layer in range(biased.num_layers):
        name = f"model.layers.{layer}.mlp.up_proj.bias"
        weights[name] = weights[name] + mlp_bias[layer]
    other, tokens = NativeLlama.from_tensors(biased, weights.__getitem__), text(model, 10)
    parts = [chain(model.open(20, 20), tokens, [9]) for _ in "ab"]
    got = model.score([parts[0]._replace(mlp_bias=mlp_bias), parts[1]])
    expected = other.score([chain(other.open(20, 20), tokens, [9])])
    plain = model.score([chain(model.open(20, 20), tokens, [9])])
    assert (got[0] - expected[0]).norm() < 0.05 * (plain[0] - expected[0]).norm()
    assert torch.equal(got[1:], plain)


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_draft_of_skipped_layers_on_the_targets_session(skipped: tuple[int, ...]) -> None:
    model = tiny(TINIES["tiny"])
    request = make_request(text(model, 12), max_tokens=24)
    runs = answered(model, Skipping(model, skipped, skipped), request, (Autoregressive, Speculative, Speculative))
    texts = [run.tokens for run in runs]
    assert texts[0] == texts[1] == texts[2]
    accepted = sum(step.accepted for step in runs[1].history.steps)
    assert accepted > 0 if skipped else accepted >= 18


def test_a_head_proves_the_way() -> None:
    """It learns from the prompt's hidden states and drafts from those of the judged nodes; the text stays."""
    model = tiny(TINIES["tiny"])
    request = make_request(text(model, 60), max_tokens=20)
    runs = answered(model, Head(model, 2), request, (Autoregressive, Speculative))
    assert runs[0].tokens == runs[1].tokens
    assert sum(step.drafted for step in runs[1].history.steps) > 0


def test_a_reduced_output_layer_scores_hidden_states_too() -> None:
    ids, tokens = torch.tensor([5, 96, 0, 41]), [1, 2, 3]
    whole, some = tiny(TINIES["tiny"]), tiny(TINIES["tiny"], head_ids=ids)
    got, expected = (fresh_hidden(model, tokens) for model in (some, whole))
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[0][ids], expected[0][ids])
    wide = some.project(got[1][-1:]).wide()[0]
    assert torch.equal(wide[ids], expected[0][ids])
    assert int(wide.isinf().sum()) == whole.vocab_size - 4


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"shown": np.array([1], np.int32), "layers": np.array([0], np.int32)}, "a shown row is out of range"),
        ({"shown": np.array([0], np.int32), "layers": np.array([4], np.int32)}, "layer 4 is out of range"),
        ({"gaps": {0: 1}}, "a gap is longer than what is committed"),
        ({"gaps": {1: 0}}, "a span is out of range"),
        ({"inputs": {0: np.zeros((2, 48), np.float32)}}, "inputs has the wrong shape"),
        ({"steer": {0: np.zeros((3, 80), np.float32)}}, "steer has the wrong shape"),
        ({"skipped": np.zeros((2, 2), bool)}, "skipped has the wrong shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(asked: dict, says: str) -> None:
    model = tiny(TINIES["tiny"])
    session, one = model.open(8, 8), np.zeros(1, np.int32)
    session.reserve(8)
    spans = [(session.store, 0, 0, 1, np.ones((1, 1), bool))]
    if "shown" in asked:
        asked["hidden"] = np.zeros((1, 1, 48), np.float32)
    turns, scores = np.zeros((1, 4, 2), np.float32), np.zeros((1, 97), np.float32)
    with pytest.raises(ValueError, match=says):
        model.model_for_thread().forward(spans, one, turns, one, scores, **asked)
