"""GGUF files as Ollama writes them, and files whose metadata contradict their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import ARCHITECTURES, GEMMA_METADATA, tokens, weights, write_gguf

from outpace.core.errors import UserError
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.llama.config import llama_config as llama
from outpace.models.llama.config.rope import LinearScaling, YarnScaling
from outpace.models.load import load_model


def gemma3(path: Path, metadata: dict[str, Any] | None = None, **more: np.ndarray) -> Path:
    tensors = weights(**ARCHITECTURES["gemma3"])
    given = GEMMA_METADATA | {"gemma3.block_count": 7} | (metadata or {})
    return write_gguf(path, given, tensors=tensors | more, architecture="gemma3")


EYES = {"v.blk.0.attn_k.weight": np.ones((8, 8), np.float32), "mm.mm_input_projection.weight": np.ones((4, 4), "f4")}
SEEN = "tensors of a vision or audio model in the file were ignored: mm, v"
GLOBAL, LOCAL = "gemma3.rope.global.freq_base", "gemma3.rope.local.freq_base"
LEFT_OUT = {"gemma3.attention.layer_norm_rms_epsilon": None, "gemma3.rope.freq_base": None}


@pytest.mark.parametrize("runtime", ["native", "llama"])
def test_tensors_of_a_vision_model_are_ignored_with_a_notice(tmp_path: Path, runtime: str) -> None:
    for name, metadata, extra, notice in (
        ("a.gguf", {"gemma3.vision.block_count": 27, "gemma3.mm.tokens_per_image": 256}, EYES, SEEN),
        ("b.gguf", {}, {"a.blk.0.attn_q.weight": EYES["v.blk.0.attn_k.weight"]}, SEEN.replace("mm, v", "a")),
        ("c.gguf", {"gemma3.odd": 1}, EYES, f"unknown metadata of the file were ignored: gemma3.odd; {SEEN}"),
    ):
        loaded = load_model(gemma3(tmp_path / name, metadata, **extra), runtime=runtime)
        assert loaded.notice == notice
        assert loaded.model.config == load_model(gemma3(tmp_path / "plain.gguf"), runtime=runtime).model.config


def test_fields_that_ollama_names_otherwise_or_leaves_out(tmp_path: Path) -> None:
    def config_of(metadata: dict[str, Any], **more: np.ndarray) -> llama.LlamaConfig:
        return llama.from_dict(GgufCheckpoint(gemma3(tmp_path / "a.gguf", metadata, **more)).config)

    named = config_of({GLOBAL: 2e6, LOCAL: 3e4, "gemma3.rope.freq_base": None})
    assert (named.rope_theta, named.local_theta) == (2e6, 3e4)
    missing = config_of(LEFT_OUT)
    assert (missing.rope_theta, missing.local_theta, missing.rms_norm_eps) == (1e6, 1e4, 1e-6)
    long = {"gemma3.context_length": 131072}
    assert config_of(long, **EYES).rope_scaling == LinearScaling(8.0)
    for metadata, more in ((long, {}), ({}, EYES), (long | {"gemma3.rope.scaling.type": "none"}, EYES)):
        assert config_of(metadata, **more).rope_scaling is None
    yarn = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 32,
        "beta_fast": 64.0,
        "extrapolation_factor": 1.0,
    }
    scaling = config_of({f"gemma3.rope.scaling.{name}": value for name, value in yarn.items()}).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.fast_turns == 64.0


def test_tokens_without_an_embedding_row_are_cut_if_they_were_added(tmp_path: Path) -> None:
    kinds = [1] * len(tokens())
    for kind in (3, 4):
        metadata = {"tokenizer.ggml.tokens": [*tokens(), "<eye>"], "tokenizer.ggml.token_type": [*kinds, kind]}
        tokenizer = load_model(gemma3(tmp_path / "a.gguf", metadata)).tokenizer
        assert tokenizer.size == len(tokens())
        assert tokenizer.decode(tokenizer.encode("a<eye>b")) == "a<eye>b"
    metadata["tokenizer.ggml.token_type"] = [*kinds, 1]
    with pytest.raises(UserError, match="names 273 tokens, its embedding has 272 rows"):
        load_model(gemma3(tmp_path / "a.gguf", metadata))


def test_llama_3_without_the_name_of_its_pre_tokenizer(tmp_path: Path) -> None:
    words = [*tokens()[:-1], "<|start_header_id|>"]
    text = "It's 12345  tabs"
    for listed, expected in ((words, "llama-bpe"), (tokens(), "default")):
        given = {"tokenizer.ggml.tokens": listed, "tokenizer.ggml.add_bos_token": False}
        found, same = (
            GgufCheckpoint(write_gguf(tmp_path / "a.gguf", given | {"tokenizer.ggml.pre": pre})).tokenizer.tokenizer
            for pre in (None, expected)
        )
        assert found.to_str() == same.to_str()
        assert found.encode(text).ids == same.encode(text).ids


def test_tensors_that_change_no_text(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf")
    extra = {"blk.0.attn_output.bias": np.zeros(64, np.float32), "blk.1.attn_rot_embd": np.ones(8, np.float32)}
    other = write_gguf(tmp_path / "other.gguf", tensors=weights() | extra)
    assert load_model(other).notice is None
    assert GgufCheckpoint(other).names() == GgufCheckpoint(plain).names()


@pytest.mark.parametrize(
    ("metadata", "extra", "words"),
    [
        ({"llama.block_count": 1}, {}, "'blk.1.* is not supported: a model with llama.block_count 1 has none such"),
        ({"llama.block_count": 3}, {}, "'model.layers.2.*, which a model with llama.block_count 3 has"),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(16, "f4")}, "a model with the architecture llama has none such"),
        ({}, {"blk.0.attn_output.bias": np.ones(64, "f4")}, "'blk.0.attn_output.bias' is not supported"),
        ({"llama.attention.head_count_kv": 4}, {}, r"attn_k.weight' has shape \[32, 64\], .*head_count_kv 4"),
        ({"llama.feed_forward_length": 128}, {}, r"ffn_gate.weight' has shape \[96, 64\], .*feed_forward_length 128"),
    ],
)
def test_metadata_that_contradict_the_tensors(tmp_path: Path, metadata: Any, extra: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_model(write_gguf(tmp_path / "a.gguf", metadata, tensors=weights() | extra))
