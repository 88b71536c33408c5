"""Weights as a GGUF file has them: values as the gguf package reads them, bits of the emulation, nothing cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import outpace_kernels as kernels
import pytest
import torch
from files import ARCHITECTURES, CONFIG, weights, write_checkpoint, write_gguf
from gguf import GGMLQuantizationType
from outpace_kernels import emulation
from passes import fresh, prefilled, random_parents, text
from turns import in_turn

import outpace
from outpace.core.errors import UserError
from outpace.models.base import Part
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.four_bits import BLOCK_BYTES, BLOCK_INPUTS
from outpace.models.files.gguf.header import COMMON_TYPES
from outpace.models.files.gguf.source import GgufCheckpoint, convert
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer, tokenizer_of

FORMATS = [name for name in emulation.FILE_FORMATS if not name.startswith("U4")]  # a GGUF file's
OURS = ["U4_32", "U4_64"]
K = [name for name in FORMATS if emulation.FORMATS[name] == 256]
SETS = kernels.instruction_sets()
PROMPT = "hello world"
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "wide": {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 8},  # heads of whole groups
    "padded": {"hidden_size": 128, "intermediate_size": 160},  # heads and MLP of half a group
}


def blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bytes as rows of a format, but for the scales of its blocks, which are small numbers."""
    form = emulation.FILE_FORMATS[name]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // form.inputs, form.bytes)).astype(np.uint8)
    scales = [208] if name == "Q6_K" else [0, *([2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", *OURS) else [])]
    if name == "MXFP4":
        data[..., 0] = 117 + data[..., 0] % 4
        scales = []
    for start in scales:
        data[..., start + 1] = 0x10 + data[..., start + 1] % 0x10  # 2^-11 to 2^-8
    return data.reshape(rows, -1)


def file_of(folder: Path, kind: str, **changes: Any) -> Path:
    """A tiny model with matrices of one format."""
    config = CONFIG | changes
    shape = {**changes, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    metadata = {
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.rope.dimension_count": shape["head_dim"],
    }
    tensors = {name: 0.1 * values if values.ndim == 2 else values for name, values in weights(**shape).items()}
    return write_gguf(folder / f"{kind}.gguf", metadata, kind, tensors=tensors)


def model_of(path: Path, held: str = "file", **options: Any) -> NativeLlama:
    source, given = GgufCheckpoint(path), NativeOptions(weights=held, **options)
    return NativeLlama.from_tensors(from_dict(source.config), source.weight, options=given)


def values_of(matrix: Any, rows: int, inputs: int) -> np.ndarray:
    """What a matrix of the kernels holds, float32."""
    out = np.empty((rows, inputs), np.float32)
    matrix.read(np.arange(rows, dtype=np.int32), out)
    return out


def tree_scores(model: NativeLlama) -> torch.Tensor:
    session = prefilled(model, text(model, 17))
    return model.score([Part(session, text(model, 14, 2), random_parents(14, 1), range(14))])


@pytest.mark.parametrize("name", FORMATS)
def test_formats_match_the_gguf_package(name: str) -> None:
    data = blocks(name, 70, 768)
    order = np.random.default_rng(1).permutation(70).astype(np.int32)
    expected = gguf.quants.dequantize(data, GGMLQuantizationType[name])[order]
    for package in (kernels, emulation):
        matrix = package.Matrix.stored([(name, data)], order, 768)
        assert np.array_equal(values_of(matrix, 70, 768), expected)
        rounded = package.Matrix.stored([(name, data)], order, 768, rounded=True)
        direct = matrix if name == "Q8_0" else package.Matrix(expected)  # which is int8 as it is
        assert np.array_equal(values_of(rounded, 70, 768), values_of(direct, 70, 768))


@pytest.mark.parametrize("chunk", [0, 48, 64])
@pytest.mark.parametrize("name", emulation.FLOATS)
def test_floats_of_a_file_are_rounded_as_floats_in_memory(name: str, chunk: int) -> None:
    """Rows of two parts, some of them zeros, and chunks padded to whole groups."""
    random = np.random.default_rng(3)
    values = (random.integers(-127, 128, (70, 192)) / 64).astype(np.float32)  # which all formats hold
    data = values.view(np.uint16)[:, 1::2].copy() if name == "BF16" else values.astype(emulation.FLOATS[name])
    data = data.view(np.uint8)
    order = random.permutation(70).astype(np.int32)
    order[::9] = -1
    each = chunk or 192
    count, padded = 192 // each, -(-each // 64) * 64
    inputs, expected = count * padded, np.zeros((70, count, padded), np.float32)
    expected[order >= 0, :, :each] = values[order[order >= 0]].reshape(-1, count, each)
    direct = kernels.Matrix(np.ascontiguousarray(expected.reshape(70, inputs)))
    for package in (kernels, emulation):
        matrix = package.Matrix.stored([(name, data[:30]), (name, data[30:])], order, inputs, chunk)
        assert np.array_equal(values_of(matrix, 70, inputs), values_of(direct, 70, inputs))
        damaged = data.copy()
        damaged[33, -2:] = 0xFF
        with pytest.raises(ValueError, match="not finite"):
            package.Matrix.stored([(name, damaged)], np.arange(70, dtype=np.int32), inputs, chunk)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_folder_in_floats_is_rounded_where_it_lies(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matrix becomes float32 in memory, and the model is the one that floats in memory make."""
    tensors = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in weights().items()}
    folder = tmp_path / "model"
    write_checkpoint(folder, CONFIG, tensors)
    with Checkpoint.open(folder) as source:
        config = from_dict(source.config)
        expected = fresh(NativeLlama.from_tensors(config, source.array), [1, 2, 3])
    with Checkpoint.open(folder) as source:

        def array(name: str, read: Any = source.array) -> np.ndarray:
            assert len(source.shape(name)) == 1
            return read(name)  # type: ignore[no-any-return]

        monkeypatch.setattr(source, "array", array)
        assert torch.equal(fresh(NativeLlama.from_tensors(config, source.weight), [1, 2, 3]), expected)


def test_the_packages_agree_on_the_sizes_of_blocks() -> None:
    for number, common in COMMON_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert common == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    ours = {kind.name: (kind.values, kind.bytes) for kind in COMMON_TYPES.values()}
    ours |= {name: (BLOCK_INPUTS[name], BLOCK_BYTES[name]) for name in BLOCK_INPUTS}
    theirs = {name: (form.inputs, form.bytes) for name, form in emulation.FILE_FORMATS.items()}
    assert theirs == {name: ours[name] for name in theirs}
    assert {name: ours[name][0] for name in kernels.FORMATS} == kernels.FORMATS
    assert kernels.ARITHMETIC == emulation.ARITHMETIC


KINDS = [*in_turn(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"], SHAPES), *((kind, "wide") for kind in K)]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_the_kernels_are_what_their_emulation_says(
    tmp_path: Path, kind: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, kind, **SHAPES[shape])
    expected = {held: tree_scores(model_of(path, held)) for held in ("file", "int8")}
    assert torch.equal(expected["file"], expected["int8"]) == (kind == "Q8_0")  # which is int8 as it is
    for name in SETS:
        assert torch.equal(tree_scores(model_of(path, instruction_set=name, threads=1)), expected["file"])
    monkeypatch.setattr(native, "kernels", emulation)
    for held, scores in expected.items():
        assert torch.equal(tree_scores(model_of(path, held)), scores)


MIXES = [  # of the embedding, queries with keys and values, the heads' output, gates with ups, down
    (("Q6_K",), ("Q4_K", "Q6_K"), ("Q4_K",), ("Q4_K",), ("Q6_K",)),  # as in files by Q4_K_M
    (("Q4_K",), ("Q6_K",), ("Q6_K",), ("Q5_K",), ("Q5_K",)),
    (("Q8_0",), ("Q6_K",), ("Q4_K",), ("Q6_K",), ("Q4_1",)),
    (("Q6_K", "Q8_0"), ("Q6_K",), ("Q6_K",), ("Q6_K",), ("Q6_K",)),
]


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("names", [*[((name,),) * 5 for name in (*FORMATS, *OURS)], *MIXES], ids=str)
def test_products_are_what_the_emulation_says(names: Sequence[Sequence[str]], rows: int) -> None:
    """By a model of one layer whose matrices are of these formats, the embedding too."""
    hidden, heads = 256, (4, 2, 64)
    sizes_of = {"table": 128, "qkv": 512, "output": hidden, "gate_up": 512, "down": hidden}
    data = {
        part: [(name, blocks(name, outputs // len(kinds), 256, seed)) for name in kinds]
        for seed, ((part, outputs), kinds) in enumerate(zip(sizes_of.items(), names, strict=True))
    }
    sees = np.tril(np.ones((rows, rows), bool))
    angles = np.arange(rows)[:, None] / (1 + np.arange(32))
    turns = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    found = []
    for package, sets in ((emulation, ["emulation"]), (kernels, SETS)):
        for instruction_set in sets:
            made = {
                part: package.Matrix.stored(held, np.arange(sizes_of[part], dtype=np.int32), 256)
                for part, held in data.items()
            }
            norm, table = np.ones(hidden, np.float32), made.pop("table")
            layer = package.Layer(norm, norm, *made.values())
            sizes = package.Heads(*heads, "float32", 1e-5)
            model = package.Model(sizes, hidden, 256, 1e-5, [layer], table, norm, table, instruction_set, 2)
            out = np.zeros((rows, 128), np.float32)
            every = np.arange(rows, dtype=np.int32)
            model.forward([(package.Store([sizes], 64), 0, 0, rows, sees)], every * 5, turns, every, out)
            found.append(out)
    assert np.isfinite(found[0]).all()
    assert found[0].std() > 0
    assert all(np.array_equal(other, found[0]) for other in found)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_file_in_place_is_what_its_conversion_is(tmp_path: Path, kind: str, architecture: str) -> None:
    tensors = weights(**ARCHITECTURES[architecture])
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind, tensors=tensors, architecture=architecture)
    folder = convert(path, tmp_path / "cache")
    with Checkpoint.open(folder) as whole, GgufCheckpoint(path) as source:
        assert source.config == whole.config
        assert source.names() == whole.names()
        for name in whole.names():
            assert torch.equal(source.tensor(name), whole.tensor(name).float())
        one, other = tokenizer_of(source), Tokenizer.from_folder(folder)
    assert one.encode("hello 12 <|im_end|>") == other.encode("hello 12 <|im_end|>")
    assert (one.stop_ids, one.size, one.chat_template) == (other.stop_ids, other.size, other.chat_template)
    models = [load_model(place, dtype="int8").model for place in (path, folder)]
    assert torch.equal(*(fresh(model, text(model, 9)) for model in models))


def test_nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    path = file_of(tmp_path, "Q8_0")
    for dtype in ("file", "int8", "auto"):
        with outpace.load(path, dtype=dtype, method="speculative", drafter="ngram") as llm:
            assert llm.target.precision == ("int8" if dtype == "int8" else "file")
            assert len(llm.generate([PROMPT], max_tokens=8)[0].tokens) == 8
            assert llm.target.again().precision == llm.target.precision
    written = [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and "profiles" not in file.parts]
    assert not written


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["speculative", "card", "auto"])
def test_every_way_writes_what_plain_decoding_does(tmp_path: Path, method: str, temperature: float) -> None:
    path = file_of(tmp_path, "Q4_1")
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    with outpace.load(path, dtype="file", method="autoregressive") as llm:
        plain = llm.generate([PROMPT], **asked)[0]
    worker = {"worker": "inline"} if method == "card" else {}
    with outpace.load(path, path, dtype="file", draft_dtype="int8", method=method, drafter="model", **worker) as llm:
        assert (llm.target.precision, llm.draft.precision) == ("file", "int8")
        assert llm.generate([PROMPT], **asked)[0].tokens == plain.tokens


@pytest.mark.parametrize("kind", ["F16", "Q2_K"])
def test_what_the_kernels_do_not_take_is_rounded_and_told(tmp_path: Path, kind: str) -> None:
    shape = SHAPES["wide"] if kind == "Q2_K" else {}
    path, notice = file_of(tmp_path, kind, **shape), f"rounded to int8, for the kernels do not take them so: {kind}"
    for dtype, expected in (("file", notice), ("int8", None), ("auto", None if kind == "F16" else notice)):
        found = load_model(path, dtype=dtype)
        assert (found.precision, found.notice) == ("int8", expected)


def test_a_weight_that_is_too_large_for_int8_is_named(tmp_path: Path) -> None:
    tensors, name = weights(), "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = -8.3e6
    assert load_model(write_gguf(tmp_path / "a.gguf", kind="Q8_0", tensors=tensors), dtype="int8").precision == "int8"
    tensors[name][3, 5] = 1e7
    for kind, dtype in (("F32", "auto"), ("BF16", "int8")):
        path = write_gguf(tmp_path / f"{kind}.gguf", kind=kind, tensors=tensors)
        with pytest.raises(
            UserError, match=r"blk.1.ffn_down.weight' holds a weight of size 1e\+07, and int8 holds at "
        ):
            load_model(path, dtype=dtype)
        assert load_model(path, dtype="float32").precision == "float32"
    write_checkpoint(tmp_path / "model", CONFIG, {key: torch.from_numpy(tensors[key]).double() for key in tensors})
    with Checkpoint.open(tmp_path / "model") as source, pytest.raises(UserError, match="not fit int8, a weight is too"):
        NativeLlama.from_tensors(from_dict(source.config), source.weight)
