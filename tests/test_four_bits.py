"""Weights in 4 bits: what GPTQ and AWQ folders mean and what floats are rounded to, texts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import outpace_kernels as kernels
import pytest
import reference
import torch
from files import CONFIG, model_folder, weights
from outpace_kernels import emulation
from passes import fresh, native_tiny, text, tree_scores
from safetensors.numpy import load_file, save_file

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel
from outpace.models.files.checkpoint import SINGLE
from outpace.models.files.find import open_source
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native import runtime as native
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.weight_sources import StoredMatrix
from outpace.models.load import load_draft, load_model

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "attention_bias": True}
WAYS = {
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight numbers of a row in each word [rows, columns / 8], number order[i] in nibble i."""
    found = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for nibble, place in enumerate(order):
        found |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * nibble)
    return found.view(np.int32)


def packed(way: str, q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a matrix from q [outputs, inputs], zeros and scales [outputs, groups], and each input's group."""
    parts = {"scales": np.ascontiguousarray(scales.T)}
    if way == "awq":
        return parts | {"qweight": words(q.T, AWQ_ORDER), "qzeros": words(zeros.T, AWQ_ORDER)}
    parts["qweight"] = np.ascontiguousarray(words(q).T)
    parts["qzeros"] = words((zeros - (way == "gptq")).T)
    return parts | {"g_idx": groups.astype(np.int32)}


def folders(place: Path, way: str, group: int, act_order: bool = False, **changes: Any) -> tuple[Path, Path]:
    """A tiny model in 4 bits, and the same values in float32. `group` -1: of a whole row."""
    sizes = SIZES | changes
    random = np.random.default_rng(5)
    plain, tensors = {}, {}
    for name, values in weights(**sizes).items():
        if values.ndim < 2 or "embed" in name:
            plain[name] = tensors[name] = (0.2 * values).astype(np.float32)
            continue
        outputs, inputs = values.shape
        q = random.integers(0, 16, values.shape)
        of = np.arange(inputs) // (inputs if group == -1 else group)
        zeros = random.integers(1, 16, (outputs, of[-1] + 1))
        of = random.permutation(of) if act_order else of
        scales = (random.random(zeros.shape) / 100 + 0.001).astype(np.float16)
        each = [part[:, of] for part in (zeros, scales.astype(np.float64))]
        plain[name] = ((q - each[0]) * each[1]).astype(np.float32)
        stem = name.removesuffix("weight")
        tensors |= {stem + part: held for part, held in packed(way, q, zeros, scales, of).items()}
    made = []
    for number, (held, said) in enumerate(((tensors, WAYS[way] | {"bits": 4, "group_size": group}), (plain, None))):
        folder = model_folder(place / str(number))
        save_file(held, folder / SINGLE)
        (folder / "config.json").write_text(
            json.dumps(CONFIG | sizes | ({"quantization_config": said} if said else {}))
        )
        made.append(folder)
    return made[0], made[1]


CUT = {"intermediate_size": 448}  # three groups of 128 and a half
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *((way, group, {}) for way in WAYS for group in (32, 64, 128, -1)),
    ("gptq", 128, CUT),
    ("gptq", 64, {"act_order": True}),
]


