"""A Qwen3 file as llama.cpp's converter writes it: heads that are wider than the hidden state's share, norms of queries
and keys, its conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import ARCHITECTURES, weights, write_gguf
from passes import text

import outpace
from outpace.models.base import Model, chain
from outpace.models.load import load_model

kernels = pytest.importorskip("outpace_kernels", reason="outpace-kernels is not installed: `pip install ./kernels`")

HEAD = 32  # twice what the hidden state has for a head
# The lines of Qwen3's own template that tell a thought from an answer.
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
METADATA: dict[str, Any] = {
    "qwen3.attention.key_length": HEAD,
    "qwen3.attention.value_length": HEAD,
    "qwen3.rope.dimension_count": None,
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.chat_template": TEMPLATE,
}


def qwen3_file(folder: Path, kind: str, **replaced: np.ndarray) -> Path:
    """`replaced`: replacements of all tensors whose names contain a word."""
    tensors = weights(**ARCHITECTURES["qwen3"] | {"head_dim": HEAD})
    tensors = {name: 0.1 * values if values.ndim == 2 else 1 + 0.3 * values for name, values in tensors.items()}
    for word, values in replaced.items():
        tensors |= {name: values for name in tensors if word in name}
    return write_gguf(folder / f"{kind}-{len(replaced)}.gguf", METADATA, kind, tensors=tensors, architecture="qwen3")


def scores(model: Model) -> torch.Tensor:
    tokens = text(model, 40)
    return model.score([chain(model.open(64, 64), tokens, wanted=range(40))]).double()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_it_follows_float32_on_the_same_weights(tmp_path: Path, kind: str) -> None:
    """Rounded activations move a random model's scores by a few hundredths, and norms left out by far more."""
    path = qwen3_file(tmp_path, kind)
    native, exact = load_model(path), load_model(path, runtime="llama", dtype="float32")
    assert (native.precision, native.notice, exact.precision) == ("file", None, "float32")
    expected = scores(exact.model)

    def error(got: torch.Tensor) -> float:
        return float((got - expected).norm() / expected.norm())

    assert error(scores(native.model)) < 0.05
    for word in ("q_norm", "k_norm"):
        flat = qwen3_file(tmp_path, kind, **{word: np.ones(HEAD, np.float32)})
        assert error(scores(load_model(flat).model)) > 0.1


@pytest.mark.parametrize("method", ["speculative", "auto"])
def test_every_way_writes_its_plain_text(tmp_path: Path, method: str) -> None:
    path = qwen3_file(tmp_path, "Q8_0")
    with outpace.load(path, method="autoregressive") as llm:
        plain = llm.generate(["hello world"], max_tokens=40)[0]
    with outpace.load(path, method=method, drafter="ngram") as llm:
        assert llm.generate(["hello world"], max_tokens=40)[0].tokens == plain.tokens


def test_its_conversations(tmp_path: Path) -> None:
    tokenizer = load_model(qwen3_file(tmp_path, "Q8_0")).tokenizer
    asked = [{"role": "user", "content": "hello 12"}]
    start, end = (tokenizer.id_of(name) for name in ("<|im_start|>", "<|im_end|>"))
    found = tokenizer.chat(asked)
    assert (found.count(start), found.count(end)) == (2, 1)
    assert tokenizer.decode(found, skip_special=False) == (
        "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(asked, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert end in tokenizer.stop_ids
