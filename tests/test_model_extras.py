"""Optional capabilities: hidden states, skipped sublayers, shorter prefixes, MLP biases, and input vectors."""

from __future__ import annotations

import pytest
import reference
import tiny
import torch
import torch.nn.functional as F
from contract_parts import Head, Skipping, Witness, answered
from doubles import make_request
from passes import assert_same, branch, prefilled, random_parents, text
from test_llama import TINIES
from test_llama import tiny as llama
from torch import Tensor

from outpace.core.drafting import Needs
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.decoders import Autoregressive, Speculative
from outpace.engine.engine import Engine
from outpace.models.base import Capability, Model, Part, chain
from outpace.models.hf.load import adapt
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.toy import Toy

PROMPT = 12
EXACT = [None, False]


def shown(model: Model, tokens: list[int], layers: tuple[int, ...], **extras: object) -> tuple[Tensor, Tensor]:
    """Scores and hidden states after the last token of a text that is fed at once."""
    session = model.open(len(tokens) + 1, 100)
    last = [len(tokens) - 1]
    scored = model.score_hidden([chain(session, tokens, last)._replace(shown=last, **extras)], layers)
    assert scored.hidden is not None
    return scored.logits[0], scored.hidden[:, 0]


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_hidden_states_of_a_tree_are_those_of_each_path(config: object, exact: bool | None) -> None:
    model = llama(config, exact)  # type: ignore[arg-type]
    prompt, nodes, layers = text(model, PROMPT), text(model, 14, 1), (2, 0, model.num_layers)
    parents = random_parents(14, 3)
    session = prefilled(model, prompt)
    part = Part(session, nodes, parents, (3, 5), shown=(0, 5, 13))
    scored = model.score_hidden([part, chain(model.open(9, 0), prompt[:3])], layers)
    assert scored.hidden is not None
    assert scored.hidden.shape == (3, 3, model.config.hidden_size)
    for place, node in enumerate(part.shown):
        logits, hidden = shown(model, [*prompt, *(nodes[n] for n in branch(parents, node))], layers)
        assert_same(model, scored.hidden[:, place], hidden)
        assert_same(model, model.project(scored.hidden[-1:, place]).values[0], logits)
        if node == 5:
            assert_same(model, scored.logits[1], logits)


def test_hidden_states_are_what_the_layers_before_them_give() -> None:
    """A model of the first two layers alone says after its last what the whole one says in the middle."""
    model = llama(TINIES["tiny"])
    tokens = text(model, 9)
    assert torch.equal(shown(model, tokens, (2,))[1][0], shown(model.select_layers([0, 1]), tokens, (2,))[1][0])
    embedding = model._embedding[tokens[-1]]
    assert torch.equal(shown(model, tokens, (0,))[1][0], embedding)


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_without_layers_it_is_the_model_of_the_others(config: object, exact: bool | None) -> None:
    model = llama(config, exact)  # type: ignore[arg-type]
    tokens = text(model, 20)
    less, other = model.skip_sublayers([1], [1]), model.select_layers([0, *range(2, model.num_layers)])
    assert_same(model, *(m.score([chain(m.open(30, 30), tokens, [19])])[0] for m in (less, other)))
    again = less.skip_sublayers([0], []).skip_sublayers([], [2])
    both = model.skip_sublayers([0, 1], [1, 2])
    assert_same(model, *(m.score([chain(m.open(30, 30), tokens, [19])])[0] for m in (again, both)))


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
def test_a_shorter_text_is_all_that_a_part_with_a_length_sees(config: object, exact: bool | None) -> None:
    model = llama(config, exact)  # type: ignore[arg-type]
    prompt, nodes = text(model, 30), text(model, 6, 1)
    parents = [PREFIX, 0, 1, 1, 0, 4]
    for length in (0, 7, 30):
        long, short = prefilled(model, prompt), prefilled(model, prompt[:length]) if length else model.open(60, 60)
        before = long.read(30)
        got = model.score([Part(long, nodes, parents, range(6), (), length=length)])
        assert_same(model, got, model.score([Part(short, nodes, parents, range(6), ())]))
        assert torch.equal(long.read(30), before), "what is stored stays"
        long.keep(())
        plain = chain(long, nodes[:1], [0])
        assert_same(model, model.score([plain]), model.score([chain(prefilled(model, prompt), nodes[:1], [0])]))


