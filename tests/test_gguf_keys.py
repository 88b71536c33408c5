"""Every metadata key of llama.cpp is honoured, has no effect on a text, or is refused by name; none is ignored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recurrent
import torch
import transformers
from files import ARCHITECTURES, GEMMA_METADATA, MERGES, PHI_METADATA, tokens, weights, write_gguf
from gguf.constants import Keys

import outpace
from outpace.core.errors import UserError
from outpace.models.base import chain
from outpace.models.files.gguf.config import ARCHITECTURES as READABLE
from outpace.models.files.gguf.config import HARMLESS, HONOURED, HONOURED_BY, read_model
from outpace.models.files.gguf.header import open_gguf
from outpace.models.files.gguf.source import GgufCheckpoint, convert
from outpace.models.files.gguf.tokenizer import REFUSED
from outpace.models.llama.config.rope import LinearScaling, LongScaling, YarnScaling
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer, tokenizer_of

# Sections of keys of files that hold no language model, or one of an architecture that is refused.
OTHER_FILES = {"Adapter", "IMatrix", "Clip", "ClipVision", "ClipAudio", "Diffusion", "xIELU"}
RECENT = (  # keys of llama.cpp that the gguf package does not name yet
    *("hidden_activation", "attention.value_scale", "attention.output_group_count", "attention.compress_ratios"),
    *("hyper_connection.count", "hash_layer_count", "deepstack_mapping", "attention.recurrent_layers", "target_layers"),
)
# Another value of each honoured key; the tiny file's own is in files.py.
OTHER_VALUES: dict[str, Any] = {
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 0.25,
    "rope.freq_base": 123.0,
    "rope.scale_linear": 4.0,
    "rope.scaling.factor": 4.0,
    "rope.scaling.attn_factor": 1.5,
    "attention.sliding_window_pattern": 2,
    "rope.freq_base_swa": 77.0,
}
WITH_YARN = {
    "rope.scaling.type": "linear",
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_attn_factor": 1.5,
    "rope.scaling.yarn_beta_fast": 3.0,
    "rope.scaling.yarn_beta_slow": 0.5,
}
# Honoured keys whose other values contradict the tensors or what is computed: refused.
SIZES: dict[str, Any] = {
    "block_count": 1,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 8,
    "attention.key_length_swa": 8,
    "attention.value_length": 8,
    "attention.value_length_swa": 8,
    "attention.scale": 0.5,
    "rope.dimension_count": 8,
    "rope.dimension_count_swa": 8,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


def llama_cpp_keys(section: type = Keys, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the section's name and the text of every key in llama.cpp's own list."""
    for part, value in vars(section).items():
        if isinstance(value, type):
            yield from llama_cpp_keys(value, name or part)
        elif isinstance(value, str) and not part.startswith("__"):
            yield name, value


WRITTEN = {"qwen35": "grouped", "qwen3next": "next", "lfm2": "lfm2"}  # models of tests/recurrent.py
WRITTEN |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "gpt-oss": "gpt_oss"}
WRITTEN |= {"qwen35moe": "qwen35moe", "lfm2moe": "lfm2_moe"}
OURS = sorted({key.removeprefix("{arch}.") for _, key in llama_cpp_keys() if key.startswith("{arch}.")})


def config_of(path: Path, metadata: dict[str, Any], architecture: str = "llama", **more: np.ndarray) -> Any:
    if name := WRITTEN.get(architecture):
        recurrent.make(name, path.parent)
        written = recurrent.write_gguf(path.parent, path, name, **metadata)
        return read_model(open_gguf(written)).config
    changes = ARCHITECTURES[architecture]
    given = {f"{architecture}.{name}": value for name, value in metadata.items()}
    base = GEMMA_METADATA | {"gemma3.block_count": 7} if architecture == "gemma3" else {}
    base = PHI_METADATA if architecture == "phi3" else base
    written = write_gguf(path, base | given, tensors=weights(**changes) | more, architecture=architecture)
    return read_model(open_gguf(written)).config


