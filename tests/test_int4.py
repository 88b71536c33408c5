"""Floats in four bits (dtype int4): what is rounded and how, bits of the emulation, and drafts, which are held so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import outpace_kernels as kernels
import pytest
import reference
import torch
from files import model_folder
from outpace_kernels import emulation
from passes import native_tiny, tree_scores

from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.native import runtime as native
from outpace.models.load import load_draft, load_model

WHOLE = replace(reference.TINY, hidden_size=64, intermediate_size=96, head_dim=32)  # of blocks of 32
CUT = replace(reference.TINY, hidden_size=100, intermediate_size=70, head_dim=22)  # of none


def in_blocks(weights: np.ndarray, package: object = kernels) -> np.ndarray:
    out = np.empty((len(weights), weights.shape[1] // 32 * 20), np.uint8)
    package.round_to_q4_1(weights, out)  # type: ignore[attr-defined]
    return out


def read(blocks: np.ndarray) -> np.ndarray:
    rows, columns = len(blocks), blocks.shape[1] // 20 * 32
    matrix = kernels.Matrix.stored([("Q4_1", blocks)], np.arange(rows, dtype=np.int32), columns)
    out = np.empty((rows, columns), np.float32)
    matrix.read(np.arange(rows, dtype=np.int32), out)
    return out


def weights_of(seed: int, rows: int = 40, columns: int = 96) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e3, 0.0])
def test_blocks_equal_the_emulations(size: float) -> None:
    for some in (weights_of(1), np.round(weights_of(2))):
        weights = some * np.float32(size) + np.float32(0)  # of zeros none is negative
        assert np.array_equal(in_blocks(weights), in_blocks(weights, emulation))


def test_no_block_loses_more_than_by_its_whole_range() -> None:
    weights = weights_of(3)
    blocks = weights.reshape(-1, 32)
    low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    step, least = ((high - low) / 15).astype(np.float16).astype(np.float32), low.astype(np.float16).astype(np.float32)
    whole = np.clip(np.rint((blocks - least) / step), 0, 15) * step + least
    lost, most = (((x.reshape(-1, 32) - blocks) ** 2).sum(1) for x in (read(in_blocks(weights)), whole))
    assert (lost <= most * (1 + 1e-5)).all()
    assert lost.mean() < 0.9 * most.mean()


def test_what_four_bits_can_represent_stays() -> None:
    weights = np.float32(0.25) * np.random.default_rng(4).integers(0, 16, (8, 64)).astype(np.float32) - 2
    weights[:, ::32], weights[:, 1::32] = -2.0, 1.75  # both ends in every block
    assert np.array_equal(read(in_blocks(weights)), weights)


def test_layers_are_in_four_bits_and_the_output_layer_is_not() -> None:
    four, eight = native_tiny(WHOLE, weights="int4"), native_tiny(WHOLE)
    assert four.precision == "int4"
    assert four.ends.head.formats == eight.ends.head.formats == ["Q8_0"]
    layers = [sum(layer.bytes for layer in model._layers) for model in (four, eight)]
    assert layers[0] < 0.65 * layers[1]


@pytest.mark.parametrize("config", [WHOLE, CUT], ids=["whole", "cut"])
def test_a_model_equals_its_emulation(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_tiny(config, weights="int4")
    assert model.precision == ("int8" if config is CUT else "int4")
    got = tree_scores(model)[0]
    assert torch.equal(got, tree_scores(native_tiny(config))[0]) == (config is CUT)  # no block is whole there
    monkeypatch.setattr(native, "kernels", emulation)
    assert torch.equal(got, tree_scores(native_tiny(config, weights="int4"))[0])


def test_drafts_are_in_int4_by_default(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    target = load_model(folder)
    assert target.precision == "int8"
    assert load_draft(folder, target).precision == load_draft("layers:0", target).precision == "int4"
    for dtype in ("int8", "float32"):
        assert load_draft(folder, target, dtype=dtype).precision == dtype
    assert load_model(folder, dtype="int4").precision == "int4"
