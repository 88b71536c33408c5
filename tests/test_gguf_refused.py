"""GGUF files that are damaged, inconsistent or unsupported: one sentence each, and nothing is left on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from files import MERGES, subfolders, tokens, weights, write_gguf
from test_tokenizer import WORDS, sentence_piece

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf import source as gguf_file
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.source import convert


def refused(path: Path, cache: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        convert(path, cache)
    assert path.name in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert subfolders(cache) == []
    return str(caught.value)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    torn = tmp_path / "torn.gguf"
    for size in [*range(0, 200, 7), *range(200, len(whole) - 300, len(whole) // 60), len(whole) - 260]:
        torn.write_bytes(whole[:size])
        refused(torn, tmp_path / "cache")


def accepted(path: Path, cache: Path) -> bool:
    """Whether a file is converted; where it is refused, that says which, and leaves nothing."""
    try:
        folder = convert(path, cache)
    except UserError as error:
        said = str(error)
    else:
        check_accepted(path, folder)
        shutil.rmtree(folder)
        return True
    assert path.name in said
    assert subfolders(cache) == []
    return False


def check_accepted(path: Path, folder: Path) -> None:
    """The header is what the gguf package reads, the weights are those that were written: a damage of the header cannot
    change a weight. It either moves a tensor, which is refused, or changes a text or a number."""
    fields = gguf.GGUFReader(path).fields
    header = open_gguf(path)
    with Checkpoint.open(folder) as checkpoint:
        assert all(header.metadata[key] == fields[key].contents() for key in fields if not key.startswith("GGUF."))
        for name, values in weights().items():
            assert np.array_equal(checkpoint.tensor(name).numpy(), values), name


@pytest.mark.parametrize("trials", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_lying_bytes_never_crash(tmp_path: Path, trials: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    random = np.random.default_rng(0)
    end = min(entry.start for entry in open_gguf(tmp_path / "whole.gguf").tensors.values())
    path, count = tmp_path / "torn.gguf", 0
    for trial in range(trials):
        damaged = bytearray(whole)
        place = int(random.integers(4, 64 if trial % 3 == 0 else end))
        for offset in range(int(random.integers(1, 9))):
            damaged[place + offset] = int(random.choice([0, 1, 127, 255, int(random.integers(256))]))
        path.write_bytes(damaged)
        count += accepted(path, tmp_path / "cache")
    assert 0.05 < count / trials < 0.25  # texts that may be other texts; more, and the damage is no test


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama.rope.dimension_count", 16),
        ("llama.attention.value_length", 16),
        ("llama.expert_count", 0),
        ("llama.context_length", 64),
        ("llama.attention.head_count_kv", 2),
        ("split.count", 1),
        ("tokenizer.ggml.pre", "llama-bpe"),
        ("tokenizer.ggml.merges", MERGES[:-1]),
        ("tokenizer.ggml.eos_token_id", 0),
        ("general.name", "an unused field"),
    ],
)
def test_allowed_metadata(tmp_path: Path, field: str, value: object) -> None:
    """The counterpart of the refused values below."""
    assert accepted(write_gguf(tmp_path / "tiny.gguf", {field: value}), tmp_path / "cache")


def test_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    refused(path, tmp_path / "cache", "not a GGUF file")
    refused(tmp_path / "none.gguf", tmp_path / "cache", "cannot be read")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("llama.rope.scaling.type", "longrope", "rope.scaling.type"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count"),
        ("llama.attention.value_length", 32, "value_length"),
        ("llama.attention.sliding_window", "all", "sliding_window"),
        ("split.count", 3, "one of 3 parts of a model, so the first one's name must end in -00001-of-00003.gguf"),
        ("split.count", "3", "split.count '3'"),
        ("llama.expert_count", 8, "expert_used_count is None"),
        ("llama.attention.head_count", 3, "num_attention_heads"),
        ("llama.block_count", None, "num_hidden_layers"),
        ("llama.block_count", 3, "model.layers.2"),
        ("llama.block_count", 1, "blk.1"),
        ("llama.context_length", None, "context_length"),
        ("llama.feed_forward_length", 128, "shape"),
        ("llama.block_count", 2**31 - 1, "block_count"),
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model"),
        ("tokenizer.ggml.pre", "falcon", "tokenizer.ggml.pre"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.tokens", [*tokens(), "one more"], "token"),
        ("tokenizer.ggml.tokens", [*tokens()[:-1], "hello"], "twice"),
        ("tokenizer.ggml.merges", [*MERGES, "un known"], "tokenizer"),
        ("tokenizer.ggml.merges", [*MERGES, "a"], "merges"),
        ("tokenizer.ggml.token_type", [1, 2], "token_type"),
        ("tokenizer.ggml.eos_token_id", 999, "eos_token_id"),
        ("tokenizer.ggml.added_tokens", [1], "added_tokens must hold texts"),
        ("tokenizer.chat_template", 7, "tokenizer.chat_template is 7, it must be a string"),
        ("tokenizer.chat_template.rag", True, "tokenizer.chat_template.rag is True"),
        ("general.type", "adapter", "holds no model: its general.type is 'adapter'"),
    ],
)
def test_refused_metadata(tmp_path: Path, field: str, value: object, word: str) -> None:
    refused(write_gguf(tmp_path / "tiny.gguf", {field: value}), tmp_path / "cache", word)


def test_a_word_that_merges_cannot_be_sought_for(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS[:-1], "a" * 1001]
    path = sentence_piece(tmp_path / "sp.gguf", tokens=words)
    said = refused(path, tmp_path / "cache", "a token of 1001 characters is not supported, at most 1000 are")
    assert said.count(str(path)) == 1


def test_refused_contents(tmp_path: Path) -> None:
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    refused(write_gguf(path, architecture="gemma"), cache, "'gemma'", "qwen3", "`--runtime transformers`")
    refused(write_gguf(path, architecture="qwen2"), cache, "q_proj.bias")
    wrong = {"rope_freqs": np.full((8, 2), 2.0), "numbers above 0": np.array([1.0, np.nan]), "one for each": np.ones(2)}
    for word, divisors in wrong.items():
        extra = weights() | {"rope_freqs.weight": 2 * divisors.astype(np.float32)}
        refused(write_gguf(path, tensors=extra), cache, word)
    for name in ("blk.0.attn_q_norm.weight", "blk.9.attn_q.weight", "other.weight", "blk.0.ffn_gate_exps.weight"):
        extra = weights() | {name: np.ones(16, np.float32)}
        refused(write_gguf(path, tensors=extra), cache, name)
    infinite = weights()
    infinite["model.norm.weight"][3] = np.inf
    refused(write_gguf(path, tensors=infinite), cache, "finite")
    missing = weights()
    del missing["model.norm.weight"]
    refused(write_gguf(path, tensors=missing), cache, "model.norm.weight")


def test_unsupported_quantisation(tmp_path: Path) -> None:
    path, name = write_gguf(tmp_path / "tiny.gguf"), "blk.0.attn_q.weight"
    data = bytearray(path.read_bytes())
    data[data.index(name.encode()) + len(name) + 4 + 2 * 8] = gguf.GGMLQuantizationType.I32
    path.write_bytes(data)
    said = refused(path, tmp_path / "cache", "unsupported quantisation I32", name, "Q4_K")
    assert "I32" not in said.partition("allowed are")[2]


def move(path: Path, name: str, offset: int) -> None:
    """Writes another offset into the file's table for one tensor of two dimensions."""
    data = bytearray(path.read_bytes())
    place = data.index(name.encode()) + len(name) + 4 + 2 * 8 + 4
    data[place : place + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "word"), [(0, "overlaps another"), (32, "overlaps another"), (5, "multiple of 32"), (2**60, "beyond")]
)
def test_lying_offsets(tmp_path: Path, offset: int, word: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    move(path, "blk.1.ffn_up.weight", offset)
    refused(path, tmp_path / "cache", word)


def test_metadata_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.files.gguf.header.MAX_METADATA_VALUES", 500)
    refused(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", "more than 500 values")


def test_no_room_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(gguf_file.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache", "0.0 GB are free", "OUTPACE_CACHE")
