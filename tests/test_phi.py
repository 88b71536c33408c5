"""Phi-3 and Phi-4: the part of a head that turns, LongRoPE up to the length it was trained on, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import ARCHITECTURES, CONFIG, PHI_METADATA, weights, write_gguf

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.gguf.config import read_model
from outpace.models.files.gguf.header import open_gguf
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.config.phi import head_order
from outpace.models.llama.config.rope import LongScaling

PHI = ARCHITECTURES["phi3"]
FIELDS = CONFIG | PHI
ROPE = PHI["rope_scaling"]
DEFAULT = {"rope_scaling": None, "original_max_position_embeddings": None}


def test_pairs_that_turn_lie_half_a_head_apart() -> None:
    assert head_order(8, 0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert head_order(8, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7], "2 turns with 0, 3 with 1; 4 to 7 stay"
    order = head_order(96, 72)
    assert sorted(order) == list(range(96))
    assert all(order[place + 48] == order[place] + 36 for place in range(36))


def test_a_text_is_as_long_as_those_that_longrope_was_trained_on() -> None:
    config = from_dict(FIELDS)
    assert (config.max_positions, config.rotary_dim) == (96, 8)
    gain = (1 + np.log(128 / 96) / np.log(96)) ** 0.5
    assert config.rope_scaling == LongScaling((1.0, 1.25, 1.5, 2.75), 96, pytest.approx(gain))
    named = from_dict(FIELDS | {"rope_scaling": ROPE | {"attention_factor": 1.5}})
    assert named.rope_scaling is not None
    assert named.rope_scaling.gain == 1.5
    older = from_dict(
        FIELDS | {"rope_scaling": {"type": "su"} | {name: ROPE[name] for name in ROPE if "factor" in name}}
    )
    assert older.rope_scaling == config.rope_scaling


def test_a_file_that_does_not_say_how_long_texts_were() -> None:
    """Then they had 4,096 tokens, as transformers has it."""
    silent = {name: value for name, value in FIELDS.items() if name != "original_max_position_embeddings"}
    found = from_dict(silent | {"max_position_embeddings": 131072})
    assert found.max_positions == 4096
    assert found.rope_scaling.gain == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    inside = {"rope_scaling": ROPE | {"original_max_position_embeddings": 50}}
    assert from_dict(silent | inside).max_positions == 50


def test_where_the_part_may_stand() -> None:
    """transformers 5 writes it next to the rotary base."""
    inside = {name: value for name, value in FIELDS.items() if name not in ("partial_rotary_factor", "rope_scaling")}
    inside["rope_parameters"] = ROPE | {"partial_rotary_factor": 0.5, "rope_theta": 50000.0}
    assert from_dict(inside) == from_dict(FIELDS)
    assert from_dict(CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}).rotary_dim == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partial_rotary_factor": 0.2, **DEFAULT}, "of 16 entries of a head 3 would turn, which are no pairs"),
        ({"partial_rotary_factor": 0.01, **DEFAULT}, "of 16 entries of a head 0 would turn"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5, it must be above 0 and at most 1"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        (
            {"rope_scaling": ROPE | {"short_factor": [1.0]}},
            "short_factor has 1 entries, it must have one for each of 4",
        ),
        ({"rope_scaling": ROPE | {"short_factor": [1.0, -1.0, 1.0, 1.0]}}, "it must be a list of numbers above 0"),
        ({"rope_scaling": ROPE | {"short_factor": None}}, "rope_scaling.short_factor is None, it must be a list"),
        ({"rope_scaling": ROPE | {"short_factor": ["a"] * 4}}, "it must be a list of numbers above 0"),
        ({"rope_scaling": ROPE | {"attention_factor": 0}}, "attention_factor is 0, it must be above 0"),
    ],
)
def test_senseless_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_dict(FIELDS | changes)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_what_is_left_to_transformers(field: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{field} True of the model_type 'phi3'"):
        from_dict(FIELDS | {field: True})


def config_of(path: Path, factors: dict[str, Any], **metadata: Any) -> Any:
    given = PHI_METADATA | {f"phi3.{name}": value for name, value in metadata.items()}
    tensors = weights(**PHI) | {name: np.array(value, np.float32) for name, value in factors.items()}
    return read_model(open_gguf(write_gguf(path, given, tensors=tensors, architecture="phi3"))).config


def test_what_a_file_says(tmp_path: Path) -> None:
    plain = config_of(tmp_path / "a.gguf", {})
    assert (plain.rope_scaling, plain.rotary_dim, plain.windows, plain.max_positions) == (None, 8, (), 128)
    short = {"rope_factors_short.weight": [1.0, 2.0, 3.0, 4.0]}
    gained = config_of(tmp_path / "b.gguf", short, **{"rope.scaling.attn_factor": 1.25, "attention.sliding_window": 50})
    assert gained.rope_scaling == LongScaling((1.0, 2.0, 3.0, 4.0), 96, 1.25)
    assert (gained.windows, gained.max_positions) == ((50, 50), 96)
    with pytest.raises(UserError, match="short_factor has 3 entries, it must have one for each of 4 pairs"):
        config_of(tmp_path / "c.gguf", {"rope_factors_short.weight": [1.0, 2.0, 3.0]})
    with pytest.raises(UserError, match=r"rope_factors_short.weight' is not a list of float32 divisors"):
        config_of(tmp_path / "d.gguf", {"rope_factors_short.weight": [[1.0, 2.0, 3.0, 4.0]]})
