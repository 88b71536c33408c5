"""The transformers adapter against transformers' own passes without a cache: trees, kept keys and values, refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from passes import branch, prefilled, random_parents, text
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.hf import cache
from outpace.models.hf.load import adapt
from outpace.models.hf.model import TransformersModel
from outpace.models.hf.passes import max_positions

BART = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "num_hidden_layers": 1}


@lru_cache
def load(name: str) -> TransformersModel:
    return adapt(tiny.build(name))


@pytest.fixture(params=sorted(tiny.CONFIGS))
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return load(request.param)


def fresh(model: TransformersModel, tokens: Sequence[int]) -> Tensor:
    """Return transformers' own logits after a text, read at once and without a cache."""
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def assert_paths(model: TransformersModel, got: Tensor, prefix: Sequence[int], part: Part) -> None:
    """Every node's scores equal those of its path after the prefix."""
    for node in range(len(part.tokens)):
        path = [part.tokens[other] for other in branch(part.parents, node)]
        assert_close(got[node], fresh(model, [*prefix, *path]))


def test_a_tree_grown_in_pieces_scores_as_its_paths_do(model: TransformersModel) -> None:
    prompt, tokens, parents = text(model, 12), text(model, 12, 4), random_parents(12, 3)
    session = prefilled(model, prompt)
    pieces = [
        model.score([Part(session, tokens[start:stop], parents[start:stop], range(stop - start))])
        for start, stop in ((0, 1), (1, 5), (5, 12))
    ]
    assert_paths(model, torch.cat(pieces), prompt, Part(session, tokens, parents, ()))


def test_what_is_kept_equals_a_fresh_pass(model: TransformersModel) -> None:
    prompt = text(model, 9)
    session = prefilled(model, prompt)
    keep: list[int] = []
    for turn in range(4):
        tokens, parents = text(model, 9, 10 + turn), random_parents(9, turn)
        part = Part(session, tokens, parents, range(9), keep)
        assert_paths(model, model.score([part]), prompt, part)
        keep = branch(parents, random.Random(turn).randrange(2, 9))
        prompt = prompt + [tokens[node] for node in keep]
    session.keep(keep)
    other = prefilled(model, prompt)
    for mine, others in zip(session.layers, other.layers, strict=True):
        for kept, new in zip(mine.stored, others.stored, strict=True):
            assert_close(kept[..., : len(prompt), :], new[..., : len(prompt), :])


def test_live_nodes_survive_a_correction(model: TransformersModel) -> None:
    prompt, tokens = text(model, 10), text(model, 8, 5)
    session = prefilled(model, prompt)
    model.score([Part(session, tokens, [PREFIX, 0, 0, 1, 2, 3, 5, 4], [])])
    session.keep([0, 1], [3, 5, 6])  # 3 is the new root, 5 and 6 hang below it
    got = model.score([Part(session, [7], [2], [0])])[0]
    assert_close(got, fresh(model, [*prompt, *(tokens[n] for n in (0, 1, 3, 5, 6)), 7]))


def test_a_session_starts_from_another_and_forgets(model: TransformersModel) -> None:
    tokens = text(model, 12)
    first, second = prefilled(model, tokens[:5]), model.open(40, 40)
    for length in (9, 12):  # a state is cut only where a snapshot is
        first.take_snapshot()
        model.score([chain(first, tokens[first.length : length])])
        first.keep(range(length - first.length))
    second.start_from(first, 9)
    first.truncate(5)
    got = model.score([chain(second, tokens[9:], [2]), chain(first, tokens[5:7], [1])])
    assert_close(got[0], fresh(model, tokens))
    assert_close(got[1], fresh(model, tokens[:7]))


def test_a_forest_scores_as_its_trees_one_by_one(model: TransformersModel) -> None:
    prompts = [text(model, count, count) for count in (5, 14)]
    parts = [
        Part(prefilled(model, prompt), text(model, 6, 20), random_parents(6, number), range(6))
        for number, prompt in enumerate(prompts)
    ]
    piece = chain(model.open(50, 50), text(model, 20, 9))  # a prompt's chunk travels along
    got = model.score([parts[0], piece, parts[1]])
    assert_paths(model, got[:6], prompts[0], parts[0])
    assert_paths(model, got[6:], prompts[1], parts[1])


def test_only_wanted_rows_are_scored(model: TransformersModel) -> None:
    session = model.open(50, 50)
    tokens = text(model, 10)
    got = model.score([chain(session, tokens, logit_rows=[9, 3])])
    assert_close(got, torch.stack([fresh(model, tokens), fresh(model, tokens[:4])]))
    assert model.score([chain(session, [1], keep=range(10))]).shape == (0, model.vocab_size)
    assert model.score([]).shape == (0, model.vocab_size)


@pytest.mark.parametrize("wanted", [[2, 5], [5, 2], [0]], ids=str)
def test_over_several_devices_no_index_goes_with_the_tokens(wanted: list[int]) -> None:
    """It would be on the first device, but the output layer, which selects rows by it, is on the last."""
    module, given = tiny.build("llama"), []
    module.hf_device_map = {"model.embed_tokens": 0, "lm_head": 1}
    module.register_forward_pre_hook(lambda _, args, more: given.append(more.get("logits_to_keep")), with_kwargs=True)
    model = adapt(module)
    tokens = text(model, 6)
    given.clear()
    got = model.score([chain(model.open(50, 50), tokens, wanted)])
    assert given == [6 - min(wanted)]
    assert_close(got, torch.stack([fresh(model, tokens[: node + 1]) for node in wanted]))


