"""Write a .gguf file with random weights in the shape of a known model, to time passes without downloading it.

Run: python bench/random_gguf.py SHAPE FORMAT OUT, for example llama-3.2-1b Q4_K /tmp/random.gguf. Blocks are random
bytes with small scales, so texts are meaningless, but a pass costs what that of the trained model does. Vocabulary and
merges have the model's sizes, with shorter strings.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType

from outpace.models.text.text_stream import byte_alphabet

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as in config.json."""

    architecture: str
    vocab: int
    hidden: int
    middle: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    merges: int
    positions: int
    pre: str = ""  # "" for a SentencePiece tokenizer, which has scores instead of merges
    theta: float = 500000.0
    window: int = 0
    factor: float = 1.0  # linear rope scaling
    turning: int = 0  # entries of a head that rotate (LongRoPE), 0 for all
    experts: int = 0  # of a layer, 0 for an MLP of `middle`
    used: int = 0  # experts of a token
    width: int = 0  # of an expert


SHAPES = {
    "llama-3.2-1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 280147, 131072, "llama-bpe"),
    "llama-3.2-3b": Shape("llama", 128256, 3072, 8192, 28, 24, 8, 128, 280147, 131072, "llama-bpe"),
    "qwen3-0.6b": Shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 151387, 40960, "qwen2"),
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 151387, 40960, "qwen2"),
    "qwen3-4b": Shape("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 151387, 40960, "qwen2"),
    "gemma-3-1b": Shape("gemma3", 262144, 1152, 6912, 26, 4, 1, 256, 0, 32768, theta=1e6, window=512),
    "gemma-3-4b": Shape("gemma3", 262144, 2560, 10240, 34, 8, 4, 256, 0, 131072, theta=1e6, window=1024, factor=8.0),
    "phi-4-mini": Shape("phi3", 200064, 3072, 8192, 32, 24, 8, 128, 199742, 131072, "gpt-4o", theta=1e4, turning=96),
}
EXPERTS = {"experts": 128, "used": 8, "width": 768}
SHAPES["qwen3-30b-a3b"] = Shape(
    "qwen3moe", 151936, 2048, 6144, 48, 32, 4, 128, 151387, 40960, "qwen2", theta=1e6, **EXPERTS
)
SHAPES["olmoe"] = Shape(
    "olmoe", 50304, 2048, 1024, 16, 16, 16, 128, 50009, 4096, "olmo", theta=1e4, experts=64, used=8, width=1024
)
TRAINED = 4096  # context length before LongRoPE


def blocks(random: np.random.Generator, kind: str, rows: int, columns: int, power: int = 0) -> np.ndarray:
    """Return rows of random blocks, uint8 [rows, bytes], times 2^power. One row in 64 is drawn, others rotate it."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    drawn = random.integers(0, 256, (-(-rows // 64), columns // block, size), np.uint8)
    for start in SCALES[kind]:
        drawn[..., start] = 0
        minimum = {"Q4_K": 3, "Q5_K": 4}.get(kind, 0) if start else 0  # so that weights are 0 on average
        drawn[..., start + 1] = 0x04 + 4 * (power + minimum) + drawn[..., start + 1] % 4  # 2^-14 to 2^-13
    if kind == "MXFP4":
        drawn[..., 0] = 119  # 2^-8
    turned = np.stack([np.roll(drawn, turn, axis=1) for turn in range(64)], axis=1)
    return turned.reshape(-1, columns // block * size)[:rows]


def vocabulary(shape: Shape) -> tuple[list[str], list[str]]:
    """Return tokens and merges in the model's numbers: strings of small letters, short ones first."""
    tokens, merges = [*byte_alphabet(), "<|end|>"], list[str]()
    if not shape.pre:
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *LETTERS]
    for length in (2, 3, 4):
        for letters in product(LETTERS, repeat=length):
            if len(tokens) == shape.vocab:
                break
            tokens.append("".join(letters))
    for cut in (1, 2, 3):
        merges += [f"{token[:cut]} {token[cut:]}" for token in tokens[257:] if len(token) > cut]
    return tokens, merges[: shape.merges]


