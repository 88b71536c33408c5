"""Optional capabilities: hidden states, skipped sublayers, shorter prefixes, MLP biases, and input vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from contract_parts import Head, Skipping, Witness, answered
from doubles import make_request
from passes import TINIES, assert_same, branch, models, native_tiny, of_layers, prefilled, random_parents, text
from passes import tiny as llama
from torch import Tensor

from outpace.core.drafting import Needs
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Capability, Model, Part, chain
from outpace.models.hf.load import adapt
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama

RUNTIMES = [llama, native_tiny]


@pytest.fixture(params=models(None, False))
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


def need(model: Model, ability: Capability) -> None:
    """Skip the test of a model without this ability."""
    if ability not in model.capabilities:
        pytest.skip(f"the model cannot {ability.value[0]}")


def fresh_hidden(model: Model, tokens: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and hidden states after the last token of a text that is fed at once."""
    last = [len(tokens) - 1]
    scored = model.score_hidden(
        [chain(model.open(len(tokens) + 1, 300), tokens, last)._replace(hidden_rows=last)], layers
    )
    assert scored.hidden is not None
    return torch.as_tensor(scored.logits)[0], torch.as_tensor(scored.hidden[:, 0])


def last_row(model: Model, tokens: Sequence[int]) -> Tensor:
    return model.score([chain(model.open(30, 30), tokens, [len(tokens) - 1])])[0]


def test_hidden_states_of_a_tree_are_those_of_each_path(model: Any) -> None:
    prompt, nodes, parents = text(model, 20), text(model, 14, 1), random_parents(14, 3)
    layers = (2, 0, model.num_layers)
    part = Part(prefilled(model, prompt), nodes, parents, (3, 5), hidden_rows=(0, 5, 13))
    scored = model.score_hidden([part, chain(model.open(9, 0), prompt[:3])], layers)
    assert scored.hidden is not None
    assert scored.hidden.shape == (3, 3, model.config.hidden_size)
    for place, node in enumerate(part.hidden_rows):
        logits, hidden = fresh_hidden(model, [*prompt, *(nodes[n] for n in branch(parents, node))], layers)
        assert_same(model, scored.hidden[:, place], hidden)
        assert_same(model, model.project(scored.hidden[-1:, place]).to_dense()[0], logits)
        if node == 5:
            assert_same(model, torch.as_tensor(scored.logits)[1], logits)
    plain = model.score([Part(prefilled(model, prompt), nodes, parents, (3, 5))])
    assert_same(model, scored.logits, plain)


def test_a_drafter_reads_the_same_of_a_cached_prompt() -> None:
    """Of the prompt and of all verified nodes, it reads what a fresh text gives, also for a repeated prompt."""
    model = native_tiny()
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


@pytest.mark.parametrize("build", RUNTIMES)
def test_hidden_states_are_what_the_layers_before_them_give(build: Any) -> None:
    """The last hidden states of a model of the first two layers are those in the middle of the whole model."""
    model = build()
    tokens = text(model, 9)
    hidden = fresh_hidden(model, tokens, (2, 0))[1]
    assert torch.equal(hidden[0], fresh_hidden(of_layers(model, [0, 1]), tokens, (2,))[1][0])
    embedding = np.empty((1, model.config.hidden_size), np.float32)
    if isinstance(model, NativeLlama):
        model.ends.embedding.read(np.array(tokens[-1:], np.int32), embedding)
    else:
        embedding[0] = model.embedding[tokens[-1]]
    assert np.array_equal(hidden[1:].numpy(), embedding)


def test_a_model_that_skips_a_layer_is_the_model_of_the_others(model: Any) -> None:
    need(model, Capability.SKIP_SUBLAYERS)
    tokens = text(model, 20)
    less, other = model.skip_sublayers([1], [1]), of_layers(model, [0, *range(2, model.num_layers)])
    assert_same(model, last_row(less, tokens), last_row(other, tokens))
    again, both = less.skip_sublayers([0], []).skip_sublayers([], [2]), model.skip_sublayers([0, 1], [1, 2])
    assert_same(model, last_row(again, tokens), last_row(both, tokens))
    assert not torch.equal(last_row(both, tokens), last_row(less, tokens))
    assert torch.equal(last_row(model.skip_sublayers([], []), tokens), last_row(model, tokens))


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_part_with_a_length_attends_to_a_shorter_text(model: Any, skipped: tuple[int, ...]) -> None:
    if skipped:
        need(model, Capability.SKIP_SUBLAYERS)
    prompt, nodes = text(model, 30), text(model, 6, 1)
    parents, less = [PREFIX, 0, 1, 1, 0, 4], model.skip_sublayers(skipped, skipped)
    for length in (0, 7, 30):
        long, short = prefilled(model, prompt), prefilled(model, prompt[:length]) if length else model.open(60, 60)
        before = torch.as_tensor(long.read(30))
        got = less.score([Part(long, nodes, parents, range(6), (), length=length)])
        assert_same(model, got, less.score([Part(short, nodes, parents, range(6), ())]))
        assert torch.equal(torch.as_tensor(long.read(30)), before), "what is stored stays"
        long.keep(())
        plain = chain(long, nodes[:1], [0])
        assert_same(model, model.score([plain]), model.score([chain(prefilled(model, prompt), nodes[:1], [0])]))


