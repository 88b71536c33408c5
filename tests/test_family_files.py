"""Qwen 3, Gemma 3 and Phi-3 as users meet them: a file scores as transformers does, and all methods write one text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from files import (
    ARCHITECTURES,
    CONFIG,
    GEMMA2_METADATA,
    GEMMA4,
    GEMMA4_METADATA,
    GEMMA_METADATA,
    PHI_METADATA,
    weights,
    write_gguf,
)

import outpace
from outpace.models.base import chain
from outpace.models.files.gguf.tokenizer import build
from outpace.models.llama.config.gemma4 import OWN_NAMES
from outpace.models.load import load_model

QWEN3 = ARCHITECTURES["qwen3"] | {"head_dim": 32}  # twice the hidden state's share
# The lines of Qwen3's own template that separate a thought from an answer.
QWEN3_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QWEN3_METADATA = {
    "qwen3.attention.key_length": 32,
    "qwen3.attention.value_length": 32,
    "qwen3.rope.dimension_count": None,
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.chat_template": QWEN3_TEMPLATE,
}
CHANGES = ARCHITECTURES | GEMMA4 | {"qwen3": QWEN3}
PHI_GAIN = float((1 + np.log(128 / 96) / np.log(96)) ** 0.5)  # as llama.cpp's converter computes it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", QWEN3_METADATA),
    "gemma2": ("Gemma2Config", GEMMA2_METADATA),
    **{name: ("Gemma4TextConfig", metadata) for name, metadata in GEMMA4_METADATA.items()},
    "gemma3": ("Gemma3TextConfig", GEMMA_METADATA | {"gemma3.block_count": 7}),
    "phi3": ("Phi3Config", PHI_METADATA | {"phi3.rope.scaling.attn_factor": PHI_GAIN}),
}
WORDS = [5, 90, 17, 200, 33, 61, 120, 7, 44, 250, 19, 70, 3, 8, 155, 21] * 3  # beyond Gemma's window


def gentle(family: str) -> dict[str, np.ndarray]:
    """Weights of a model whose texts are not one token for ever."""
    drawn = weights(**CHANGES[family])
    made = {name: values * (0.15 if values.ndim > 1 else 0.3) for name, values in drawn.items()}
    for name in (name for name in made if name.endswith(("layer_scalar", "scale"))):
        made[name] = np.exp(made[name]).astype(np.float32)
    return made


def factors(family: str) -> dict[str, np.ndarray]:
    """The contents of a file besides the weights."""
    scaling = CHANGES[family].get("rope_scaling", {})
    return {
        f"rope_factors_{name}.weight": np.array(scaling[f"{name}_factor"], np.float32)
        for name in ("short", "long")
        if f"{name}_factor" in scaling
    }


@pytest.fixture(scope="module", params=FAMILIES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    path = tmp_path_factory.mktemp(family) / f"{family}.gguf"
    return write_gguf(
        path, FAMILIES[family][1], tensors=gentle(family) | factors(family), architecture=family.partition("_")[0]
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


def their_name(name: str) -> str:
    """Return transformers' name of a tensor."""
    return next((name.replace(ours, other) for other, ours in OWN_NAMES.items() if name.endswith(ours)), name)