class Counted(torch.nn.Module):
    """A model that counts the tokens of its forwards."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config, self.sizes = module, module.config, []
        self.get_input_embeddings, self.get_base_model = module.get_input_embeddings, lambda: module

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        self.sizes.append(input_ids.shape[1])
        return self.module(input_ids=input_ids, **options)


@pytest.mark.parametrize(("name", "forwards"), [("gpt2", [6]), ("bloom", [3, 1, 2])])
def test_a_tree_is_one_forward_or_one_for_each_branch_and_nothing_is_computed_twice(name: str, forwards: list) -> None:
    counted = Counted(tiny.build(name))
    model = adapt(counted)
    session = prefilled(model, text(model, 5))
    counted.sizes.clear()
    model.score([Part(session, text(model, 6), [PREFIX, 0, 1, 0, PREFIX, 4], range(6))])
    assert counted.sizes == forwards
    assert all(layer.keys is None for layer in session.layers), "what was gathered for a forward is still held"


@pytest.mark.parametrize("name", sorted(tiny.CONFIGS))
def test_a_notice_says_that_trees_are_slow_in_half_precision_too(name: str) -> None:
    model = load(name)
    assert model.supports_trees == (name in tiny.TREES)
    assert model.notice is None if model.supports_trees else model.notice.startswith("chains only: every branch")
    assert model.exact is False
    assert model.supports_trees or not adapt(tiny.build(name).to(torch.bfloat16)).supports_trees


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mixtral"])
def test_trees_go_with_either_attention_and_in_half_precision(name: str, dtype: torch.dtype, attention: str) -> None:
    module = tiny.build(name).to(dtype)
    module.set_attn_implementation(attention)
    model = adapt(module)
    assert model.supports_trees, model.notice
    assert model.score([chain(model.open(9, 9), [5, 6], [1])]).dtype == dtype


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mamba", {}, "layer 0 keeps a LinearAttentionLayer, a state from which drafted tokens cannot be taken back"),
        (
            "recurrent_gemma",
            {},
            "cannot be taken back: the runtime transformers takes no models with recurrent or compressed",
        ),
        ("jamba", {}, "layer 0 keeps a LinearAttentionLayer"),
        ("rwkv", {}, "RwkvForCausalLM stores nothing in the given KV cache"),
        ("bart", BART, "BartForCausalLM does not work with a KV cache \\(IndexError: list index out of range\\)"),
        ("bert", {}, "BertLMHeadModel is not causal"),
        ("roberta", {"pad_token_id": 0}, "RobertaForCausalLM is not causal"),
    ],
)
def test_a_model_that_cannot_remove_tokens_is_refused(name: str, changes: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        adapt(tiny.build(name, **changes))


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (7, "7 is no model: give the name of one"),
        (torch.nn.Linear(2, 2), r"Linear\(.*\) is no model: give the name of one"),
        (transformers.GPT2Model(transformers.GPT2Config(**tiny.GPT)), "GPT2Model gives no scores for the next token"),
    ],
)
def test_other_objects_are_refused(thing: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        adapt(thing)


def test_a_loaded_model_is_put_in_evaluation_mode_and_a_narrower_vocabulary_cuts_the_rows() -> None:
    module = tiny.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model = adapt(module)
    assert not module.training
    assert_close(model.score([chain(model.open(9, 9), [5, 6], [1])])[0], fresh(model, [5, 6]))
    model.vocab_size = 100
    assert model.score([chain(model.open(9, 9), [5, 6], [0, 1])]).shape == (2, 100)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "gpt_neo", "mpt"])
def test_a_tree_may_reach_past_the_context(name: str) -> None:
    length = {"gpt2": "n_positions", "gptj": "n_positions", "mpt": "max_seq_len"}.get(name, "max_position_embeddings")
    model = adapt(tiny.build(name, **{length: 16}))
    assert model.max_positions == 16
    prompt, tokens, parents = text(model, 13), text(model, 7, 1), [PREFIX, 0, 1, 2, 3, 0, 5]
    session = prefilled(model, prompt)
    got = model.score([Part(session, tokens, parents, range(7))])
    for node in (0, 1, 2, 5, 6):  # those that the context holds
        path = [tokens[other] for other in branch(parents, node)]
        assert_close(got[node], fresh(model, prompt + path))


def test_context_lengths_are_found_under_their_names() -> None:
    assert max_positions(transformers.LlamaConfig(max_position_embeddings=99)) == 99
    assert max_positions(transformers.GPT2Config(n_positions=77)) == 77
    assert max_positions(transformers.MptConfig(max_seq_len=55)) == 55
    assert max_positions(transformers.BloomConfig()) == 1 << 17
    factors = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 10000.0}
    long = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    assert max_positions(transformers.LlamaConfig(max_position_embeddings=128, rope_parameters=long)) == 32


def test_shared_layers_that_an_older_transformers_does_not_show_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SHARING_LAYERS", ())
    with pytest.raises(UserError, match=r"needs transformers 5\.23"):
        cache.read_layout(SimpleNamespace(num_kv_shared_layers=2))
