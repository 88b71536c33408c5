"""Write a .gguf file with random weights in the shape of a known model, to time passes without downloading it.

Run: python bench/random_gguf.py SHAPE FORMAT OUT, for example llama-3.2-1b Q4_K /tmp/random.gguf. Blocks are random
bytes with small scales, so texts are meaningless, but a pass costs what that of the trained model does. Vocabulary and
merges have the model's sizes, with shorter strings. With --layers the model has fewer layers; --mtp adds the layer for
multi-token prediction of Qwen3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from common import parse, refuse, run
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
class Full:
    """Gemma 4's layers without a window, every `interval`-th one, and what goes with them."""

    interval: int
    head_dim: int
    kv_heads: int  # which are the values too, unless some layers share keys
    sharing: int = 0  # the last layers, which have no keys and twice as wide MLPs
    embedding: int = 0  # entries of a token's embedding for each layer


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
    turning: int = 0  # entries of a head that rotate, 0 for all
    deltas: tuple[int, int, int] | None = None  # of delta nets: key heads, value heads, size of a head
    attending: tuple[int, ...] = ()  # the layers with attention, if others have short convolutions
    experts: int = 0  # of a layer, 0 for an MLP of `middle`
    used: int = 0  # experts of a token
    width: int = 0  # of an expert
    full: Full | None = None  # Gemma 4: the layers without a window

    def is_full(self, layer: int) -> bool:
        return self.full is not None and layer % self.full.interval == self.full.interval - 1

    def shares(self, layer: int) -> bool:
        return self.full is not None and layer >= self.layers - self.full.sharing

    def is_recurrent(self, layer: int) -> bool:
        if self.deltas:
            return layer % INTERVAL != INTERVAL - 1 and layer < self.layers
        return bool(self.attending) and layer not in self.attending


INTERVAL, FILTER, SHORT = 4, 4, 3  # every fourth layer has attention; tokens of a delta net's filter, and of LFM2's
DELTAS = ("qwen35", 248320)  # architecture and vocabulary
SHAPES = {
    "llama-3.2-1b": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 280147, 131072, "llama-bpe"),
    "llama-3.2-3b": Shape("llama", 128256, 3072, 8192, 28, 24, 8, 128, 280147, 131072, "llama-bpe"),
    "qwen3-0.6b": Shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 151387, 40960, "qwen2"),
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 151387, 40960, "qwen2"),
    "qwen3-4b": Shape("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 151387, 40960, "qwen2"),
    "gemma-3-1b": Shape("gemma3", 262144, 1152, 6912, 26, 4, 1, 256, 0, 32768, theta=1e6, window=512),
    "gemma-3-4b": Shape("gemma3", 262144, 2560, 10240, 34, 8, 4, 256, 0, 131072, theta=1e6, window=1024, factor=8.0),
    "gemma-4-e2b": Shape(
        *("gemma4", 262144, 1536, 6144, 35, 8, 1, 256, 0, 131072), theta=1e6, window=512, full=Full(5, 512, 1, 20, 256)
    ),
    "gemma-4-12b": Shape(  # sizes of Gemma 3 12B
        *("gemma4", 262144, 3840, 15360, 48, 16, 8, 256, 0, 262144), theta=1e6, window=1024, full=Full(6, 512, 1)
    ),
    "qwen3.5-0.8b": Shape(
        *(*DELTAS, 1024, 3584, 24, 8, 2, 256, 247587, 262144, "qwen35"), theta=1e7, turning=64, deltas=(16, 16, 128)
    ),
    "qwen3.5-4b": Shape(
        *(*DELTAS, 2560, 9216, 32, 16, 4, 256, 247587, 262144, "qwen35"), theta=1e7, turning=64, deltas=(16, 32, 128)
    ),
    "lfm2-1.2b": Shape(
        *("lfm2", 65536, 2048, 8192, 16, 32, 8, 64, 63683, 128000, "lfm2"),
        theta=1e6,
        attending=(2, 5, 8, 10, 12, 14),
    ),
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


def write_metadata(writer: GGUFWriter, shape: Shape, num_mtp: int) -> None:
    """Write the sizes and a tokenizer. `num_mtp`: layers for multi-token prediction."""
    name, full_dim = shape.architecture, shape.full.head_dim if shape.full else shape.head_dim
    middles = [shape.middle * (2 if shape.shares(layer) else 1) for layer in range(shape.layers)]
    writer.add_feed_forward_length(middles if shape.full and shape.full.sharing else shape.middle)
    if shape.full:
        write_full(writer, shape, shape.full)
    for key, value in (
        ("context_length", shape.positions),
        ("embedding_length", shape.hidden),
        ("block_count", shape.layers + num_mtp),
        ("attention.head_count", shape.heads),
        ("attention.key_length", full_dim),
        ("attention.value_length", full_dim),
        ("rope.dimension_count", shape.turning or full_dim),
    ):
        writer.add_uint32(f"{name}.{key}", value)
    counts = [0 if shape.is_recurrent(layer) else shape.kv_heads for layer in range(shape.layers)]
    if shape.full:
        counts = [shape.full.kv_heads if shape.is_full(layer) else shape.kv_heads for layer in range(shape.layers)]
    writer.add_head_count_kv(counts if shape.attending or shape.full else shape.kv_heads)
    if shape.attending:
        writer.add_uint32(f"{name}.shortconv.l_cache", SHORT)
        writer.add_uint32(f"{name}.vocab_size", shape.vocab)
    if shape.deltas:
        keys, values, depth = shape.deltas
        named = {"conv_kernel": FILTER, "state_size": depth, "group_count": keys, "time_step_rank": values}
        for key, value in (named | {"inner_size": values * depth}).items():
            writer.add_uint32(f"{name}.ssm.{key}", value)
        writer.add_uint32(f"{name}.full_attention_interval", INTERVAL)
        writer.add_uint32(f"{name}.nextn_predict_layers", num_mtp)
        writer.add_array(f"{name}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{name}.rope.freq_base", shape.theta)
    if shape.experts:
        for key, count in (("count", shape.experts), ("used_count", shape.used), ("feed_forward_length", shape.width)):
            writer.add_uint32(f"{name}.expert_{key}", count)
    if shape.window:
        writer.add_uint32(f"{name}.attention.sliding_window", shape.window)
    if shape.architecture == "phi3":
        writer.add_uint32(f"{name}.rope.scaling.original_context_length", TRAINED)
        writer.add_float32(f"{name}.rope.scaling.attn_factor", 1.19)
    if shape.factor != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.factor)
    (write_byte_level if shape.pre else write_sentence_piece)(writer, shape)


