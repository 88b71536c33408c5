"""Gemma 3 and Phi-3: which layers see and rotate what, as config.json and GGUF files say it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from files import ARCHITECTURES, CONFIG, GEMMA_METADATA, PHI_METADATA, model_folder, weights, write_gguf

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.gguf import config as gguf_config
from outpace.models.files.gguf.config import read_model
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict
from outpace.models.llama.config.rope import LinearScaling, LongScaling

GEMMA, PHI = CONFIG | ARCHITECTURES["gemma3"], CONFIG | ARCHITECTURES["phi3"]
METADATA = {"gemma3": GEMMA_METADATA | {"gemma3.block_count": GEMMA["num_hidden_layers"]}, "phi3": PHI_METADATA}
ROPE = PHI["rope_scaling"]
DEFAULT = {"rope_scaling": None, "original_max_position_embeddings": None}


def config_of(path: Path, family: str, metadata: dict[str, Any], factors: dict[str, Any] | None = None) -> LlamaConfig:
    """The config of a file with these metadata and factors of LongRoPE."""
    given = METADATA[family] | {f"{family}.{name}": value for name, value in metadata.items()}
    tensors = weights(**ARCHITECTURES[family])
    tensors |= {name: np.array(value, np.float32) for name, value in (factors or {}).items()}
    return read_model(open_gguf(write_gguf(path, given, tensors=tensors, architecture=family))).config


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, it must be above 0"),
        (GEMMA, {"rope_local_base_freq": -1.0}, r"rope_local_base_freq is -1\.0"),
        (GEMMA, {"sliding_window_pattern": "six"}, "sliding_window_pattern is 'six', it must be a whole number"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, "must have an object for full_attention and one for sliding"),
        (GEMMA, {"rope_parameters": 7}, "rope_parameters is 7, it must have an object"),
        (PHI, {"partial_rotary_factor": 0.2, **DEFAULT}, "of 16 entries of a head 3 would turn, which are no pairs"),
        (PHI, {"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5, it must be above 0 and at most 1"),
        (PHI, {"rope_scaling": ROPE | {"short_factor": [1.0]}}, "has 1 entries, it must have one for each of 4"),
        (PHI, {"rope_scaling": ROPE | {"short_factor": [1.0, -1.0, 1.0, 1.0]}}, "must be a list of numbers above 0"),
        (PHI, {"rope_scaling": ROPE | {"short_factor": None}}, "rope_scaling.short_factor is None, it must be a list"),
        (PHI, {"rope_scaling": ROPE | {"attention_factor": 0}}, "attention_factor is 0, it must be above 0"),
    ],
)
def test_invalid_fields_are_named(fields: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_dict(fields | changes)


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        (GEMMA, {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported by the runtime llama"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (
            GEMMA,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention",
        ),
        (PHI, {"attention_bias": True}, "attention_bias True of the model_type 'phi3'"),
        (PHI, {"mlp_bias": True}, "mlp_bias True of the model_type 'phi3'"),
    ],
)
def test_unsupported_fields_are_left_to_transformers(
    fields: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        from_dict(fields | changes)


# Gemma 3


def test_rotary_numbers_of_each_kind_of_layer(tmp_path: Path) -> None:
    """transformers 5 writes an object for each kind of layer, and did so with other names before."""
    config = transformers.AutoConfig.from_pretrained(model_folder(tmp_path, **ARCHITECTURES["gemma3"]))
    config.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert set(written["rope_parameters"]) == {"full_attention", "sliding_attention"}
    assert from_dict(written) == from_dict(GEMMA)
    scaled = {"full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 500.0}}
    found = from_dict(GEMMA | {"rope_parameters": scaled | {"sliding_attention": {"type": "default"}}})
    assert (found.rope_theta, found.rope_scaling, found.local_theta) == (500.0, LinearScaling(8.0), 10000.0)


def test_a_gemma_file(tmp_path: Path) -> None:
    def found(**metadata: Any) -> LlamaConfig:
        return config_of(tmp_path / "a.gguf", "gemma3", metadata)

    plain = found()
    assert (plain.local_theta, plain.query_scale, plain.windows[5]) == (10000.0, 0.25, None)
    other = found(**{"rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": 2})
    assert (other.local_theta, other.local_layers) == (500.0, (True, False, True, False, True, False, True))
    listed = [layer == 3 for layer in range(7)]
    assert found(**{"attention.sliding_window_pattern": listed}).local_layers == tuple(listed)
    none = found(**{"attention.sliding_window": 0})
    assert (none.windows, none.local_layers) == ((), ())
    scaled = found(**{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert [rotation.scaling is not None for rotation in scaled.rotations] == [True, False]
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        with pytest.raises(UserError, match=f"gemma3.{name} 30.0 is not supported"):
            found(**{name: 30.0})


def test_the_largest_gemma_has_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 62 layers in truth; heads of 32 would make it the root of 32."""
    monkeypatch.setattr(gguf_config, "GEMMA_LARGEST", 7)
    given = METADATA["gemma3"] | {f"gemma3.{name}": 32 for name in ("attention.key_length", "rope.dimension_count")}
    tensors = weights(**ARCHITECTURES["gemma3"] | {"head_dim": 32})
    path = write_gguf(tmp_path / "a.gguf", given, tensors=tensors, architecture="gemma3")
    assert read_model(open_gguf(path)).config.query_scale == (64 // 4) ** -0.5


def test_gemma_norms_in_fewer_bits_are_refused(tmp_path: Path) -> None:
    """Subtracting one from them would round."""
    tensors = weights(**ARCHITECTURES["gemma3"])
    path = write_gguf(tmp_path / "a.gguf", METADATA["gemma3"], tensors=tensors, architecture="gemma3")
    with GgufCheckpoint(path) as source:
        tensors, norm = source._header.tensors, "output_norm.weight"
        tensors[norm] = replace(tensors[norm], kind=1, num_bytes=tensors[norm].num_bytes // 2)
        with pytest.raises(UserError, match=rf"the norm '{norm}' has the type F16, norms of this architecture"):
            source.array("model.norm.weight")


# Phi-3 and Phi-4


def test_texts_are_as_long_as_those_of_the_first_training() -> None:
    config = from_dict(PHI)
    assert (config.max_positions, config.rotary_dim) == (96, 8)
    gain = (1 + np.log(128 / 96) / np.log(96)) ** 0.5
    assert config.rope_scaling == LongScaling((1.0, 1.25, 1.5, 2.75), 96, pytest.approx(gain))
    named = from_dict(PHI | {"rope_scaling": ROPE | {"attention_factor": 1.5}})
    assert named.rope_scaling == LongScaling((1.0, 1.25, 1.5, 2.75), 96, 1.5)
    older = {"type": "su"} | {name: ROPE[name] for name in ROPE if "factor" in name}
    assert from_dict(PHI | {"rope_scaling": older}).rope_scaling == config.rope_scaling
    # without a length, 4,096 tokens as in transformers
    silent = {name: value for name, value in PHI.items() if name != "original_max_position_embeddings"}
    found = from_dict(silent | {"max_position_embeddings": 131072})
    assert found.max_positions == 4096
    assert found.rope_scaling.gain == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    inside = {"rope_scaling": ROPE | {"original_max_position_embeddings": 50}}
    assert from_dict(silent | inside).max_positions == 50


def test_where_the_rotated_part_may_be() -> None:
    """transformers 5 writes it next to the rotary base."""
    inside = {name: value for name, value in PHI.items() if name not in ("partial_rotary_factor", "rope_scaling")}
    inside["rope_parameters"] = ROPE | {"partial_rotary_factor": 0.5, "rope_theta": 50000.0}
    assert from_dict(inside) == from_dict(PHI)
    assert from_dict(CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}).rotary_dim == 0


def test_a_phi_file(tmp_path: Path) -> None:
    def found(short: list[Any] | None, **metadata: Any) -> LlamaConfig:
        factors = {} if short is None else {"rope_factors_short.weight": short}
        return config_of(tmp_path / "a.gguf", "phi3", metadata, factors)

    plain = found(None)
    assert (plain.rope_scaling, plain.rotary_dim, plain.windows, plain.max_positions) == (None, 8, (), 128)
    gained = found([1.0, 2.0, 3.0, 4.0], **{"rope.scaling.attn_factor": 1.25, "attention.sliding_window": 50})
    assert gained.rope_scaling == LongScaling((1.0, 2.0, 3.0, 4.0), 96, 1.25)
    assert (gained.windows, gained.max_positions) == ((50, 50), 96)
    with pytest.raises(UserError, match="short_factor has 3 entries, it must have one for each of 4 pairs"):
        found([1.0, 2.0, 3.0])
    with pytest.raises(UserError, match=r"rope_factors_short.weight' is not a list of float32 divisors"):
        found([[1.0, 2.0, 3.0, 4.0]])