@pytest.mark.parametrize("name", sorted({*OURS, *HONOURED, *HARMLESS, *RECENT}))
def test_no_key_of_an_architecture_is_ignored(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.gguf"
    if name in HARMLESS:
        assert config_of(path, {name: 7}) == config_of(path, {})
    elif name in SIZES:
        with pytest.raises(UserError):
            config_of(path, {name: SIZES[name]})
    elif name in WITH_YARN:
        assert config_of(path, YARN | {name: WITH_YARN[name]}) != config_of(path, YARN)
    elif name in HONOURED:
        value = OTHER_VALUES.get(name, 32)
        assert config_of(path, {name: value}) != config_of(path, {})
    elif name in RECENT:  # nothing known to the gguf package
        written = write_gguf(path, {f"llama.{name}": 3})
        said = f"unknown metadata of the file were ignored: llama.{name}"
        assert read_model(open_gguf(written)).settings["outpace"] == {"notices": [said]}
    else:
        said = "is 0.37.*, it must be a whole number" if name == "expert_count" else r"0\.37\d* is not supported"
        with pytest.raises(UserError, match=rf"llama\.{name} {said}"):
            config_of(path, {name: 0.37})


@pytest.mark.parametrize("architecture", READABLE)
def test_keys_that_only_some_architectures_read(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "a.gguf"
    for name in ("attention.sliding_window_pattern", "rope.freq_base_swa"):
        if name in HONOURED_BY.get(architecture, ()):
            changed = config_of(path, {name: OTHER_VALUES[name]}, architecture)
            assert changed != config_of(path, {}, architecture)
        else:
            with pytest.raises(UserError, match=f"{architecture}.{name} .* is not supported"):
                config_of(path, {name: OTHER_VALUES[name]}, architecture)


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    neutral = {"logit_scale": 1.0, "embedding_scale": 0.0, "residual_scale": 1.0, "attention.causal": True}
    off = {"expert_count": 0, "attn_logit_softcapping": 0.0, "use_parallel_residual": False, "swiglu_clamp_exp": [0.0]}
    same = {"attention.scale": 0.25, "rope.scaling.yarn_ext_factor": 1.0, "attention.value_length": 16}
    lists = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    plain = config_of(tmp_path / "a.gguf", {})
    assert config_of(tmp_path / "a.gguf", neutral | off | same | lists) == plain
    with pytest.raises(UserError, match=r"num_key_value_heads is \[2, 1\]"):
        config_of(tmp_path / "a.gguf", {"attention.head_count_kv": [2, 1]})
    with pytest.raises(UserError, match=r"llama.attention.layer_norm_rms_epsilon is missing"):
        config_of(tmp_path / "a.gguf", {"attention.layer_norm_rms_epsilon": None})
    with pytest.raises(UserError, match=r"llama.attention.causal False is not supported, only True"):
        config_of(tmp_path / "a.gguf", {"attention.causal": False})


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"llama.shiny.new": 3, "llama.other": "x", "llama.off": 0})
    said = "unknown metadata of the file were ignored: llama.shiny.new, llama.other"
    for options in ({}, {"runtime": "llama"}):
        assert said in (load_model(str(path), **options).notice or "")


# Scaled rotary embeddings, as llama.cpp reads them