def write_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Write the sizes and a tokenizer."""
    name = shape.architecture
    for key, value in (
        ("context_length", shape.positions),
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.middle),
        ("block_count", shape.layers),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("rope.dimension_count", shape.turning or shape.head_dim),
    ):
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{name}.rope.freq_base", shape.theta)
    if shape.experts:
        for key, count in (("count", shape.experts), ("used_count", shape.used), ("feed_forward_length", shape.width)):
            writer.add_uint32(f"{name}.expert_{key}", count)
    if shape.window:
        writer.add_uint32(f"{name}.attention.sliding_window", shape.window)
    if shape.turning:
        writer.add_uint32(f"{name}.rope.scaling.original_context_length", TRAINED)
        writer.add_float32(f"{name}.rope.scaling.attn_factor", 1.19)
    if shape.factor != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.factor)
    (write_byte_level if shape.pre else write_sentence_piece)(writer, shape)


def write_sentence_piece(writer: GGUFWriter, shape: Shape) -> None:
    """Write a tokenizer with scores; earlier tokens are merged first."""
    tokens, _ = vocabulary(shape)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 260))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)


def write_byte_level(writer: GGUFWriter, shape: Shape) -> None:
    """Write a tokenizer with merges."""
    tokens, merges = vocabulary(shape)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] + [1] * (shape.vocab - 257))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(256)


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return output and input sizes of the matrices of a layer."""
    width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.architecture == "phi3":
        return {
            "attn_qkv": (width + 2 * narrow, shape.hidden),
            "attn_output": (shape.hidden, width),
            "ffn_up": (2 * shape.middle, shape.hidden),
            "ffn_down": (shape.hidden, shape.middle),
        }
    attention = {
        "attn_q": (width, shape.hidden),
        "attn_k": (narrow, shape.hidden),
        "attn_v": (narrow, shape.hidden),
        "attn_output": (shape.hidden, width),
    }
    if shape.experts:
        return attention
    return attention | {
        "ffn_gate": (shape.middle, shape.hidden),
        "ffn_up": (shape.middle, shape.hidden),
        "ffn_down": (shape.hidden, shape.middle),
    }


def add_experts(writer: GGUFWriter, shape: Shape, format: str, prefix: str, random: np.random.Generator) -> None:
    """Write the experts of a layer, each with other weights, and a router that chooses them evenly."""
    for name, rows, columns in (
        ("gate", shape.width, shape.hidden),
        ("up", shape.width, shape.hidden),
        ("down", shape.hidden, shape.width),
    ):
        whole = blocks(random, format, shape.experts * rows, columns).reshape(shape.experts, rows, -1)
        writer.add_tensor(f"{prefix}ffn_{name}_exps.weight", whole, raw_dtype=GGMLQuantizationType[format])
    router = random.normal(0, shape.hidden**-0.5, (shape.experts, shape.hidden)).astype(np.float32)
    writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", choices=SCALES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args()
    shape, random = SHAPES[asked.shape], np.random.default_rng(0)
    shape = replace(shape, layers=asked.layers or shape.layers)
    writer = GGUFWriter(asked.out, shape.architecture)
    write_metadata(writer, shape)

    def add(name: str, rows: int, columns: int, power: int = 0) -> None:
        own = "Q8_0" if asked.format == "MXFP4" else asked.format  # as in files of gpt-oss, only experts have it
        writer.add_tensor(name, blocks(random, own, rows, columns, power), raw_dtype=GGMLQuantizationType[own])

    # so that a token chooses experts by itself, not by what layers add to all tokens alike
    add("token_embd.weight", shape.vocab, shape.hidden, 6 if shape.experts else 0)
    if shape.architecture == "olmoe":
        add("output.weight", shape.vocab, shape.hidden)
    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if shape.turning:
        for name, most in (("short", 1.2), ("long", 50.0)):
            factors = np.linspace(1.0, most, shape.turning // 2, dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if shape.architecture in ("qwen3", "qwen3moe", "gemma3"):
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    if shape.architecture == "olmoe":
        norms |= {"attn_q_norm": shape.heads * shape.head_dim, "attn_k_norm": shape.kv_heads * shape.head_dim}
    if shape.architecture == "gemma3":
        norms |= {"post_attention_norm": shape.hidden, "post_ffw_norm": shape.hidden}
    for layer in range(shape.layers):
        for name, size in matrices(shape).items():
            add(f"blk.{layer}.{name}.weight", *size)
        if shape.experts:
            add_experts(writer, shape, asked.format, f"blk.{layer}.", random)
        for name, width in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
