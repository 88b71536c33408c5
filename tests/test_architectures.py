"""Every architecture that the runtime names, against transformers: tiny random checkpoints through their files."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from passes import branch, fresh, prefilled, random_parents, text
from torch import Tensor

from outpace.core.errors import UserError
from outpace.models.base import Part, chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.config.rope import Rotation, YarnScaling
from outpace.models.llama.torch.attention import FastAttention
from outpace.models.llama.torch.rope_tables import Rotary
from outpace.models.llama.torch.runtime import Llama

CPU = torch.device("cpu")
YARNED = YarnScaling(4.0, 1.0, 32.0, 64, 1.1, True)
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
SHARPER = YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 24, "sliding_window": 11, "num_hidden_layers": 6},
    **{"layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"]},
    **{"final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0},
}
JOINED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_KINDS = {
    "gemma4_e": {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 101}
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4_large": JOINED,
    "gemma4_experts": JOINED
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
}
LATE = ["full_attention", "sliding_attention"] * 2
FACTORS = [1.0 + 0.3 * pair for pair in range(12)]
LONG = {
    "rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS]},
    "original_max_position_embeddings": 100,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "llama3": (
        "Llama",
        {"rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}},
    ),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "yarn_outside": (
        "Llama",
        {"rope_scaling": YARN | {"rope_theta": 1.6}, "original_max_position_embeddings": 20},
    ),
    "linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_untied": ("Qwen2", {"num_attention_heads": 8}),
    "qwen2_window": ("Qwen2", WINDOW),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": YARN, "max_position_embeddings": 40}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_window_yarn": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_scaling": SHARPER, **WINDOW}),
    "qwen3_layers": (
        "Qwen3",
        {"head_dim": 16, **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma2": ("Gemma2", GEMMA | CAPS | {"head_dim": 32, "query_pre_attn_scalar": 24}),
    "gemma2_uncapped": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": LATE},
    ),
    **{name: ("Gemma4Text", GEMMA4 | changes) for name, changes in GEMMA4_KINDS.items()},
    "gemma3": ("Gemma3Text", GEMMA | {"head_dim": 32, "query_pre_attn_scalar": 21, "num_hidden_layers": 7}),
    "gemma3_layers": (
        "Gemma3Text",
        GEMMA
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}}}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False},
    ),
    "gemma3_long_window": ("Gemma3Text", GEMMA | {"sliding_window": 500, "attention_bias": True}),
    "phi3": ("Phi3", {}),
    "phi3_window": ("Phi3", {"sliding_window": 13, "num_key_value_heads": 4}),
    "phi3_part": ("Phi3", {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.75, **LONG}),
    "smollm3": ("SmolLM3", {}),
    "smollm3_window": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 11}),
}


@dataclass(frozen=True)
class Pair:
    """One random model: transformers' own, and the folder that it was saved to."""

    theirs: Any
    folder: Path

    def ours(self, dtype: torch.dtype = torch.float32, **options: Any) -> Llama:
        with Checkpoint.open(self.folder) as checkpoint:
            config = from_dict(checkpoint.config)
            checkpoint.check_shapes(tensor_shapes(config))
            return Llama.from_tensors(config, checkpoint.tensor, dtype=dtype, **options)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """transformers' scores after every token. [tokens, vocab]"""
        return self.theirs(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    @torch.inference_mode()
    def last_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """transformers' scores after each text, from one pass over texts padded on the right. [texts,
        vocab]"""
        longest = max(map(len, texts))
        filled = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        ends = torch.tensor([len(text) - 1 for text in texts])
        return self.theirs(filled, use_cache=False).logits[torch.arange(len(texts)), ends]


def make(name: str, folder: Path) -> Pair:
    family, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, family + "Config")(**copy.deepcopy(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        scales = [named for named in model.named_buffers() if named[0].endswith("layer_scalar")]
        for parameter_name, parameter in [*model.named_parameters(), *scales]:
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.4)
            elif family == "Qwen3" and ("q_proj" in parameter_name or "k_proj" in parameter_name):
                parameter.mul_(0.1)  # the heads' own norms make up for it, and their bounds must
    model.save_pretrained(folder)
    return Pair(model.eval(), folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return pair


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1, "scores that hardly differ prove nothing"
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("exact", [None, False])
def test_a_text_scores_as_in_transformers(pair: Pair, exact: bool | None) -> None:
    model = pair.ours(exact=exact)
    tokens = text(model, 75)
    assert_near(model.score([chain(model.open(100, 100), tokens, range(75))]), pair.logits(tokens))


@pytest.mark.parametrize("exact", [None, pytest.param(False, marks=pytest.mark.long)])  # the test above has both
def test_trees_score_as_their_paths_in_transformers_also_after_keep(pair: Pair, exact: bool | None) -> None:
    model = pair.ours(exact=exact)
    written = text(model, 21)
    session = prefilled(model, written)
    keep: list[int] = []
    for turn in range(3):
        parents, tokens = random_parents(14, turn), text(model, 14, 10 + turn)
        got = model.score([Part(session, tokens, parents, range(14), keep)])
        paths = [branch(parents, node) for node in range(14)]
        assert_near(got, pair.last_logits([written + [tokens[node] for node in path] for path in paths]))
        keep = random.Random(turn).choice(paths[7:])
        written += [tokens[node] for node in keep]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_exact_trees_and_kept_keys_are_bitwise_those_of_fresh_paths(pair: Pair, dtype: torch.dtype) -> None:
    model = pair.ours(dtype)
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        assert model.exact
    if not model.exact:  # this machine has no packed product for it, and says so
        assert dtype == torch.bfloat16
        with pytest.raises(UserError, match="exact mode is not available"):
            pair.ours(dtype, exact=True)
        return
    written = text(model, 30)
    session = prefilled(model, written)
    keep: list[int] = []
    for turn in range(3):
        parents, tokens = random_parents(14, turn), text(model, 14, 10 + turn)
        got = model.score([Part(session, tokens, parents, range(14), keep)])
        for node in range(turn, 14, 3):
            path = [tokens[other] for other in branch(parents, node)]
            assert torch.equal(got[node], fresh(model, written + path))
        keep = branch(parents, 13)
        written += [tokens[node] for node in keep]
    session.keep(keep)
    assert torch.equal(session.read(len(written)), prefilled(model, written).read(len(written)))


def test_queries_keys_and_values_stay_within_the_bounds_of_their_grids(pair: Pair) -> None:
    """The worst input of a head is the direction that its weights stretch most, either way along its bias."""
    model = pair.ours(exact=False)
    model.open(50, 0)  # positions turn as far as sessions reach
    for number, layer in enumerate(model._layers):
        config, width = model._configs[number], model._configs[number].head_dim
        bias = layer.qkv.linear(torch.zeros(1, config.hidden_size))
        weight = (layer.qkv.linear(torch.eye(config.hidden_size)) - bias).T  # [outputs, hidden]
        worst = torch.linalg.svd(weight.unflatten(0, (-1, width))).Vh[:, 0]  # [heads, hidden]
        rows = weight / weight.norm(dim=1, keepdim=True)
        mixed = layer.qkv.linear(torch.cat([worst, -worst, rows, -rows]))
        if layer.head_norm is not None:
            mixed = model._norm_heads(number, mixed, layer.head_norm)
        turns = model._rope(torch.arange(len(mixed)) % 50)[config.rotation(number)][:, : len(layer.bounds)]
        turned = FastAttention(torch.float32).prepare(mixed, turns)  # [inputs, heads.., head_dim]
        is_value = layer.bounds[:, 1] == 1
        reached = torch.where(is_value, turned.abs().amax(dim=(0, 2)), turned.norm(dim=2).amax(dim=0))
        assert (reached <= layer.bounds[:, 0]).all()
        assert (reached * 8 * width**0.5 > layer.bounds[:, 0]).all(), "so wide a bound wastes bits"


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.08), (torch.float16, 0.01)], ids=str)
def test_half_precisions_are_near(pair: Pair, dtype: torch.dtype, most: float) -> None:
    model = pair.ours(dtype)
    tokens = text(model, 60)
    got = model.score([chain(model.open(100, 100), tokens, range(60))])
    expected = pair.logits(tokens)
    assert got.dtype == dtype
    off = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
    if model.config.experts:  # where a router is nearly undecided, a token may choose another expert
        assert off.quantile(0.25) < most
    else:
        assert off.square().mean().sqrt() < most