def test_vectors_in_place_of_tokens(model: Any) -> None:
    need(model, Capability.INPUTS)
    tokens, others = text(model, 10), text(model, 10, 1)
    own, plain = (
        chain(model.open(20, 20), some, range(10))._replace(hidden_rows=range(10)) for some in (others, tokens)
    )
    scored = model.score_hidden([plain], [0])
    assert scored.hidden is not None
    both = model.score([own._replace(inputs=scored.hidden[0]), chain(model.open(20, 20), others, range(10))])
    assert_same(model, both[:10], scored.logits)
    assert_same(model, both[10:], model.score([chain(model.open(20, 20), others, range(10))]))


@pytest.mark.parametrize(
    ("build", "limit"),
    [
        (Llama.from_tensors, 1e-5),
        (partial(Llama.from_tensors, exact=False), 1e-5),
        # the same sums in another order are equal to rounding, after which activations may get a neighbouring int8
        (NativeLlama.from_tensors, 0.05),
    ],
    ids=["exact", "fast", "native"],
)
def test_a_bias_is_added_to_the_up_projection(build: Any, limit: float) -> None:
    config = TINIES["untied"]
    weights = reference.random_tensors(config)
    model, tokens = build(config, weights.__getitem__), list(range(3, 13))
    mlp_bias = torch.randn(config.num_layers, config.intermediate_size, generator=torch.Generator().manual_seed(5))
    biased = {f"model.layers.{layer}.mlp.up_proj.bias": bias for layer, bias in enumerate(mlp_bias)}
    other = build(config, (weights | {name: weights[name] + bias for name, bias in biased.items()}).__getitem__)
    parts = [chain(model.open(20, 20), tokens, [9]) for _ in "ab"]
    got = model.score([parts[0]._replace(mlp_bias=mlp_bias), parts[1]])
    expected, plain = (one.score([chain(one.open(20, 20), tokens, [9])]) for one in (other, model))
    assert (got[0] - expected[0]).norm() < limit * (plain[0] - expected[0]).norm()
    assert_same(model, got[1:], plain)


@pytest.mark.parametrize("skipped", [(), (1,)])
@pytest.mark.parametrize("build", RUNTIMES)
def test_a_draft_of_skipped_layers_on_the_targets_session(build: Any, skipped: tuple[int, ...]) -> None:
    model = build()
    request = make_request(text(model, 12), max_tokens=24)
    runs = answered(model, Skipping(model, skipped, skipped), request, (Autoregressive, Speculative, Speculative))
    texts = [run.tokens for run in runs]
    assert texts[0] == texts[1] == texts[2]
    accepted = sum(step.accepted for step in runs[1].history.steps)
    assert accepted > 0 if skipped else accepted >= 18


@pytest.mark.parametrize("build", RUNTIMES)
def test_a_head_that_drafts_from_hidden_states_changes_no_text(build: Any) -> None:
    model = build()
    request = make_request(text(model, 60), max_tokens=20)
    runs = answered(model, Head(model, 2), request, (Autoregressive, Speculative))
    assert runs[0].tokens == runs[1].tokens
    assert sum(step.drafted for step in runs[1].history.steps) > 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom"])
def test_hidden_states_of_transformers(name: str) -> None:
    """Its own, as it gives them for a text without a cache."""
    module = tiny.build(name)
    model = adapt(module)
    tokens, nodes, parents = [5, 9, 14, 20], [30, 31, 32, 33], (PREFIX, 0, 0, 2)
    session = model.open(20, 20)
    model.score([chain(session, tokens)])
    part = Part(session, nodes, parents, (1,), range(4), (3, 0))
    scored = model.score_hidden([part, chain(model.open(20, 20), tokens, [3])], (1, 0))
    assert scored.hidden is not None
    with torch.inference_mode():
        for place, path in enumerate(((0, 2, 3), (0,))):
            ids = torch.tensor([[*tokens, *(nodes[node] for node in path)]])
            states = module(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
            expected = torch.stack([states[1][0, -1], states[0][0, -1]])
            torch.testing.assert_close(scored.hidden[:, place], expected, atol=1e-4, rtol=1e-4)
    plain = [chain(model.open(20, 20), tokens, [3])]
    torch.testing.assert_close(scored.logits[1:], model.score(plain), atol=1e-4, rtol=1e-4)
    assert scored.logits.shape == (2, model.vocab_size)


def test_what_transformers_cannot_do_is_refused() -> None:
    model = adapt(tiny.build("gpt2"))
    part = chain(model.open(20, 20), [5, 9], [1])
    for field, value, what in (
        ("length", 0, "score after a prefix of the committed text"),
        ("mlp_bias", torch.zeros(2, 9), "add a bias inside its MLPs"),
        ("inputs", torch.zeros(2, 32), "take vectors in place of tokens"),
    ):
        with pytest.raises(
            UserError, match=f"TransformersModel cannot {what}, models of the runtime llama or native can"
        ):
            model.score([part._replace(**{field: value})])
    with pytest.raises(UserError, match="TransformersModel cannot leave out sublayers"):
        Skipping(model, [1], [1])
    with pytest.raises(UserError, match="TransformersModel cannot score a hidden state"):
        model.project(torch.zeros(1, 32))
    with pytest.raises(UserError, match="must be between 0 and 1"):  # after the last layer there is the norm's
        Engine(model, Witness(Needs(layers=(2,)), ()))


def test_errors_name_the_runtimes_that_have_a_capability() -> None:
    from outpace.models.hf.model import TransformersModel

    classes = {"llama": Llama, "native": NativeLlama, "transformers": TransformersModel}
    for extra in Capability:
        assert list(extra.value[1]) == [name for name, kind in classes.items() if extra in kind.capabilities]