def theirs(family: str) -> Any:
    """The same model of transformers."""
    fields = CONFIG | CHANGES[family]
    config = getattr(transformers, FAMILIES[family][0])(
        **{name: value for name, value in fields.items() if name not in ("architectures", "model_type")},
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {name: torch.from_numpy(value) for name, value in gentle(family).items()}
    named = {their_name(name): values for name, values in state.items() if ".experts." not in name}
    for layer in range(fields["num_hidden_layers"] if "num_experts" in fields else 0):
        prefix, numbers = f"model.layers.{layer}.mlp.experts.", range(fields["num_experts"])
        gates, ups, downs = (
            [state[f"{prefix}{number}.{one}_proj.weight"] for number in numbers] for one in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        named[f"model.layers.{layer}.experts.gate_up_proj"] = torch.stack(pairs)
        named[f"model.layers.{layer}.experts.down_proj"] = torch.stack(downs)
    model.load_state_dict({"lm_head.weight": state["model.embed_tokens.weight"]} | named)
    return model.eval()


@pytest.fixture(params=["native", "llama"])
def runtime(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"runtime": request.param, "dtype": "float32" if request.param == "llama" else "auto"}


def test_a_file_scores_as_its_folder_does_in_transformers(file: Path, runtime: dict[str, Any]) -> None:
    with torch.inference_mode():
        expected = theirs(file.stem)(torch.tensor([WORDS]), use_cache=False).logits[0]
    model = load_model(str(file), **runtime).model
    got = torch.as_tensor(model.score([chain(model.open(len(WORDS), 1), WORDS, range(len(WORDS)))]))
    assert expected.std() > 0.05
    rounding = 0.15 if "experts" in file.stem else 0.1  # a token may choose another expert
    assert (got - expected).norm() < (rounding if runtime["runtime"] == "native" else 1e-4) * expected.norm()


def test_every_method_writes_plain_texts(file: Path, runtime: dict[str, Any]) -> None:
    texts, drafted = {}, 0
    layers = {"gemma2": "layers:0,1,2", "gemma3": "layers:0,1,2,3,4,5", "gemma4_e": str(file)}.get(file.stem)
    layers = layers or ("layers:0,1,2,3,5" if "gemma4" in file.stem else "layers:0")
    for method in ("autoregressive", "auto", "speculative", "card"):
        draft = None if method == "autoregressive" else layers
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with outpace.load(str(file), draft, method=method, **runtime) as llm:
                params = [
                    outpace.SamplingParams(max_tokens=60, temperature=heat, seed=3, ignore_eos=True) for heat in (0, 1)
                ]
                found = llm.generate(["hello world", "hello world"], params)
        texts[method] = [result.tokens for result in found]
        drafted += sum(result.figures.drafted for result in found)
        assert [len(tokens) for tokens in texts[method]] == [60, 60]
    assert len({token for text in texts["autoregressive"] for token in text}) > 20, "texts of one token prove little"
    assert all(tokens == texts["autoregressive"] for tokens in texts.values())
    assert drafted > 20


@pytest.mark.long
@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
def test_every_worker_of_card_writes_plain_texts(file: Path, worker: str) -> None:
    if "gemma" not in file.stem:
        pytest.skip("other families differ in nothing that drafts see")
    params = [outpace.SamplingParams(max_tokens=30, temperature=heat, seed=3, ignore_eos=True) for heat in (0, 1)]
    texts = []
    for options in ({"method": "autoregressive"}, {"method": "card", "draft": str(file), "worker": worker}):
        with outpace.load(str(file), **options, runtime="native") as llm:
            texts.append([result.tokens for result in llm.generate(["hello world", "hello 12"], params)])
    assert texts[0] == texts[1]


def test_a_tokenizer_of_gemma4_merges_words_without_their_spaces(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "ab", "\u2581ab"]
    metadata = {"model": "gemma4", "tokens": tokens, "merges": ["a b", "\u2581 ab"], "bos_token_id": 2}
    metadata |= {"unknown_token_id": 3, "token_type": [3, 3, 3, 2] + [6] * 256 + [1] * 5}
    built = build(tmp_path / "a.gguf", {f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    found = built.tokenizer.encode("ab ab\u00e9")
    assert found.tokens == ["<bos>", "ab", "\u2581ab", "<0xC3>", "<0xA9>"]
    assert built.tokenizer.decode(found.ids) == "ab ab\u00e9"


def test_conversations_of_qwen3(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", QWEN3_METADATA, tensors=gentle("qwen3"), architecture="qwen3")
    tokenizer = load_model(path, runtime="llama").tokenizer
    messages = [{"role": "user", "content": "hello 12"}]
    assert tokenizer.decode(tokenizer.chat(messages), skip_special=False) == (
        "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(messages, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.id_of("<|im_end|>") in tokenizer.stop_ids