def test_factors_without_a_type_are_linear(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        assert config_of(path, {name: 4.0}).rope_scaling == LinearScaling(4.0)
    assert config_of(path, {"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}).rope_scaling == LinearScaling(2.0)
    for metadata in ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope.scaling.factor": 0.0}):
        assert config_of(path, metadata).rope_scaling is None
    for name in ("rope.scaling.factor", "rope.scaling.attn_factor"):
        with pytest.raises(UserError, match=rf"a.gguf: {name} is -1.0, it must be above 0"):
            config_of(path, {name: -1.0})


def test_yarn_numbers(tmp_path: Path) -> None:
    path, own = tmp_path / "a.gguf", 0.1 * math.log(4.0) + 1
    assert config_of(path, YARN).rope_scaling == YarnScaling(4.0, 1.0, 32.0, 32, own, True)
    fast = {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    assert config_of(path, YARN | fast).rope_scaling == YarnScaling(4.0, 2.0, 8.0, 32, own, True)
    twice = config_of(path, YARN | {"rope.scaling.attn_factor": 1.25}).rope_scaling
    assert twice.gain == pytest.approx(1.25 * own)
    named = config_of(path, YARN | {"rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.attn_factor": 1.25})
    assert named.rope_scaling.gain == pytest.approx(1.875)
    with pytest.raises(UserError, match=r"rope.scaling.yarn_ext_factor 0.5 is not supported, only 1.0 and -1.0"):
        config_of(path, YARN | {"rope.scaling.yarn_ext_factor": 0.5})
    with pytest.raises(UserError, match=r"gemma3.rope.scaling.attn_factor 1.5 is not supported, only 0.0 and 1.0"):
        config_of(path, {"rope.scaling.attn_factor": 1.5}, "gemma3")


def test_divisors_are_scaled_too(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    found = config_of(tmp_path / "a.gguf", {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}, **divisors)
    assert found.rope_scaling == LongScaling(tuple(2.0 * pair for pair in range(1, 9)), 128, 1.5)
    with pytest.raises(UserError, match=r"rope.scaling.type 'yarn' with the tensor rope_freqs.weight is not supported"):
        config_of(tmp_path / "a.gguf", YARN, **divisors)
    with pytest.raises(UserError, match=r"rope.scaling.type 'longrope' is not supported, allowed are"):
        config_of(tmp_path / "a.gguf", {"rope.scaling.type": "longrope"})


@pytest.mark.parametrize("scaling", [{}, {"llama.rope.scaling.factor": 3.0}])
def test_attn_factor_lengthens_queries_and_keys(tmp_path: Path, scaling: dict[str, float]) -> None:
    """Scores are multiplied by its square, as by longer queries: by each runtime, and by transformers."""
    original = {name: values * np.float32(0.2) for name, values in weights().items()}
    longer = {name: values * np.float32(1.5**2 if "q_proj" in name else 1) for name, values in original.items()}
    file = write_gguf(tmp_path / "a.gguf", scaling | {"llama.rope.scaling.attn_factor": 1.5}, tensors=original)
    other = write_gguf(tmp_path / "b.gguf", scaling, tensors=longer)
    words = [5, 90, 17, 200, 33, 61, 120, 7, 44, 250, 19, 70]

    def scores(path: Path, **options: Any) -> torch.Tensor:
        model = load_model(str(path), **options).model
        return torch.as_tensor(model.score([chain(model.open(len(words), 1), words, range(len(words)))]))

    plain = write_gguf(tmp_path / "c.gguf", scaling, tensors=original)
    expected = scores(other, runtime="llama", dtype="float32")
    assert (scores(plain, runtime="llama", dtype="float32") - expected).norm() > 0.05 * expected.norm()
    assert torch.allclose(scores(file, runtime="llama", dtype="float32"), expected, atol=1e-4)
    assert (scores(file) - scores(other)).norm() < 0.02 * expected.norm()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(convert(file, tmp_path / "cache"))
    with torch.inference_mode():
        assert torch.allclose(theirs(torch.tensor([words])).logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("scaling", [{"rope.scaling.attn_factor": 1.5}, YARN | {"rope.scaling.attn_factor": 1.25}])
def test_all_methods_write_one_text(tmp_path: Path, scaling: dict[str, Any]) -> None:
    gentle = {name: values * np.float32(0.15 if values.ndim > 1 else 0.3) for name, values in weights().items()}
    metadata = {f"llama.{name}": value for name, value in scaling.items()}
    path = str(write_gguf(tmp_path / "a.gguf", metadata, tensors=gentle))
    draft = str(write_gguf(tmp_path / "b.gguf", tensors=gentle))
    texts = []
    for method in ("autoregressive", "speculative"):
        with outpace.load(path, draft=draft if method == "speculative" else None, method=method, profile=False) as llm:
            texts.append(llm.generate("hello world", max_tokens=40, ignore_eos=True)[0].tokens)
    assert texts[0] == texts[1]
    assert len({*texts[0]}) > 3


# Keys of the whole file and of the tokenizer

INFILL = (
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id"),
    *("fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
)
READ = {
    **{f"tokenizer.ggml.{name}": 5 for name in INFILL},
    "tokenizer.ggml.bos_token_id": 5,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.eot_token_id": 5,
    "tokenizer.ggml.eom_token_id": 5,
    "tokenizer.ggml.unknown_token_id": 5,
    "tokenizer.ggml.padding_token_id": 5,
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.merges": list(MERGES[:3]),
    "tokenizer.ggml.token_type": [*[1] * (len(tokens()) - 1), 4],  # known special tokens keep their type
    "tokenizer.ggml.tokens": [*tokens()[:-1], "other"],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.chat_template": "another",
    "tokenizer.chat_template.{name}": "another",
    "general.architecture": None,  # by every test
    "general.alignment": None,  # by test_gguf_parts
    "split.no": None,
    "split.count": None,
    "split.tensors.count": None,
    "tokenizer.ggml.model": None,
    "tokenizer.ggml.scores": None,  # of SentencePiece, by test_tokenizer
}
WITHOUT_EFFECT = (
    "token_type_count",
    "seperator_token_id",
    "mask_token_id",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
)  # of tokenizer.ggml: fields of other kinds of tokenizers
NAMES = ("tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.chat_templates")  # llama.cpp reads none


def test_no_other_key_is_ignored(tmp_path: Path) -> None:
    def facts(metadata: dict[str, Any]) -> tuple[Any, ...]:
        with GgufCheckpoint(write_gguf(tmp_path / "a.gguf", metadata)) as source:
            built = source.tokenizer
            return source.config, built.tokenizer.to_str(), built.settings, built.special_ids

    plain = facts({})
    for section, key in llama_cpp_keys():
        name = key.removeprefix("tokenizer.ggml.")
        if key.startswith("{arch}.") or section in OTHER_FILES or READ.get(key, 0) is None:
            continue
        if key in READ:
            assert facts({key: READ[key]}) != plain, key
        elif name in WITHOUT_EFFECT or key in NAMES or (key.startswith("general.") and key != "general.type"):
            value: Any = 3 if key == "general.quantization_version" else "7"
            assert key == "general.alignment" or facts({key: value}) == plain, key
        else:
            assert name in REFUSED or key == "general.type"
            with pytest.raises(UserError, match=key):
                facts({key: True if name in REFUSED else "adapter"})


def test_tokens_added_after_training_are_never_cut(tmp_path: Path) -> None:
    """They are user-defined by their types, or named by the specification's own field."""
    words, kinds = [*tokens()[:-1], "<think>"], [1] * len(tokens())
    for fields in ({"token_type": [*kinds[:-1], 4]}, {"token_type": kinds, "added_tokens": ["<think>"]}):
        named = {f"tokenizer.ggml.{name}": value for name, value in (fields | {"tokens": words}).items()}
        with GgufCheckpoint(write_gguf(tmp_path / "a.gguf", named)) as source:
            tokenizer = tokenizer_of(source)
        ids = tokenizer.encode("a<think>b")
        assert ids[1:-1] == [len(words) - 1]
        assert tokenizer.decode(ids) == "a<think>b"


def test_templates_and_ends_of_prompts(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools: {{ tools[0] }}"}
    around = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    path = write_gguf(tmp_path / "a.gguf", named | around)
    with GgufCheckpoint(path) as source:
        read = tokenizer_of(source)
    for tokenizer in (read, Tokenizer.from_folder(convert(path, tmp_path / "cache"))):
        assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
        assert tokenizer.render([], tools=["add"]) == "tools: add"
        assert tokenizer.encode("hello") == [1, *tokenizer.continuation("hello"), 2]