@pytest.mark.parametrize("exact", EXACT)
def test_vectors_in_place_of_tokens(exact: bool | None) -> None:
    model = llama(TINIES["tiny"], exact)
    tokens, others = text(model, 10), text(model, 10, 1)
    vectors = F.embedding(torch.tensor(tokens), model._embedding)
    own = chain(model.open(20, 20), others, range(10))
    plain = model.score([chain(model.open(20, 20), tokens, range(10))])
    both = model.score([own._replace(inputs=vectors), chain(model.open(20, 20), others, range(10))])
    assert_same(model, both[:10], plain)
    assert_same(model, both[10:], model.score([chain(model.open(20, 20), others, range(10))]))


@pytest.mark.parametrize("exact", EXACT)
def test_steering_is_a_bias_of_the_up_projection(exact: bool | None) -> None:
    biased = TINIES["untied"]
    weights = reference.random_tensors(biased)
    model = Llama.from_tensors(biased, weights.__getitem__, exact=exact)
    generator = torch.Generator().manual_seed(5)
    mlp_bias = torch.randn(biased.num_layers, biased.intermediate_size, generator=generator)
    for layer in range(biased.num_layers):
        weights[f"model.layers.{layer}.mlp.up_proj.bias"] = (
            weights[f"model.layers.{layer}.mlp.up_proj.bias"] + mlp_bias[layer]
        )
    other = Llama.from_tensors(biased, weights.__getitem__, exact=exact)
    tokens = text(model, 10)
    parts = [chain(model.open(20, 20), tokens, [9], ()) for _ in "ab"]
    got = model.score([parts[0]._replace(mlp_bias=mlp_bias), parts[1]])
    expected = other.score([chain(other.open(20, 20), tokens, [9])])
    torch.testing.assert_close(got[:1], expected, atol=1e-4, rtol=1e-4)
    assert_same(model, got[1:], model.score([chain(model.open(20, 20), tokens, [9])]))


def test_the_toy_has_slow_twins_for_all_of_them() -> None:
    toy = Toy(16, 3, 0, mlp=0.5)
    tokens, mlp_bias, inputs = [3, 1, 4, 1, 5], torch.randn(3, 16).double(), torch.randn(5, 16).double()
    session = toy.open(20, 20)
    toy.score([chain(session, [9, 9, *tokens[:2]])])
    session.keep(range(4))
    part = Part(session, tokens[2:], (PREFIX, 0, 1), (2,), (), (2,), 0, mlp_bias, inputs[2:])
    scored = toy.score_hidden([part], (0, 2, 3))
    x = inputs[4]
    seen = [x]
    for layer in range(3):
        x = x + toy._tables[layer][tokens[4 - layer]]
        x = x + 0.5 * torch.tanh(x + mlp_bias[layer])
        seen.append(x)
    assert scored.hidden is not None
    assert torch.equal(scored.hidden[:, 0], torch.stack([seen[0], seen[2], seen[3]]))
    assert torch.equal(scored.logits[0], seen[3])


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_draft_of_skipped_layers_on_the_targets_session(skipped: tuple[int, ...]) -> None:
    model = llama(TINIES["tiny"])
    request = make_request(text(model, PROMPT), max_tokens=24)
    runs = answered(model, Skipping(model, skipped, skipped), request, (Autoregressive, Speculative, Speculative))
    texts = [run.tokens for run in runs]
    assert texts[0] == texts[1] == texts[2]
    accepted = sum(step.accepted for step in runs[1].history.steps)
    assert accepted > 0 if skipped else accepted >= 18


def test_a_head_on_the_torch_runtime_changes_nothing() -> None:
    model = llama(TINIES["tiny"])
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


def test_what_transformers_cannot_do_is_refused_by_name() -> None:
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


def test_the_runtimes_that_are_named_are_those_that_can() -> None:
    from outpace.models.hf.model import TransformersModel

    classes = {"llama": Llama, "native": NativeLlama, "transformers": TransformersModel}
    for extra in Capability:
        assert list(extra.value[1]) == [name for name, kind in classes.items() if extra in kind.capabilities]