def write_full(writer: GGUFWriter, shape: Shape, full: Full) -> None:
    """Write the sizes of Gemma 4's two kinds of layers."""
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        writer.add_uint32(f"gemma4.{name}", shape.head_dim)
    writer.add_array("gemma4.attention.sliding_window_pattern", [not shape.is_full(one) for one in range(shape.layers)])
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    writer.add_float32("gemma4.final_logit_softcapping", 30.0)
    writer.add_uint32("gemma4.attention.shared_kv_layers", full.sharing)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", full.embedding)
    pairs = full.head_dim // 2
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32))


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


def matrices(shape: Shape, layer: int) -> dict[str, tuple[int, int]]:
    """Return output and input sizes of the matrices of a layer."""
    width, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    middle = shape.middle * (2 if shape.shares(layer) else 1)
    mlp = {
        "ffn_gate": (middle, shape.hidden),
        "ffn_up": (middle, shape.hidden),
        "ffn_down": (shape.hidden, middle),
    }
    if (full := shape.full) is not None:
        if shape.is_full(layer):
            width, narrow = shape.heads * full.head_dim, full.kv_heads * full.head_dim
        found = mlp | {"attn_q": (width, shape.hidden), "attn_output": (shape.hidden, width)}
        if not shape.shares(layer):
            found["attn_k"] = (narrow, shape.hidden)
            if full.sharing or not shape.is_full(layer):
                found["attn_v"] = (narrow, shape.hidden)
        if full.embedding:
            found |= {"inp_gate": (full.embedding, shape.hidden), "proj": (shape.hidden, full.embedding)}
        return found
    if shape.is_recurrent(layer) and shape.deltas:
        keys, values, depth = shape.deltas
        return mlp | {
            "attn_qkv": ((2 * keys + values) * depth, shape.hidden),
            "attn_gate": (values * depth, shape.hidden),
            "ssm_beta": (values, shape.hidden),
            "ssm_alpha": (values, shape.hidden),
            "ssm_out": (shape.hidden, values * depth),
        }
    if shape.is_recurrent(layer):
        inputs = {"shortconv.in_proj": (3 * shape.hidden, shape.hidden)}
        return mlp | inputs | {"shortconv.out_proj": (shape.hidden, shape.hidden)}
    if shape.architecture == "phi3":
        return {
            "attn_qkv": (width + 2 * narrow, shape.hidden),
            "attn_output": (shape.hidden, width),
            "ffn_up": (2 * shape.middle, shape.hidden),
            "ffn_down": (shape.hidden, shape.middle),
        }
    attention = {
        "attn_q": (2 * width if shape.deltas else width, shape.hidden),  # with gates
        "attn_k": (narrow, shape.hidden),
        "attn_v": (narrow, shape.hidden),
        "attn_output": (shape.hidden, width),
    }
    return attention if shape.experts else mlp | attention


