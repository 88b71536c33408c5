"""GGUF files become Hugging Face folders, once, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from files import CONFIG, subfolders, weights, write_gguf

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import convert
from outpace.models.llama.config import llama_config as llama
from outpace.models.text.tokenizer import Tokenizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *(("F32", 0.0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 0.03)),
        *(("Q4_0", 0.5), ("Q4_1", 0.3), ("Q5_0", 0.25), ("Q5_1", 0.15)),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, kind: str, error: float, tied: bool) -> None:
    original = weights(tie_word_embeddings=tied)
    stages: list[tuple[str, float]] = []
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind, tensors=original)
    folder = convert(path, tmp_path / "cache", lambda stage, fraction: stages.append((stage, fraction)))
    with Checkpoint.open(folder) as checkpoint:
        assert llama.from_dict(checkpoint.config) == llama.from_dict(CONFIG | {"tie_word_embeddings": tied})
        assert checkpoint.names() == sorted(original)
        for name, values in original.items():
            stored = checkpoint.tensor(name)
            kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind) if values.ndim == 2 else None
            assert stored.dtype == (kept or torch.float32)  # what 16 bits hold need not take 32
            found = stored.float().numpy()
            assert np.abs(found - values).max() <= (0 if values.ndim == 1 else error), name
    assert stages[-1] == ("done", 1.0)
    assert [fraction for stage, fraction in stages if stage == "converting"][-1] == 1.0
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("hello world 123")) == "hello world 123"
    assert 2 in tokenizer.stop_ids


def test_biases_are_reordered(tmp_path: Path) -> None:
    original = weights(attention_bias=True)
    with Checkpoint.open(convert(write_gguf(tmp_path / "tiny.gguf", tensors=original), tmp_path)) as checkpoint:
        assert llama.from_dict(checkpoint.config).attention_bias
        assert all(np.array_equal(checkpoint.tensor(name).numpy(), values) for name, values in original.items())


def test_a_second_start_finds_the_folder(path: Path, tmp_path: Path) -> None:
    folder = convert(path, tmp_path / "cache")
    assert convert(path, tmp_path / "cache", lambda *_: pytest.fail("converted again")) == folder
    assert convert(write_gguf(path, tensors=weights(seed=1)), tmp_path / "cache") != folder, "of a changed file"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_folder_is_converted_again(path: Path, tmp_path: Path, name: str) -> None:
    folder = convert(path, tmp_path / "cache")
    whole = (folder / name).read_bytes()
    if name == "tokenizer.json":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[: len(whole) // 2])
    assert convert(path, tmp_path / "cache") == folder
    assert (folder / name).read_bytes() == whole


def test_an_interrupted_conversion_leaves_nothing(path: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "cache", interrupt)
    assert subfolders(tmp_path / "cache") == []


def test_a_full_disk(path: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            convert(path, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert subfolders(tmp_path / "cache") == []
    assert convert(path, tmp_path / "cache").is_dir()
