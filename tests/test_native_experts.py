"""Mixtures of experts in the native runtime: bits of the emulation and of plain decoding, logits near torch's, and
experts of a file that are packed when they are chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import numpy as np
import outpace_kernels as kernels
import pytest
import recurrent
import reference
import torch
from passes import build, native_tiny, pieces, prefilled, random_parents, text

import outpace
from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.files.reading import write_safetensors
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native import experts as native_experts
from outpace.models.llama.native import runtime as native
from outpace.models.llama.native.binding import NativeOptions, UnsupportedShape
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.weight_sources import StoredMatrix
from outpace.models.load import load_model

SHAPE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
SHAPE |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 256}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen": {"model_type": "qwen3_moe", "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
    "lfm": {"model_type": "lfm2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "head_dim": None},
    "qwen-shared": LINEAR
    | {"model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 40, "num_hidden_layers": 4},
}
CONFIGS = {name: from_dict(SHAPE | fields) for name, fields in FIELDS.items()}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@by_config
def test_the_kernels_equal_their_emulation(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace_kernels import emulation

    got = pieces(native_tiny(config))[1]
    monkeypatch.setattr(native, "kernels", emulation)
    for mine, its in zip(got, pieces(native_tiny(config))[1], strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", kernels.instruction_sets())
@by_config
def test_every_instruction_set_gives_the_same_bits(config: LlamaConfig, name: str) -> None:
    expected = pieces(native_tiny(config, instruction_set="portable", threads=1))[1]
    for mine, its in zip(pieces(native_tiny(config, instruction_set=name))[1], expected, strict=True):
        assert torch.equal(mine, its)


@by_config
def test_rows_of_any_tree_and_batch_have_the_bits_of_plain_decoding(config: LlamaConfig) -> None:
    model, parents = native_tiny(config), random_parents(12, 3)
    prompts, nodes = [text(model, 9, seed) for seed in range(3)], text(model, 12, 7)
    sessions = [prefilled(model, prompt) for prompt in prompts]
    got = torch.as_tensor(model.score([Part(session, nodes, parents, range(12)) for session in sessions]))
    for number, prompt in enumerate(prompts):
        for node in range(12):
            path, at = [], node
            while at != PREFIX:
                path.append(nodes[at])
                at = parents[at]
            session = model.open(64, 8)
            for token in [*prompt, *path[::-1]]:
                alone = torch.as_tensor(model.score([chain(session, [token], [0])]))
                session.keep([0])
            assert torch.equal(got[12 * number + node], alone[0])


@by_config
def test_logits_are_near_the_torch_runtimes(config: LlamaConfig) -> None:
    """int8 weights and activations against float32; a row whose router is nearly undecided may differ more."""
    ours, its = native_tiny(config), build(Llama, config)
    tokens = text(ours, 40)
    got, expected = (
        torch.as_tensor(model.score([chain(model.open(64, 64), tokens, range(40))])) for model in (ours, its)
    )
    similarities = torch.nn.functional.cosine_similarity(got, expected.float())
    assert similarities.median() > 0.99
    assert (similarities > 0.9).float().mean() > 0.8


@by_config
def test_distinct_experts_are_those_of_the_torch_runtime(config: LlamaConfig) -> None:
    ours, its = native_tiny(config), build(Llama, config)
    assert ours.distinct_experts == 0.0
    assert config.experts is not None
    for count in (1, 7):
        for model in (ours, its):
            model.score([chain(model.open(64, 64), text(ours, count), range(count))])
        assert config.experts.chosen <= ours.distinct_experts <= config.experts.count
        assert ours.distinct_experts == pytest.approx(its.distinct_experts, abs=0.51 if count > 1 else 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[LlamaConfig], Callable[[str], Any]]:
    """A source whose matrices are mapped from a file of float32."""
    from outpace.models.files.reading import SafetensorsFile

    def source(config: LlamaConfig) -> Callable[[str], Any]:
        tensors, path = reference.random_tensors(config), tmp_path / "model.safetensors"
        sizes: dict[str, tuple[str, tuple[int, ...]]] = {
            name: ("F32", shape) for name, shape in tensor_shapes(config).items()
        }
        path.unlink(missing_ok=True)
        write_safetensors(path, sizes, lambda name: [tensors[name].numpy()], lambda fraction: None)
        opened = SafetensorsFile(path)

        def weight(name: str) -> Any:
            kind, values = opened.raw(name)
            if values.ndim != 2:
                return np.array(values)
            order = np.arange(len(values), dtype=np.int32)
            data = values.view(np.uint8)
            return StoredMatrix(path, name, kind, data, order, values.shape[1], lambda: values, lambda: None)

        return weight

    return source


def mapped(config: LlamaConfig, source: Callable[[str], Any], **options: Any) -> NativeLlama:
    return NativeLlama.from_tensors(config, source, options=NativeOptions(**options))


def packed_experts(model: NativeLlama) -> list[int]:
    return [one.packed.num_packed for one in model._experts]


@by_config
def test_experts_of_a_file_are_packed_when_they_are_chosen(config: LlamaConfig, file: Any) -> None:
    model, eager = mapped(config, file(config)), native_tiny(config)
    assert config.experts is not None
    assert packed_experts(model) == [0] * len(model._experts)
    assert packed_experts(eager) == [config.experts.count] * len(eager._experts)
    session, other = model.open(64, 8), eager.open(64, 8)
    promised = model.promised_bytes
    got = torch.as_tensor(model.score([chain(session, [5], [0])]))
    assert packed_experts(model) == [config.experts.chosen] * len(model._experts)
    assert model.promised_bytes < promised
    assert eager.promised_bytes == 0
    assert torch.equal(got, torch.as_tensor(eager.score([chain(other, [5], [0])])))


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's list of mapped pages")
def test_pages_of_packed_experts_are_released(file: Any, tmp_path: Path) -> None:
    config = from_dict(SHAPE | FIELDS["qwen"] | {"moe_intermediate_size": 2048})
    model = mapped(config, file(config))
    assert config.experts is not None
    model.score([chain(model.open(8, 8), [1], [0])])
    chosen = 3 * config.experts.chosen * len(model._experts) * 2048 * 64 * 4
    lines = Path("/proc/self/smaps").read_text().split("\n")
    firsts = [place for place, line in enumerate(lines) if line.endswith(str(tmp_path / "model.safetensors"))]
    resident = sum(int(line.split()[1]) for first in firsts for line in lines[first:][:10] if line.startswith("Rss:"))
    assert 1024 * resident < 0.5 * chosen


@by_config
def test_fewer_experts_than_a_pass_chooses_give_the_same_bits(config: LlamaConfig, file: Any) -> None:
    expected = pieces(native_tiny(config))[1]
    for count in (1, 3):
        model = mapped(config, file(config))
        size = sum(one.packed.expert_bytes for one in model._experts)
        limit = native_experts.divide_memory(model._experts, count * size + 1)
        assert limit == count * size
        for mine, its in zip(pieces(model)[1], expected, strict=True):
            assert torch.equal(mine, its)
        assert packed_experts(model) == [count] * len(model._experts)


def test_int8_rounds_a_files_blocks_as_a_matrix_does(file: Any) -> None:
    config = CONFIGS["qwen"]
    floats = mapped(config, file(config), weights="file")
    for mine, its in zip(pieces(floats)[1], pieces(native_tiny(config))[1], strict=True):
        assert torch.equal(mine, its)


def test_four_bits_are_rounded_when_a_model_is_loaded() -> None:
    """24 inputs are no whole block of 32, so only wide experts become four bits."""
    config = from_dict(SHAPE | FIELDS["qwen"] | {"moe_intermediate_size": 32})
    four, eight = native_tiny(config, weights="int4"), native_tiny(config)
    assert four.weight_bytes < 0.8 * eight.weight_bytes
    tokens = text(four, 30)
    got, expected = (
        torch.as_tensor(model.score([chain(model.open(64, 64), tokens, range(30))])) for model in (four, eight)
    )
    assert torch.nn.functional.cosine_similarity(got, expected).median() > 0.9


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "lfm2_moe"])
def test_a_gguf_files_logits_are_near_those_of_transformers(name: str, tmp_path: Path) -> None:
    its = recurrent.make(name, tmp_path / "model")
    path = recurrent.write_gguf(tmp_path / "model", tmp_path / f"{name}.gguf", name, "Q8_0")
    ours, tokens = load_model(str(path), runtime="native").model, [3 * place % 250 + 3 for place in range(40)]
    assert isinstance(ours, NativeLlama)
    assert set(packed_experts(ours)) == {0}
    got = torch.as_tensor(ours.score([chain(ours.open(64, 64), tokens, range(40))]))
    with torch.no_grad():
        expected = its(torch.tensor([tokens])).logits[0]
    similarities = torch.nn.functional.cosine_similarity(got, expected)
    assert similarities.median() > 0.99


@pytest.fixture(scope="module", params=["qwen", "olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    where = tmp_path_factory.mktemp(request.param)
    fields = SHAPE | FIELDS[request.param] | {"vocab_size": files.CONFIG["vocab_size"]}
    tensors = reference.random_tensors(from_dict(fields), 5)
    files.write_checkpoint(where / "model", fields, tensors)
    for part in files.folder_of(files.write_gguf(where / "llama.gguf"), where / "tokenizer").iterdir():
        part.replace(where / "model" / part.name)
    return where / "model"


def test_texts_are_equal_under_all_methods(folder: Path) -> None:
    prompts, texts = ["abc abc abc abc", "the other one " * 9], []
    settings: list[dict[str, Any]] = [
        {"method": "autoregressive"},
        {"method": "speculative", "draft": str(folder)},
        {"method": "speculative", "drafter": "ngram"},
        {"method": "speculative", "drafter": "lookahead"},
        {"method": "card", "draft": str(folder)},
        {"method": "auto", "draft": str(folder)},
    ]
    for options in settings:
        with outpace.LLM(str(folder), **options) as llm:
            assert isinstance(llm.engine.target, NativeLlama)
            params = outpace.SamplingParams(max_tokens=24, temperature=0.7, seed=3)
            texts.append([answer.text for answer in llm.generate(prompts, params)])
    assert all(text == texts[0] for text in texts), texts


def test_a_damaged_expert_is_named_when_it_is_chosen(file: Any) -> None:
    config = CONFIGS["olmoe"]
    source = file(config)

    def damaged(name: str) -> Any:
        found = source(name)
        if ".layers.1." in name and ".experts." in name and "up_proj" in name:
            data = np.memmap(found.path, np.uint8, "c")  # a copy on write of the file
            values = data[: found.data.size].reshape(found.data.shape)
            values[:] = 255
            return StoredMatrix(found.path, name, "F32", values, found.order, found.columns, found.values, found.forget)
        return found

    model = mapped(config, damaged)
    with pytest.raises(UserError, match=r"is damaged: expert \d of layer 1: a weight is not finite"):
        model.score([chain(model.open(8, 8), [1], [0])])


def test_more_experts_than_the_kernels_take_are_refused() -> None:
    config = from_dict(SHAPE | FIELDS["olmoe"] | {"num_experts": 90, "num_experts_per_tok": 65})
    with pytest.raises(UnsupportedShape, match="num_experts_per_tok is 65, native kernels take at most 64"):
        native_tiny(config)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "MXFP4"])
def test_products_of_blocks_are_those_of_the_emulation(name: str) -> None:
    from outpace_kernels import emulation

    generator, form = np.random.default_rng(1), emulation.FILE_FORMATS[name]
    data = generator.integers(0, 256, (64, 64 // form.inputs * form.bytes), np.uint8)
    blocks = data.reshape(-1, form.bytes)
    blocks[:, 0] = generator.integers(118, 126, len(blocks)) if name == "MXFP4" else 0
    if name != "MXFP4":
        blocks[:, 1] = 0x2C
    rows = np.arange(64, dtype=np.int32)
    got, expected = np.empty((64, 64), np.float32), np.empty((64, 64), np.float32)
    kernels.Matrix.stored([(name, data)], rows, 64).read(rows, got)
    emulation.Matrix.stored([(name, data)], rows, 64).read(rows, expected)
    assert np.array_equal(got, expected)


def test_every_exponent_of_mxfp4_is_exact() -> None:
    from outpace.models.files.mxfp4 import dequantise

    data = np.empty((253, 17), np.uint8)
    data[:, 0] = np.arange(253)
    data[:, 1:] = np.arange(16) * 17
    rows, got = np.arange(253, dtype=np.int32), np.empty((253, 32), np.float32)
    kernels.Matrix.stored([("MXFP4", data)], rows, 32).read(rows, got)
    assert np.array_equal(got, dequantise(data))