def vectors(shape: Shape, layer: int) -> dict[str, np.ndarray]:
    """Return the other tensors of a layer."""
    random, is_recurrent = np.random.default_rng(layer), shape.is_recurrent(layer)
    widths = {"attn_norm": shape.hidden, "post_attention_norm" if shape.deltas else "ffn_norm": shape.hidden}
    if shape.architecture in ("qwen3", "qwen3moe", "gemma3", "qwen35", "lfm2") and not is_recurrent:
        widths |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    if shape.architecture == "olmoe":
        widths |= {"attn_q_norm": shape.heads * shape.head_dim, "attn_k_norm": shape.kv_heads * shape.head_dim}
    if shape.full:
        depth = shape.full.head_dim if shape.is_full(layer) else shape.head_dim
        norms = ("attn_q_norm",) if shape.shares(layer) else ("attn_q_norm", "attn_k_norm")
        widths |= dict.fromkeys(norms, depth) | {"layer_output_scale": 1}
        widths |= {"post_norm": shape.hidden} if shape.full.embedding else {}
    if shape.architecture in ("gemma3", "gemma4"):
        widths |= {"post_attention_norm": shape.hidden, "post_ffw_norm": shape.hidden}
    if is_recurrent and shape.deltas:
        widths["ssm_norm"] = shape.deltas[2]
    found = {f"{name}.weight": np.ones(width, np.float32) for name, width in widths.items()}
    if not is_recurrent:
        return found
    if not shape.deltas:
        return found | {"shortconv.conv.weight": random.normal(0, 0.5, (shape.hidden, SHORT)).astype(np.float32)}
    keys, values, depth = shape.deltas
    return found | {
        "ssm_conv1d.weight": random.normal(0, 0.5, ((2 * keys + values) * depth, FILTER)).astype(np.float32),
        "ssm_a": -np.exp(random.uniform(-1, 1, values)).astype(np.float32),
        "ssm_dt.bias": random.normal(0, 0.1, values).astype(np.float32),
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
    positional = {"shape": str, "format": str, "out": Path}
    asked = parse(__doc__, positional, {"shape": SHAPES, "format": SCALES}, layers=int, mtp=False)
    shape, random = SHAPES[asked.shape], np.random.default_rng(0)
    shape = replace(shape, layers=asked.layers or shape.layers)
    if asked.mtp and not shape.deltas:
        refuse(f"--mtp is of the shapes of Qwen3.5, not of {asked.shape}")
    writer = GGUFWriter(asked.out, shape.architecture)
    write_metadata(writer, shape, int(asked.mtp))

    def add(name: str, rows: int, columns: int, power: int = 0) -> None:
        own = "Q8_0" if asked.format == "MXFP4" else asked.format  # as in files of gpt-oss, only experts have it
        writer.add_tensor(name, blocks(random, own, rows, columns, power), raw_dtype=GGMLQuantizationType[own])

    # so that a token chooses experts by itself, not by what layers add to all tokens alike
    add("token_embd.weight", shape.vocab, shape.hidden, 6 if shape.experts else 0)
    if shape.full and (size := shape.full.embedding):
        add("per_layer_token_embd.weight", shape.vocab, shape.layers * size)
        add("per_layer_model_proj.weight", shape.layers * size, shape.hidden)
        writer.add_tensor("per_layer_proj_norm.weight", np.ones(size, np.float32))
    if shape.architecture == "olmoe":
        add("output.weight", shape.vocab, shape.hidden)
    if shape.architecture == "phi3":
        for name, most in (("short", 1.2), ("long", 50.0)):
            factors = np.linspace(1.0, most, shape.turning // 2, dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    for layer in range(shape.layers + asked.mtp):
        for name, size in matrices(shape, layer).items():
            add(f"blk.{layer}.{name}.weight", *size)
        if shape.experts:
            add_experts(writer, shape, asked.format, f"blk.{layer}.", random)
        for name, values in vectors(shape, layer).items():
            writer.add_tensor(f"blk.{layer}.{name}", values)
    ones = np.ones(shape.hidden, np.float32)
    if asked.mtp:
        add(f"blk.{shape.layers}.nextn.eh_proj.weight", shape.hidden, 2 * shape.hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            writer.add_tensor(f"blk.{shape.layers}.nextn.{name}.weight", ones)
    writer.add_tensor("token_embd_norm.weight" if shape.attending else "output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    run(main)
