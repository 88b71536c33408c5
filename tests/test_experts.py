"""Mixtures of experts: logits against transformers and the plain formula, files of all kinds, and exact rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import experts as reference
import gguf
import numpy as np
import pytest
import recurrent
import torch
import transformers
from block_heads import write_block
from heads import write_head
from passes import branch, fresh, prefilled, random_parents
from recurrent import Pair, pairs_of, read
from safetensors.numpy import load_file, save_file
from serving import served
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.cli import display
from outpace.core.errors import UserError
from outpace.distill.draft_shape import DraftShape, draft_config
from outpace.models.base import Part, chain
from outpace.models.files import mxfp4
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import GgufCheckpoint, convert
from outpace.models.llama.config.experts import SIGMOID, Experts
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.torch import experts
from outpace.models.llama.torch.experts import ExpertProduct
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model

TEXT = [int(token) for token in torch.randint(3, 259, (23,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return pairs_of(tmp_path_factory)


def logits(model: Llama, text: list[int] = TEXT) -> Tensor:
    return model.score([chain(model.open(100, 100), text, range(len(text)))])


def near(got: Tensor, expected: Tensor) -> None:
    """Within what either side may be off from float64."""
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", recurrent.EXPERTS)
def test_logits_are_those_of_transformers(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    with torch.no_grad():
        expected = pair.reference(torch.tensor([TEXT])).logits[0]
    assert expected.std() > 0.3
    for model in (pair.model, read(Checkpoint.open(pair.folder), exact=False)):
        near(logits(model), expected)
        assert model.config.experts.chosen < model.distinct_experts <= model.config.experts.count
        logits(model, TEXT[:1])
        assert model.distinct_experts == model.config.experts.chosen
    half = read(Checkpoint.open(pair.folder), dtype=torch.bfloat16)
    off = (logits(half).float() - expected).abs().mean(1)  # more where a nearly undecided router chooses another expert
    assert off.quantile(0.25) < 0.1


@pytest.mark.parametrize("name", [name for name in recurrent.EXPERTS if name != "some_dense"])  # no GGUF file is
def test_a_gguf_file_gives_the_same_logits(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    pair = pairs(name)
    file = recurrent.write_gguf(pair.folder, tmp_path / "model.gguf", name)
    source, folder = GgufCheckpoint(file), Checkpoint.open(pair.folder)
    if name != "qwen3next":  # which fuses other matrices in its files
        assert source.names() == folder.names()
        assert all(source.shape(one) == folder.shape(one) for one in source.names())
    assert source.read_config().experts == folder.read_config().experts
    near(logits(load_model(file, runtime="llama").model), logits(pair.model))


@pytest.mark.parametrize("name", recurrent.EXPERTS)
def test_trees_and_batches_give_the_bits_of_their_branches(pairs: Callable[[str], Pair], name: str) -> None:
    model = pairs(name).model
    assert model.exact
    written, keep = TEXT[:17], list[int]()
    session, other = prefilled(model, written), prefilled(model, TEXT[5:])
    for turn in range(2):
        parents, tokens = random_parents(14, turn), [3 + (7 * node + turn) % 250 for node in range(14)]
        parts = [Part(session, tokens, parents, range(14), keep), chain(other, TEXT[:9], range(9), [])]
        got = model.score(parts[:: 1 - 2 * turn])[9 * turn : 9 * turn + 14]
        for node in range(turn, 14, 2):
            path = [tokens[one] for one in branch(parents, node)]
            assert torch.equal(got[node], fresh(model, written + path))
        keep = branch(parents, 13)
        written += [tokens[node] for node in keep]


@pytest.mark.parametrize("name", recurrent.EXPERTS)
def test_the_mixture_is_that_of_the_formula(pairs: Callable[[str], Pair], name: str) -> None:
    model, source = pairs(name).model, Checkpoint.open(pairs(name).folder)
    sizes, number = model.config.experts, model.config.num_layers - 1
    x = torch.randn(6, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    scale = source.array(f"model.layers.{number}.{model.config.mlp_norm}.weight") + model.config.norm_offset
    normed = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * scale
    layer = model._layers[number]
    got = model._mix_experts(layer, layer.experts, torch.cat([x, x.new_zeros(2, x.shape[1])]), 6)
    for row, expected in zip(got - torch.cat([x, x[:2] * 0]), normed, strict=False):
        mixed = reference.mixture(expected, sizes, lambda name: source.array(f"model.layers.{number}.{name}"))
        np.testing.assert_allclose(row.numpy(), mixed, atol=2e-5)


@pytest.mark.parametrize("has_biases", [False, True])
def test_a_grouped_product_is_that_of_each_expert(has_biases: bool) -> None:
    weights, biases = torch.randn(5, 16, 32), torch.randn(5, 16) if has_biases else ()
    rows, ids = torch.randn(7, 32), torch.tensor([0, 0, 2, 2, 2, 3, 4])
    got, expected = (ExpertProduct([*weights], [*biases], is_grouped)(rows, ids, ()) for is_grouped in (True, False))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_ties_go_to_the_lower_number_and_a_correction_only_chooses() -> None:
    ids, weights = experts.choose(torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), Experts(4, 2, 1), None)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    sizes = Experts(4, 2, 1, SIGMOID, scale=2.0, corrects_choice=True)
    ids, weights = experts.choose(torch.tensor([[5.0, 0.0, -1.0, 0.0]]), sizes, torch.tensor([-2.0, 0.0, 0.5, 0.0]))
    assert ids.tolist() == [[1, 2]]
    chosen = 1 / (1 + np.exp([0.0, 1.0]))
    np.testing.assert_allclose(weights[0], 2 * chosen / chosen.sum(), rtol=1e-5)


def test_experts_of_one_tensor_are_read_as_those_of_their_own(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pairs("qwen35moe")
    tensors = {name.replace(".ffn_", ".mlp.ffn_"): one for name, one in recurrent.stacked(pair.folder).items()}
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        start = name.partition("ffn_")[0] + "experts."
        gate, up, down = (tensors.pop(name.replace("gate_exps", f"{one}_exps")) for one in ("gate", "up", "down"))
        tensors |= {start + "gate_up_proj": np.concatenate([gate, up], 1), start + "down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair.folder / "config.json").read_text())
    assert torch.equal(logits(read(Checkpoint.open(tmp_path))), logits(pair.model))


BLOCKS = np.random.default_rng(2).integers(0, 256, (6, 3, 16), np.uint8)
EXPONENTS = np.random.default_rng(3).integers(0, 255, (6, 3), np.uint8)


def test_blocks_of_mxfp4_are_the_same_in_both_files() -> None:
    from transformers.integrations.mxfp4 import FP4_VALUES

    stored = mxfp4.to_ggml(BLOCKS, EXPONENTS)
    got = mxfp4.dequantise(stored)
    codes = np.stack([BLOCKS & 15, BLOCKS >> 4], -1).reshape(6, 96)
    expected = np.ldexp(np.float32(FP4_VALUES)[codes], EXPONENTS.astype(np.int32).repeat(32, 1) - 127)
    assert np.array_equal(got, expected)
    assert np.array_equal(got, gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.MXFP4))
    assert np.array_equal(gguf.quants.quantize(got[:, :32], gguf.GGMLQuantizationType.MXFP4).shape, (6, 17))
    back = stored.reshape(6, 3, 17)
    nibbles = np.concatenate([back[..., 1:] & 15, back[..., 1:] >> 4], -1)
    assert np.array_equal(nibbles[..., ::2] | nibbles[..., 1::2] << 4, BLOCKS)
    assert np.array_equal(back[..., 0], EXPONENTS)


def as_mxfp4(folder: Path, where: Path) -> Path:
    """Write a folder of gpt-oss with its experts in MXFP4, as OpenAI's are, and another with the same values."""
    tensors, packed, random = load_file(folder / "model.safetensors"), {}, np.random.default_rng(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        exponents = random.integers(122, 126, blocks.shape[:3], np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        rows = mxfp4.dequantise(
            mxfp4.to_ggml(blocks.reshape(-1, inputs // 32, 16), exponents.reshape(-1, inputs // 32))
        )
        tensors[name] = np.ascontiguousarray(rows.reshape(experts, outputs, inputs).swapaxes(1, 2))
    config = json.loads((folder / "config.json").read_text())
    for kind, held in (("floats", tensors), ("blocks", {**tensors, **packed})):
        (where / kind).mkdir()
        if kind == "blocks":
            held = {name: one for name, one in held.items() if f"{name}_blocks" not in packed}
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        save_file(held, where / kind / "model.safetensors")
        (where / kind / "config.json").write_text(json.dumps(config))
    return where


def test_mxfp4_gives_the_logits_of_its_values_from_both_files(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    where = as_mxfp4(pairs("gpt_oss").folder, tmp_path)
    expected = logits(read(Checkpoint.open(where / "floats")))
    assert torch.equal(logits(read(Checkpoint.open(where / "blocks"))), expected)
    file = recurrent.write_gguf(where / "floats", tmp_path / "model.gguf", "gpt_oss", "MXFP4")
    source, folder = GgufCheckpoint(file), Checkpoint.open(where / "blocks")
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.experts.4.{part}_proj.weight"
        ours, theirs = folder.weight(name), source.weight(name)
        assert (ours.kind, theirs.kind) == ("MXFP4", "MXFP4")
        assert np.array_equal(mxfp4.dequantise(ours.data), folder.array(name))
        assert np.array_equal(mxfp4.dequantise(theirs.data), source.array(name))


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, it must be at most the number of experts 8"),
    ("qwen3_moe", {"num_local_experts": 6}, "num_experts is 8 and num_local_experts is 6, they must be equal"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\], it must be a list of layers below 3"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok is 2 and experts_per_token is 3, they must be equal"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, r"swiglu_alpha 2.0 \(only 1.702\)"),
]


@pytest.mark.parametrize(("name", "changes", "words"), CONTRADICTIONS)
def test_configs_that_contradict_themselves_are_refused(
    pairs: Callable[[str], Pair], name: str, changes: dict[str, Any], words: str
) -> None:
    fields = json.loads((pairs(name).folder / "config.json").read_text())
    count = {} if "num_local_experts" not in changes else {"num_experts": 8}
    with pytest.raises(UserError, match=words):
        from_dict(fields | count | changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2, it must be 1 for this"),
        ("gpt_oss", {"expert_gating_func": 9}, "gpt-oss.expert_gating_func is 9, it must be 3"),
        ("olmoe", {"expert_weights_norm": True}, "olmoe.expert_weights_norm is True, it must be False"),
        ("lfm2_moe", {"expert_weights_norm": False}, "lfm2moe.expert_weights_norm is False, it must be True"),
        ("qwen35moe", {"expert_shared_count": 2}, "qwen35moe.expert_shared_count is 2, it must be 1"),
        ("mixtral", {"expert_weights_scale": 2.0}, "llama.expert_weights_scale is 2.0, it must be 1"),
        ("qwen3_moe", {"expert_used_count": 9}, "num_experts_per_tok is 9, it must be at most the number of experts 8"),
        (
            "qwen3_moe",
            {"expert_count": 6},
            r"tensor 'blk.0.ffn_\w+.weight' has shape \[8, .*expected \[6, .*expert_count 6",
        ),
        ("qwen3_moe", {"expert_group_count": 2}, "qwen3moe.expert_group_count 2 is not supported"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    pairs: Callable[[str], Pair], name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = recurrent.write_gguf(pairs(name).folder, tmp_path / "model.gguf", name, **changes)
    with pytest.raises(UserError, match=words):
        GgufCheckpoint(file)


def changed(folder: Path, where: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    where.mkdir()
    save_file(tensors, where / "model.safetensors")
    (where / "config.json").write_text((folder / "config.json").read_text())
    return where


def test_wrong_tensors_are_named_with_both_numbers(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    blocks = as_mxfp4(pairs("gpt_oss").folder, tmp_path) / "blocks"
    layer = "model.layers.2.mlp."
    name = f"{layer}experts.down_proj"

    def refused(number: int, folder: Path, words: str, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
        with (
            pytest.raises(UserError, match=words),
            Checkpoint.open(changed(folder, tmp_path / f"{number}", change)) as one,
        ):
            read(one)

    refused(1, blocks, f"'{layer}gate.bias'", lambda held: held.pop(f"{layer}router.bias"))
    refused(
        2, blocks, "MXFP4 has blocks of 16 bytes", lambda held: held.update({f"{name}_blocks": BLOCKS[None, ..., :8]})
    )
    cut = {f"{name}_scales": np.zeros((6, 64, 3), np.uint8)}
    refused(
        3, blocks, r"has blocks \[6, 64, 2\], and .*_scales' has exponents \[6, 64, 3\]", lambda held: held.update(cut)
    )
    refused(4, blocks, "has no exponents: the file holds no tensor", lambda held: held.pop(f"{name}_scales"))
    nan = {f"{name}_scales": np.full((6, 64, 2), 255, np.uint8)}
    refused(5, blocks, "down_proj.weight' holds values that are not finite", lambda held: held.update(nan))
    fewer = f"{layer}experts.5.down_proj.weight"
    refused(6, pairs("qwen3_moe").folder, f"holds no tensor '{fewer}'", lambda held: held.pop(fewer))


PROMPTS = ["hello world hello world hello", "12 hello 12 hello", "the hello world"]
SAMPLED = SamplingParams(max_tokens=24, seed=3, temperature=0.7)


def texts(file: str, params: SamplingParams = SAMPLED, **options: Any) -> list[Any]:
    with LLM(file, **{"runtime": "llama"} | options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def files(pairs: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: str(recurrent.write_gguf(pairs(name).folder, folder / f"{name}.gguf", name))
        for name in ("gpt_oss", "qwen3_moe")
    }


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_texts_do_not_depend_on_the_method(files: dict[str, str], name: str) -> None:
    plain = texts(files[name], method="autoregressive")
    other = files["qwen3_moe" if name == "gpt_oss" else "gpt_oss"]
    for options in (
        {"method": "speculative", "drafter": "ngram"},
        {"method": "speculative", "draft": files[name]},
        {"method": "speculative", "draft": other},
        {"method": "card", "draft": other, "worker": "inline"},
        {"method": "planned", "draft": other},
        {"method": "speculative", "draft": "layers:0-1"},
        {},
    ):
        assert texts(files[name], **options) == plain, options


@pytest.mark.parametrize("runtime", ["llama", "native"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_heads_draft_for_a_mixture_of_experts(name: str, runtime: str, tmp_path: Path) -> None:
    recurrent.make(name, tmp_path / "target", num_hidden_layers=8, **{"layer_types": None} if name == "gpt_oss" else {})
    target = recurrent.with_tokenizer(tmp_path / "target")
    plain = texts(str(target), runtime=runtime, method="autoregressive")
    for head in (write_head(tmp_path / "eagle"), write_block(tmp_path / "dflash")):
        with LLM(str(target), str(head), runtime=runtime, method="speculative") as llm:
            outputs = llm.generate(PROMPTS, SAMPLED)
        assert [one.token_ids for one in outputs] == plain
        assert all(one.figures.drafted > 0 for one in outputs)


def test_drafts_are_not_trained_from_a_mixture_of_experts(pairs: Callable[[str], Pair]) -> None:
    target = pairs("gpt_oss").folder
    with pytest.raises(UserError, match="drafts are not trained from a model with mixtures of experts"):
        draft_config(json.loads((target / "config.json").read_text()), DraftShape())


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "lfm2_moe"])
def test_a_converted_file_is_what_transformers_expects(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    file = recurrent.write_gguf(pairs(name).folder, tmp_path / "model.gguf", name)
    folder = convert(file, tmp_path / "cache")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        near(theirs(torch.tensor([TEXT])).logits[0], logits(pairs(name).model))


@pytest.mark.parametrize("name", ["qwen35moe", "lfm2_moe"])
def test_transformers_writes_the_same_texts(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    folder = str(recurrent.with_tokenizer(pairs(name).folder))
    plain = texts(folder, method="autoregressive")
    assert texts(folder, runtime="transformers", method="speculative", drafter="ngram") == plain


def test_files_of_gpt_oss_are_not_for_transformers(files: dict[str, str]) -> None:
    with pytest.raises(UserError, match="experts' rows are in another order than transformers expects"):
        load_model(files["gpt_oss"], runtime="transformers")


def test_rounds_tell_how_many_experts_their_passes_applied(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for options in ({"method": "autoregressive"}, {"method": "speculative", "drafter": "ngram"}):
        with LLM(files["qwen3_moe"], runtime="llama", **options) as llm:
            stream = llm.stream(PROMPTS[0], SAMPLED)
            for _ in stream:
                pass
            result = stream.finish()
        for one in result.rounds:
            assert one.experts == 3 if one.verified_rows == 1 else 3 < one.experts <= min(8, 3 * one.verified_rows)
        mean = sum(one.experts for one in result.rounds) / len(result.rounds)
        assert result.figures.experts_per_pass == pytest.approx(mean)
        display.show_rounds(result.rounds)
        shown = capsys.readouterr().err
        assert f"experts per pass and layer: {mean:.1f}" in shown
        assert "experts" in shown.splitlines()[2]
    with LLM(files["qwen3_moe"], runtime="llama", method="autoregressive") as llm, served(llm) as site:
        rounds = site.chat("hello", max_tokens=4, temperature=0, return_rounds=True).choice["rounds"]
    assert {one["experts"] for one in rounds} == {3.0}
