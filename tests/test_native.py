"""The native pass against its emulation in numpy, and against itself: instruction sets, threads, row counts, text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import outpace_kernels as kernels
import pytest
import reference
import torch
from files import smollm2_file
from passes import NATIVE_TINIES as TINIES
from passes import TINY, fresh, open_smollm2, prefilled, random_parents, text, tree_scores
from passes import native_tiny as tiny
from passes import smollm2 as shared_smollm2
from torch import Tensor
from turns import in_turn

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Capability, Part, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.llama import kept_tokens
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.native.weights import PANEL
from outpace.models.llama.torch.runtime import Llama
from outpace.models.text.tokenizer import Tokenizer

SETS = kernels.instruction_sets()
LAYERS = (2, 0, 3)


@pytest.fixture(scope="module")
def smollm2() -> NativeLlama:
    return shared_smollm2("native")


def everything(model: NativeLlama) -> list[Tensor]:
    """Results of a tree, its slots, and a forest in which each part needs another capability, with all sublayers and
    without some."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    vectors = torch.randn(9, config.hidden_size, generator=generator)
    mlp_bias = torch.randn(config.num_layers, config.intermediate_size, generator=generator)
    found = list(tree_scores(model, 37, 24))
    wanted = Capability.SKIP_SUBLAYERS, Capability.MLP_BIAS, Capability.INPUTS
    skips, biases, inputs = (one in model.capabilities for one in wanted)
    for one in (model, *([model.skip_sublayers([1], [0, 2])] if skips else [])):
        sessions = [prefilled(model, text(model, 12, seed)) for seed in range(4)]
        nodes, parents = text(model, 9, 7), random_parents(9, 2)
        parts = [Part(session, nodes, parents, (0, 4, 8), hidden_rows=(1, 8)) for session in sessions]
        parts[1] = parts[1]._replace(inputs=vectors) if inputs else parts[1]
        parts[2] = parts[2]._replace(mlp_bias=mlp_bias) if biases else parts[2]
        parts[3] = parts[3]._replace(length=5, hidden_rows=())
        scored = one.score_hidden(parts, LAYERS)
        assert scored.hidden is not None
        assert scored.hidden.shape == (3, 6, config.hidden_size)
        found += map(torch.as_tensor, (scored.logits, scored.hidden, one.project(scored.hidden[2]).values))
    return found


def assert_all_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(mine, its) for mine, its in zip(got, expected, strict=True))


@pytest.mark.parametrize(("name", "kv_dtype"), in_turn(TINIES, kernels.KV_DTYPES))
def test_the_kernels_equal_their_emulation(name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace_kernels import emulation

    got = everything(tiny(TINIES[name], kv_dtype=kv_dtype))
    monkeypatch.setattr(native, "kernels", emulation)
    assert_all_equal(got, everything(tiny(TINIES[name], kv_dtype=kv_dtype)))


def test_a_reduced_output_layer_equals_its_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace_kernels import emulation

    monkeypatch.setattr(kept_tokens, "MAX_ADDED", 32)

    def reduced() -> NativeLlama:
        model = tiny(TINIES["odd"])
        model.kept_tokens = kept_tokens.KeptTokens(20, model.ends.head.outputs, PANEL)
        return model

    got = everything(reduced())
    assert bool(torch.isinf(got[0]).any())
    monkeypatch.setattr(native, "kernels", emulation)
    assert_all_equal(got, everything(reduced()))


@pytest.mark.parametrize("kv_dtype", kernels.KV_DTYPES)
@pytest.mark.parametrize("config", TINIES.values(), ids=TINIES)
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_gives_the_same_bits(name: str, config: LlamaConfig, kv_dtype: str) -> None:
    model = tiny(config, instruction_set=name, kv_dtype=kv_dtype)
    assert model.instruction_set == name
    expected = everything(tiny(config, instruction_set="portable", threads=1, kv_dtype=kv_dtype))
    assert_all_equal(everything(model), expected)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "options",
    [{"threads": 1}, *(pytest.param({"instruction_set": name}, marks=pytest.mark.long) for name in SETS)],
    ids=str,
)
def test_the_real_model_has_one_set_of_bits(smollm2: NativeLlama, options: dict) -> None:
    tokens = text(smollm2, 13)
    assert torch.equal(fresh(open_smollm2(**options), tokens), fresh(smollm2, tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 18, 19, 25])
def test_a_row_does_not_depend_on_the_row_count(count: int) -> None:
    """Every way to cut rows into tiles."""
    model = tiny(TINIES["odd"])
    prompt, tokens = text(model, 9), text(model, count, 1)
    got = model.score([Part(prefilled(model, prompt), tokens, [PREFIX] * count, range(count))])
    for node, token in enumerate(tokens):
        assert torch.equal(got[node], fresh(model, [*prompt, token]))