@pytest.fixture(params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    way, group, changes = request.param
    return folders(tmp_path, way, group, **changes)


def test_values_are_those_that_the_folder_means(pair: tuple[Path, Path]) -> None:
    with open_source(pair[0]) as four, open_source(pair[1]) as plain:
        assert four.names() == plain.names()
        config = from_dict(four.config)
        four.check_shapes(tensor_shapes(config))
        for name in plain.names():
            assert np.array_equal(four.array(name), plain.array(name))
            assert torch.equal(four.tensor(name), plain.tensor(name))
            assert four.shape(name) == plain.shape(name)
            assert four.file_of(name).name == SINGLE
    one, other = (load_model(folder, dtype="float32", runtime="llama").model for folder in pair)
    assert isinstance(one, Llama)
    assert torch.equal(fresh(one, text(one, 9)), fresh(other, text(one, 9)))


def test_blocks_hold_what_the_folder_means(pair: tuple[Path, Path]) -> None:
    """The kernels and their emulation read the folder's values from its blocks."""
    import outpace_kernels
    from outpace_kernels import emulation

    with open_source(pair[0]) as four, open_source(pair[1]) as plain:
        for name in (name for name in four.names() if "proj.weight" in name):
            held = four.weight(name)
            assert isinstance(held, StoredMatrix)
            assert np.array_equal(held.values(), plain.array(name))
            if not held.data.size:
                continue
            assert four.held(name) == (held.kind, held.data.nbytes)
            for package in (outpace_kernels, emulation):
                matrix = package.Matrix.stored([(held.kind, held.data)], held.order, held.columns)
                found = np.empty((len(held.order), held.columns), np.float32)
                matrix.read(held.order, found)
                assert np.array_equal(found, plain.array(name))


def test_groups_in_another_order_have_no_blocks(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, "gptq", 64, act_order=True)
    with open_source(folder) as four:
        held = four.weight("model.layers.0.mlp.up_proj.weight")
        assert isinstance(held, StoredMatrix)
        assert (held.kind, held.data.size) == ("GPTQ in act-order", 0)


def test_the_native_runtime_has_the_bits_of_the_same_values(pair: tuple[Path, Path]) -> None:
    one, other = (load_model(folder, dtype="int8").model for folder in pair)
    assert torch.equal(fresh(one, text(one, 9)), fresh(other, text(one, 9)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 8}, "bits 8, supported: 4"),
        ({"group_size": 16}, "group_size 16, supported: 32, 64, 128, -1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv', supported: gemm"),
        ({"quant_method": "awq", "format": "llm-awq"}, "format 'llm-awq', supported: gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "version 'llm-awq', supported: gemm"),
        ({"is_marlin_format": True}, "is_marlin_format True, supported: False"),
    ],
)
def test_other_schemes_are_refused_and_the_other_runtime_is_named(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder, _ = folders(tmp_path, "gptq", 32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"{says}.*; `--runtime transformers` may run it"):
        load_model(folder, runtime="llama", dtype="float32")


NAME = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("part", "change", "error", "says"),
    [
        ("g_idx", lambda held: held + 1, UserError, "g_idx holds 1 to 2, expected are groups 0 to 1"),
        ("g_idx", lambda held: held - 1, UserError, "g_idx holds -1 to 0"),
        ("g_idx", lambda held: held[1:].copy(), UserError, r"g_idx has shape \[255\], expected \[256\]"),
        ("qzeros", lambda held: held | 15, UnsupportedModel, "qzeros holds 15"),
        ("scales", lambda held: held * np.float16(np.nan), UserError, "scales is damaged"),
        ("scales", lambda held: held.astype(np.float32), UnsupportedModel, "has type F32, supported: F16"),
        ("scales", lambda held: held[1:].copy(), UserError, r"scales has shape \[1, 384\], expected \[2, 384\]"),
        ("qweight", lambda held: held[8:].copy(), UserError, "up_proj.weight' has shape"),
        ("qweight", lambda held: held[..., None].copy(), UserError, "qweight' has shape .* expected are 2 dimensions"),
        ("scales", lambda held: held.reshape(-1).copy(), UserError, "scales' has shape .* expected are 2 dimensions"),
        ("qzeros", None, UserError, "holds no tensor 'model.layers.0.mlp.up_proj.qzeros'"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str, change: Any, error: Any, says: str) -> None:
    folder, _ = folders(tmp_path, "gptq", 128)
    tensors = load_file(folder / SINGLE)
    held = tensors.pop(NAME + part)
    save_file(tensors if change is None else tensors | {NAME + part: change(held)}, folder / SINGLE)
    with pytest.raises(error, match=says):
        load_model(folder, runtime="llama", dtype="float32")


def relabelled(place: Path, way: str, zeros: int | None, **said: Any) -> Path:
    """A folder in 4 bits with all stored zero points equal, and other fields in its quantization_config."""
    folder, _ = folders(place, way, 64)
    if zeros is not None:
        tensors = load_file(folder / SINGLE)
        word = np.array([zeros * 0x11111111], np.uint32).view(np.int32)
        changed = {name: np.full_like(held, word[0]) for name, held in tensors.items() if name.endswith("qzeros")}
        save_file(tensors | changed, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {k: v for k, v in (config["quantization_config"] | said).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MIDDLE = "although 8 is the middle"


@pytest.mark.parametrize(
    ("way", "zeros", "said", "words"),
    [
        (
            "gptq",
            8,
            {"sym": True},
            f"holds 8 everywhere, which means 9, {MIDDLE} .sym True and format 'gptq'.; correct",
        ),
        ("gptq", 8, {"sym": None}, f"holds 8 everywhere, which means 9, {MIDDLE} .format 'gptq'"),
        ("gptq", 8, {"checkpoint_format": "gptq"}, "correct checkpoint_format to 'gptq_v2' if the file was written so"),
        ("gptq_v2", 7, {"sym": True}, "holds 7 everywhere, which means 7, .*correct checkpoint_format to 'gptq'"),
        ("gptq", None, {"sym": True}, "although 7 is expected everywhere .sym True and format 'gptq'"),
        ("gptq_v2", 9, {"sym": True}, "holds 9, although 8 is expected everywhere .sym True and format 'gptq_v2'"),
        ("awq", 7, {"zero_point": False}, "holds 7, although 8 is expected everywhere .zero_point False and format"),
    ],
)
def test_zero_points_that_contradict_the_config(
    tmp_path: Path, way: str, zeros: int | None, said: dict[str, Any], words: str
) -> None:
    folder = relabelled(tmp_path, way, zeros, **said)
    for options in ({}, {"runtime": "llama", "dtype": "float32"}):
        with pytest.raises(UserError, match=f"_proj: qzeros .*{words}"):
            load_model(folder, **options)


@pytest.mark.parametrize(
    ("way", "zeros", "said"),
    [
        ("gptq", 7, {"sym": True}),
        ("gptq_v2", 8, {"sym": True}),
        ("gptq_v2", 8, {"checkpoint_format": None, "format": "GPTQ_V2", "sym": True}),
        (
            "gptq",
            None,
            {"format": "gptq_v2", "checkpoint_format": "gptq"},
        ),  # the older name decides, as in transformers
        ("awq", 8, {"zero_point": False, "version": None, "format": "gemm"}),
    ],
)
def test_zero_points_of_the_middle_and_both_names_of_the_format(
    tmp_path: Path, way: str, zeros: int | None, said: dict[str, Any]
) -> None:
    with (
        open_source(relabelled(tmp_path / "a", way, zeros, **said)) as one,
        open_source(relabelled(tmp_path / "b", way, zeros)) as other,
    ):
        assert all(np.array_equal(one.array(name), other.array(name)) for name in one.names())


def test_a_permuted_order_needs_its_groups(tmp_path: Path) -> None:
    folder = relabelled(tmp_path, "gptq", None, desc_act=True)
    tensors = load_file(folder / SINGLE)
    load_model(folder)
    save_file({name: held for name, held in tensors.items() if "g_idx" not in name}, folder / SINGLE)
    with pytest.raises(UserError, match="desc_act is True, and there is no g_idx"):
        load_model(folder)


def test_groups_of_awq_are_whole(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, "awq", 128, **CUT)
    with pytest.raises(UserError, match="in groups of 128"):
        load_model(folder, runtime="llama", dtype="float32")


WHOLE = replace(reference.TINY, hidden_size=64, intermediate_size=96, head_dim=32)  # of blocks of 32
CUT_ROWS = replace(reference.TINY, hidden_size=100, intermediate_size=70, head_dim=22)  # of none


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


@pytest.mark.parametrize("config", [WHOLE, CUT_ROWS], ids=["whole", "cut"])
def test_a_model_equals_its_emulation(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_tiny(config, weights="int4")
    assert model.precision == ("int8" if config is CUT_ROWS else "int4")
    got = tree_scores(model)[0]
    assert torch.equal(got, tree_scores(native_tiny(config))[0]) == (config is CUT_ROWS)  # no block is whole there
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
