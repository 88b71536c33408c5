"""Gemma 3: which layers see and turn how, as config.json and GGUF files say it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from files import ARCHITECTURES, CONFIG, GEMMA_METADATA, model_folder, weights, write_gguf

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.gguf.config import read_model
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.source import GgufSource
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.config.rope import LinearScaling

GEMMA = ARCHITECTURES["gemma3"]
FIELDS = CONFIG | GEMMA
METADATA = GEMMA_METADATA | {"gemma3.block_count": GEMMA["num_hidden_layers"]}


def test_a_folder_is_read_as_transformers_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 writes an object of rotary numbers for each kind of layer."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    folder = model_folder(tmp_path, **GEMMA)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert set(written["rope_parameters"]) == {"full_attention", "sliding_attention"}
    assert from_dict(written) == from_dict(FIELDS)


def test_names_of_kinds_of_rotation_as_before_transformers_5() -> None:
    scaled = {"full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 500.0}}
    found = from_dict(FIELDS | {"rope_parameters": scaled | {"sliding_attention": {"type": "default"}}})
    assert (found.rope_theta, found.rope_scaling, found.local_theta) == (500.0, LinearScaling(8.0), 10000.0)


def test_which_layers_see_what() -> None:
    config = from_dict(FIELDS | {"num_hidden_layers": 8})
    local = (True, True, True, True, True, False, True, True)
    assert (config.local_layers, config.windows) == (local, tuple(32 if is_local else None for is_local in local))
    assert [config.rotation(layer) for layer in range(8)] == [int(is_local) for is_local in local]
    long = from_dict(FIELDS | {"sliding_window": 1000})
    assert (long.windows, long.local_layers) == ((), local[:7]), "a window beyond the context changes no rotation"
    only_global = from_dict(FIELDS | {"layer_types": ["full_attention"] * 7})
    assert (only_global.windows, only_global.local_layers, len(only_global.rotations)) == ((), (), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported by the runtime llama"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding_attention"),
    ],
)
def test_what_is_left_to_transformers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        from_dict(FIELDS | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, it must be above 0"),
        ({"rope_local_base_freq": -1.0}, r"rope_local_base_freq is -1\.0"),
        ({"sliding_window_pattern": "six"}, "sliding_window_pattern is 'six', it must be a whole number"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "it must have an object for full_attention and one for sliding_att"),
        ({"rope_parameters": {"full_attention": 7}}, "it must have an object for full_attention"),
        ({"rope_parameters": 7}, "rope_parameters is 7, it must have an object"),
    ],
)
def test_senseless_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_dict(FIELDS | changes)


def config_of(path: Path, **metadata: Any) -> Any:
    given = METADATA | {f"gemma3.{name}": value for name, value in metadata.items()}
    changes = GEMMA | {"num_hidden_layers": given["gemma3.block_count"]}
    return read_model(open_gguf(write_gguf(path, given, tensors=weights(**changes), architecture="gemma3"))).config


def test_what_a_file_does_not_say(tmp_path: Path) -> None:
    plain = config_of(tmp_path / "a.gguf")
    assert (plain.local_theta, plain.query_scale, plain.windows[5]) == (10000.0, 0.25, None)
    said = {"rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": 2}
    other = config_of(tmp_path / "b.gguf", **said)
    assert (other.local_theta, other.local_layers) == (500.0, (True, False, True, False, True, False, True))
    listed = [layer == 3 for layer in range(7)]
    assert config_of(tmp_path / "e.gguf", **{"attention.sliding_window_pattern": listed}).local_layers == tuple(listed)
    none = config_of(tmp_path / "c.gguf", **{"attention.sliding_window": 0})
    assert (none.windows, none.local_layers) == ((), ())
    scaled = config_of(tmp_path / "d.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert [rotation.scaling is not None for rotation in scaled.rotations] == [True, False]


def test_the_largest_model_has_a_scale_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 62 layers in truth; heads of 32 would make it the root of 32."""
    from outpace.models.files.gguf import config

    monkeypatch.setattr(config, "GEMMA_LARGEST", 7)
    changes = GEMMA | {"head_dim": 32}
    given = METADATA | {f"gemma3.{name}": 32 for name in ("attention.key_length", "rope.dimension_count")}
    path = write_gguf(tmp_path / "a.gguf", given, tensors=weights(**changes), architecture="gemma3")
    assert config.read_model(open_gguf(path)).config.query_scale == (64 // 4) ** -0.5


@pytest.mark.parametrize("name", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_a_file_that_caps_its_scores_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"gemma3.{name} 30.0 is not supported"):
        config_of(tmp_path / "a.gguf", **{name: 30.0})


def test_norms_in_fewer_bits_are_refused(tmp_path: Path) -> None:
    """What is taken off them would be rounded."""
    path = write_gguf(tmp_path / "a.gguf", METADATA, tensors=weights(**GEMMA), architecture="gemma3")
    with GgufSource(path) as source:
        tensors, norm = source._header.tensors, "output_norm.weight"
        tensors[norm] = replace(tensors[norm], kind=1, num_bytes=tensors[norm].num_bytes // 2)
        with pytest.raises(UserError, match=rf"the norm '{norm}' has the type F16, norms of this architecture"):
            source.array("model.norm.weight")