def test_skipped_sublayers_are_a_pass_without_them() -> None:
    """A skipped sublayer adds nothing, like one whose output projection is zero."""
    config = replace(TINY, num_layers=1)
    weights = reference.random_tensors(config)
    tokens = text(tiny(), 10)
    for attention, mlp, silenced in (((0,), (), "self_attn.o_proj"), ((), (0,), "mlp.down_proj")):
        muted = weights | {f"model.layers.0.{silenced}.weight": 0 * weights[f"model.layers.0.{silenced}.weight"]}
        one, other = (NativeLlama.from_tensors(config, kind.__getitem__) for kind in (weights, muted))
        got = one.skip_sublayers(attention, mlp)
        pair = [m.score([chain(m.open(20, 20), tokens, range(10))]) for m in (got, other)]
        assert torch.equal(*pair)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="unknown kv_dtype"):
        NativeOptions(kv_dtype="int4")
    with pytest.raises(UserError, match="unknown instruction_set 'mmx'"):
        tiny(TINY, instruction_set="mmx")


def test_tokens_and_stores_of_other_models_raise() -> None:
    model, other = tiny(TINY), tiny(replace(TINY, num_layers=2))
    with pytest.raises(ValueError, match="token 97 is out of range"):
        model.score([chain(model.open(9, 9), [97], [0])])
    with pytest.raises(ValueError, match="another model"):
        model.score([chain(other.open(9, 9), [1], [0])])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"hidden_rows": np.array([1], np.int32), "layers": np.array([0], np.int32)},
            "a row of hidden states is out of range",
        ),
        ({"hidden_rows": np.array([0], np.int32), "layers": np.array([4], np.int32)}, "layer 4 is out of range"),
        ({"position_gaps": {0: 1}}, "a gap is longer than what is committed"),
        ({"position_gaps": {1: 0}}, "a span is out of range"),
        ({"inputs": {0: np.zeros((2, 48), np.float32)}}, "inputs has the wrong shape"),
        ({"mlp_bias": {0: np.zeros((3, 80), np.float32)}}, "mlp_bias has the wrong shape"),
        ({"skipped": np.zeros((2, 2), bool)}, "skipped has the wrong shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(options: dict, says: str) -> None:
    model = tiny()
    session, one = model.open(8, 8), np.zeros(1, np.int32)
    session.reserve(8)
    spans = [(session.store, 0, 0, 1, np.ones((1, 1), bool))]
    if "hidden_rows" in options:
        options["hidden"] = np.zeros((1, 1, 48), np.float32)
    rotation, logits = np.zeros((1, 4, 2), np.float32), np.zeros((1, 97), np.float32)
    with pytest.raises(ValueError, match=says):
        model.model_for_thread().forward(spans, one, rotation, one, logits, **options)


@pytest.mark.smollm2
def test_perplexity_is_near_the_float32_models() -> None:
    """A coarse guard; docs/log.md has the figures over 15 thousand tokens."""
    smollm2_file()
    folder = resolve(None)
    tokens = Tokenizer.from_folder(folder).encode(ENGLISH)
    with Checkpoint.open(folder) as checkpoint:
        exact = Llama.from_tensors(from_dict(checkpoint.config), checkpoint.tensor, exact=False)
    losses = []
    for model in (exact, open_smollm2()):
        count = len(tokens) - 1
        scores = model.score([chain(model.open(count, count), tokens[:-1], logit_rows=range(count))])
        losses.append(torch.nn.functional.cross_entropy(scores.float(), torch.tensor(tokens[1:])).item())
    assert abs(losses[1] - losses[0]) < 0.05  # nats


ENGLISH = (
    "The river rises in the hills to the north of the town and runs past the old mill, where the water once turned "
    "three wheels. In spring it carries branches and foam; by August one can cross it on stones. Children learn to "
    "swim in the pool below the bridge, and in the evening their parents sit on the bank and talk about the harvest. "
    "No one remembers a winter in which the pool froze over, though the schoolmaster has read of one in a letter."
)


def test_the_rate_of_products_is_measured_for_each_set() -> None:
    assert all(0.0 < kernels.multiply_rate(name, threads, 0.001) < 1e15 for name in SETS for threads in (1, 2))
    with pytest.raises(ValueError, match="cannot run instruction set sse9"):
        kernels.multiply_rate("sse9")
    with pytest.raises(ValueError, match="at least 1"):
        kernels.multiply_rate(threads=0)