def test_a_text_past_the_declared_length_where_yarn_scales_it(pairs: Callable[[str], Pair]) -> None:
    model = pairs("qwen2_yarn").ours()
    assert model.max_positions == 128
    tokens = text(model, 120)
    assert_near(model.score([chain(model.open(128, 128), tokens, range(120))]), pairs("qwen2_yarn").logits(tokens))


def test_rotary_factors_do_not_depend_on_the_table_size() -> None:
    short, steps, long = (Rotary(16, Rotation(10000.0, YARNED), CPU) for _ in range(3))
    short.grow_to(10)
    for positions in (5000, 20, 9000):
        steps.grow_to(positions)
    long.grow_to(9000)
    places = torch.arange(9000)
    assert torch.equal(steps(places), long(places))
    assert torch.equal(short(places[:10]), long(places[:10]))


def config_of(family: str, **changes: Any) -> LlamaConfig:
    return from_dict(SIZES | {"model_type": family} | changes)


def test_missing_fields_default_as_in_transformers() -> None:
    assert config_of("mistral", max_position_embeddings=32768).windows == (4096,) * 4
    assert config_of("mistral", sliding_window=4096).windows == ()  # longer than the text may be
    assert config_of("qwen2", sliding_window=9).windows == ()  # not in use
    assert config_of("qwen2", **WINDOW).windows == (None, 9, 9, 9)
    assert config_of("qwen2").attention_bias
    assert not config_of("qwen2", attention_bias=True).output_bias
    assert config_of("qwen3").head_dim == 128
    assert config_of("llama", rope_scaling=YARN, original_max_position_embeddings=20).rope_scaling.original == 20
    smollm3 = config_of("smollm3")
    assert (smollm3.rotary_layers, smollm3.rope_theta) == ((True, True, True, False), 2000000.0)
    assert smollm3.tie_embeddings
    assert config_of("smollm3", no_rope_layers=[1] * 6).rotary_layers == ()


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gpt2", "model_type", "gpt2"),
        ("llama", "architectures", ["MixtralForCausalLM"]),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("llama", "rope_scaling", {"type": "default", "mrope_section": [16, 24, 24]}),
        ("llama", "rope_parameters", {"rope_type": ["llama3"]}),
        ("llama", "sliding_window", 64),
        ("llama", "no_rope_layers", [1, 1, 1, 0]),
        ("llama", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("llama", "layer_types", ["full_attention", "chunked_attention"] * 2),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("qwen2", "mlp_bias", True),
        ("qwen3", "hidden_act", "gelu"),
    ],
)
def test_unsupported_fields_are_refused_with_the_adapter(family: str, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{field}.*--runtime transformers"):
        config_of(family, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": -1}),
        ("rope_scaling", {"type": "linear", "factor": float("nan")}),
        ("rope_scaling", LLAMA3),
        ("rope_scaling", LLAMA3 | {"factor": 8.0, "low_freq_factor": 4.0}),
        ("rope_scaling", LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": "8192"}),
        ("rope_scaling", YARN | {"truncate": 1}),
        ("rope_scaling", YARN | {"attention_factor": 0}),
        ("rope_theta", 1.0),
        ("no_rope_layers", [1, 0]),
        ("no_rope_layers", [1, 0, 2, 1]),
        ("no_rope_layers", "all"),
        ("no_rope_layer_interval", 0),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("sliding_window", 0),
        ("use_sliding_window", "yes"),
    ],
)
def test_invalid_fields_are_named(field: str, value: Any) -> None:
    changes = {field: value} | ({"rope_scaling": {**YARN, "rope_theta": None}} if field == "rope_theta" else {})
    with pytest.raises(UserError, match=field):
        config_of("smollm3", **({"sliding_window": 9} | changes))


def test_both_ways_to_write_the_rotary_base() -> None:
    outside = config_of("llama", rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0})
    inside = config_of("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0})
    assert outside == inside
    assert config_of("llama", rope_theta=7.0, rope_scaling={}).rope_theta == 7.0
