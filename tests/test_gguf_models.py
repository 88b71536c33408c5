"""What GGUF files hold: every quantisation, every architecture, and the scalings of rotary embeddings."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from files import (
    ARCHITECTURES,
    CONFIG,
    GEMMA2_METADATA,
    GEMMA_METADATA,
    PHI_METADATA,
    interleaved,
    stored_as,
    weights,
    write_gguf,
)

from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf import source as gguf_weights
from outpace.models.files.gguf.source import GgufCheckpoint, can_read, convert
from outpace.models.llama.config import llama_config as llama
from outpace.models.llama.config.rope import Llama3Scaling

KINDS = [kind.name for kind in gguf.GGMLQuantizationType if can_read(int(kind))]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE_METADATA = {
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 16,
    "llama.attention.head_count_kv": 4,
}


def test_all_common_quantisations_can_be_read() -> None:
    common = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
    assert set(common.split()) <= set(KINDS)
    assert len(KINDS) >= 24


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Read in pieces and in the order of Hugging Face, every value is what the gguf package makes of the whole."""
    monkeypatch.setattr(gguf_weights, "PIECE_VALUES", 5000)
    original = weights(num_hidden_layers=1, **WIDE)
    metadata = {**WIDE_METADATA, "llama.block_count": 1}
    folder = convert(write_gguf(tmp_path / "a.gguf", metadata, kind, tensors=original), tmp_path / "cache")
    quantisation = gguf.GGMLQuantizationType[kind]
    with Checkpoint.open(folder) as checkpoint:
        for name, values in original.items():
            if values.ndim == 1:
                continue
            whole = stored_as(quantisation, interleaved(name, values))
            expected = whole if kind == "F32" else gguf.quants.dequantize(whole, quantisation)
            order = interleaved(name, np.arange(len(values)))  # row i of the file is row order[i] of the model
            found = checkpoint.tensor(name).float().numpy()
            assert np.array_equal(found[order], expected), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(tmp_path: Path, architecture: str) -> None:
    changes = ARCHITECTURES[architecture]
    original, config = weights(**changes), CONFIG | changes
    named = "llama" if architecture == "mistral" else architecture
    metadata = {f"{named}.block_count": config["num_hidden_layers"]}
    if architecture == "mistral":
        metadata["llama.attention.sliding_window"] = 32
    if architecture in (
        "gemma2",
        "gemma3",
    ):  # whose norms the file has whole, and the folder less one: small sums that stay exact
        metadata |= GEMMA_METADATA | GEMMA2_METADATA
        norms = (name for name in original if "norm" in name)
        original |= {name: np.round(original[name] * 64) / np.float32(64) for name in norms}
    more = {}
    if architecture == "phi3":
        metadata |= PHI_METADATA | {"phi3.rope.scaling.attn_factor": 1.25}
        config["rope_scaling"] = changes["rope_scaling"] | {"attention_factor": 1.25}
        factors = {name: np.array(changes["rope_scaling"][f"{name}_factor"], np.float32) for name in ("short", "long")}
        more = {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, tensors=original | more, architecture=named)
    with Checkpoint.open(convert(path, tmp_path)) as checkpoint:
        assert llama.from_dict(checkpoint.config) == llama.from_dict(config)
        assert checkpoint.config["architectures"] == config["architectures"]
        assert checkpoint.names() == sorted(original)
        assert all(np.array_equal(checkpoint.tensor(name).numpy(), values) for name, values in original.items())
        if architecture == "smollm3":
            assert checkpoint.config["no_rope_layers"] == [1, 1, 1, 0, 1]


def llama3_divisors(factor: float, context: int, theta: float = 50000.0, head_dim: int = 16) -> np.ndarray:
    """The divisors that llama.cpp's converter writes for Llama 3's rope scaling."""
    found = []
    for pair in range(head_dim // 2):
        length = 2 * np.pi * theta ** (2 * pair / head_dim)  # tokens per rotation
        share = (context / length - 1) / 3
        found.append(
            1.0 if length < context / 4 else factor if length > context else 1 / ((1 - share) / factor + share)
        )
    return np.array(found, np.float32)


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (8.0, 64), (4.0, 3000)])
def test_llama3_rope_scaling(tmp_path: Path, factor: float, context: int) -> None:
    """The file's divisors give the frequencies of the original config.json, and texts are as long."""
    original = weights()
    divisors = {"rope_freqs.weight": llama3_divisors(factor, context)}
    path = write_gguf(tmp_path / "tiny.gguf", tensors=original | divisors)
    with Checkpoint.open(convert(path, tmp_path)) as checkpoint:
        config = llama.from_dict(checkpoint.config)
        assert checkpoint.names() == sorted(original)
    frequencies = (50000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    expected = Llama3Scaling(factor, 1.0, 4.0, context).stretched(frequencies, 50000.0)
    assert config.rope_scaling is not None
    assert np.allclose(config.rope_scaling.stretched(frequencies, 50000.0), expected, rtol=1e-6, atol=0)
    assert (config.rope_scaling.gain, config.max_positions) == (1.0, CONFIG["max_position_embeddings"])


def test_rope_divisors_of_one_mean_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tensors=weights() | {"rope_freqs.weight": np.ones(8, np.float32)})
    assert "rope_scaling" not in GgufCheckpoint(path).config


@pytest.mark.parametrize(("kind", "length"), [("linear", {}), ("yarn", {"original_max_position_embeddings": 32})])
def test_other_rope_scalings(tmp_path: Path, kind: str, length: dict[str, int]) -> None:
    metadata = {"type": kind, "factor": 4.0, "original_context_length": 32}
    fields = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    found = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", fields)).config["rope_scaling"]
    assert found == {"rope_type": kind, "factor": 4.0, **length}
