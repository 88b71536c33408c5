"""DFlash and DSpark heads of random weights in every layout, and their forward from the formulas in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from heads import (
    CONSTANT,
    DEPTH,
    FILLER,
    GGUF_FIELDS,
    GGUF_PARTS,
    VOCAB,
    WIDTH,
    RandomWeights,
    Reference,
    attend_at,
    finish_gguf,
    silent_target,
    write_folder,
)
from safetensors.numpy import save_file

BLOCK, MASK, RANK, ROWS = 5, 271, 8, 128
TAPS = (2, 5, 7)
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DEPTH,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]},
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
DSPARK = {"architectures": ["DSparkDraftModel"], "markov_rank": RANK, "draft_vocab_size": ROWS}
JETSPEC = CONFIG["dflash_config"] | {"causal_head": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "jetspec": {"dflash_config": JETSPEC},
    "jetspec, shifted": {"dflash_config": JETSPEC | {"draft_shift": True}},
    "llama layers": {"model_type": "llama"},
    "reduced vocabulary": {"draft_vocab_size": ROWS},
    "sliding": SLIDING,
    "sliding, bidirectional": SLIDING | {"is_causal": False},
    "causal": {"is_causal": True},
    "dspark": DSPARK,
    "dspark, whole vocabulary": {key: value for key, value in DSPARK.items() if key != "draft_vocab_size"},
    "dspark, anchor is given": DSPARK | {"sample_from_anchor": False},
    "dspark, gated": DSPARK | {"markov_head_type": "gated"},
    "dspark, recurrent": DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False},
}


def block_config(**changes: Any) -> dict[str, Any]:
    return CONFIG | changes


def block_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights, named as in public heads."""
    random, middle = RandomWeights(seed), config["intermediate_size"]
    matrix, norm = random.matrix, random.norm
    queries, keys = (config[f"num_{name}_heads"] * DEPTH for name in ("attention", "key_value"))

    rows = config.get("draft_vocab_size", VOCAB)
    tensors = {
        "fc.weight": matrix(WIDTH, len(TAPS) * WIDTH),
        "hidden_norm.weight": norm(WIDTH),
        "norm.weight": norm(WIDTH),
        "embed_tokens.weight": matrix(VOCAB, WIDTH) * 4,
        "lm_head.weight": matrix(rows, WIDTH) * 4,
    }
    for layer in range(config["num_hidden_layers"]):
        own = f"layers.{layer}."
        shapes = {"q": (queries, WIDTH), "k": (keys, WIDTH), "v": (keys, WIDTH), "o": (WIDTH, queries)}
        tensors |= {f"{own}self_attn.{name}_proj.weight": matrix(*shape) * 2 for name, shape in shapes.items()}
        for name, shape in {"gate": (middle, WIDTH), "up": (middle, WIDTH), "down": (WIDTH, middle)}.items():
            tensors[f"{own}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{own}{name}.weight"] = norm(WIDTH)
        if config["model_type"] == "qwen3":
            tensors |= {f"{own}self_attn.{name}_norm.weight": norm(DEPTH) for name in "qk"}
    if rows < VOCAB:
        tensors["d2t"] = random.offsets(rows)
    if "markov_rank" in config:
        kind = config.get("markov_head_type", "vanilla")
        tensors["markov_head.markov_w1.weight"] = matrix(VOCAB, RANK) * 2
        tensors["markov_head.markov_w2.weight"] = matrix(rows, RANK) * 2
        shapes = {"gated": ("gate_proj", RANK, WIDTH + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + WIDTH)}
        if kind in shapes:
            name, outputs, inputs = shapes[kind]
            tensors[f"markov_head.{name}.weight"] = matrix(outputs, inputs)
            tensors[f"markov_head.{name}.bias"] = matrix(1, outputs)[0]
        tensors["confidence_head.proj.weight"] = matrix(1, WIDTH + RANK)
        tensors["confidence_head.proj.bias"] = np.array([0.5], np.float32)
    return tensors


def write_block(folder: Path, layout: str = "z-lab", seed: int = 0, **changes: Any) -> Path:
    config = block_config(**changes)
    return LAYOUTS[layout](folder, config, block_tensors(config, seed))


def _speculators(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """As the package speculators writes it: taps are numbers of layers, and the layer has a config of its own."""
    is_dspark = "markov_rank" in config
    outer = ("block_size", "sample_from_anchor", "markov_rank", "markov_head_type", "draft_vocab_size")
    left_out = (*outer, "dflash_config", "architectures")
    whole = {name: config[name] for name in outer if name in config} | {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "speculators_model_type": "dspark" if is_dspark else "dflash",
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "transformer_layer_config": {name: value for name, value in config.items() if name not in left_out},
        "speculators_config": {"verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}},
    }
    return write_folder(folder, whole, tensors)


def _fused_names(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    other = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    found = {}
    for name, value in tensors.items():
        prefix = next((one for one in other if name.startswith(one)), None)
        found[name if prefix is None else other[prefix] + name.removeprefix(prefix)] = value
    return write_folder(folder, config, found)


def _gguf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """As llama.cpp's converter writes it: d2t holds token ids; rotary pairs are not neighbours."""
    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "head.gguf", "dflash")
    for name, field in GGUF_FIELDS.items():
        value = config[field]
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"dflash.{name}", value)
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_array("dflash.target_layers", list(TAPS))
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK)
    for name, value in tensors.items():
        stored = value + np.arange(len(value)) if name == "d2t" else value
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    return finish_gguf(writer, folder / "head.gguf")


WHOLE = {
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("layers."):
        return f"{WHOLE.get(stem, stem)}.{kind}" if stem else name
    number, _, part = stem.removeprefix("layers.").partition(".")
    return f"blk.{number}.{GGUF_PARTS[part]}.{kind}"


LAYOUTS = {"z-lab": write_folder, "speculators": _speculators, "encoder": _fused_names, "gguf": _gguf}


class BlockReference(Reference):
    """The forward of a block in float64. `mistake`: one of MISTAKES, which change the drafts and not the text."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], mistake: str = "") -> None:
        self.config, self.mistake = config, mistake
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        rows = len(tensors["lm_head.weight"])
        self.ids = tensors.get("d2t", 0) + np.arange(rows)
        is_dspark = "markov_rank" in config
        self.from_anchor = config.get("sample_from_anchor", is_dspark)

    def outputs(self, hidden: np.ndarray, anchor: int) -> np.ndarray:
        """Return the normed outputs of a block's slots after a text: [block, width]. `hidden` [taps, positions,
        width] are the target's hidden states."""
        taps = hidden[::-1] if self.mistake == "taps reversed" else hidden
        features = np.concatenate(list(np.asarray(taps, np.float64)), axis=-1) @ self._of("fc.weight").T
        if self.mistake != "no norm of the features":
            features = self._norm(features, "hidden_norm")
        x = self._of("embed_tokens.weight")[[anchor, *[MASK] * (self.config["block_size"] - 1)]]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(f"layers.{layer}.", layer, features, x)
        return self._norm(x, "norm")

    def logits(self, hidden: np.ndarray, anchor: int) -> np.ndarray:
        """Return the logits of all drafted places, without the Markov bias: [places, rows]."""
        outputs = self.outputs(hidden, anchor)
        outputs = outputs[:-1] if self.config["dflash_config"].get("draft_shift") else outputs[not self.from_anchor :]
        return outputs @ self._of("lm_head.weight").T

    def below(self, hidden: np.ndarray, path: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the logits below a path, which begins with the anchor, and the confidence."""
        outputs, place = self.outputs(hidden, path[0]), len(path) - 1
        before = [*path] if self.from_anchor else [path[0], *path]
        slot, w1 = len(before) - 1, self._of("markov_head.markov_w1.weight")
        logits = self._of("lm_head.weight") @ outputs[slot]
        token = path[0] if self.mistake == "the bias of the anchor" else before[-1]
        vector = self._vector(outputs, before, w1[token])
        score = self._of("confidence_head.proj.weight")[0] @ np.concatenate([outputs[slot], w1[before[-1]]])
        assert slot == place + (not self.from_anchor)
        return logits + self._of("markov_head.markov_w2.weight") @ vector, _sigmoid(
            score + self._of("confidence_head.proj.bias")[0]
        )

    def _vector(self, outputs: np.ndarray, before: Sequence[int], own: np.ndarray) -> np.ndarray:
        kind = self.config.get("markov_head_type", "vanilla")
        if kind == "vanilla":
            return own
        name = "markov_head.gate_proj" if kind == "gated" else "markov_head.joint_proj"
        weight, bias = self._of(f"{name}.weight"), self._of(f"{name}.bias")
        if kind == "gated":
            return own * _sigmoid(weight @ np.concatenate([outputs[len(before) - 1], own]) + bias)
        state = out = np.zeros(RANK)
        for slot, token in enumerate(before):
            embedded = self._of("markov_head.markov_w1.weight")[token]
            gate, new, out = np.split(weight @ np.concatenate([state, embedded, outputs[slot]]) + bias, 3)
            state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(new)
        return np.tanh(out)

    def _layer(self, name: str, number: int, features: np.ndarray, x: np.ndarray) -> np.ndarray:
        known, count = len(features), len(x)
        inner, attention = self._norm(x, f"{name}input_layernorm"), f"{name}self_attn."
        both = np.concatenate([features, inner])
        shift = 1 if self.mistake == "positions shifted in the block" else 0
        places = np.arange(known + count) + shift * (np.arange(known + count) >= known)
        keys = self._heads(both @ self._of(f"{attention}k_proj.weight").T, places, f"{attention}k_norm")
        queries = self._heads(inner @ self._of(f"{attention}q_proj.weight").T, places[known:], f"{attention}q_norm")
        values = (both @ self._of(f"{attention}v_proj.weight").T).reshape(known + count, -1, DEPTH)
        attended = self._weighted(queries, keys, values, self._mask(number, known, count))
        return self._finish(name, x, attended)

    def _mask(self, number: int, known: int, count: int) -> np.ndarray:
        query, key = known + np.arange(count)[:, None], np.arange(known + count)[None]
        slides = self.config.get("layer_types", ["full_attention"] * 9)[number] == "sliding_attention"
        is_causal = self.config.get("is_causal", slides) or self.config.get("dflash_config", {}).get(
            "causal_head", False
        )
        is_causal = is_causal or self.mistake == "the block is causal"
        hidden = (key > query) & is_causal
        if slides:
            hidden |= query - key >= self.config["sliding_window"]
        return np.where(hidden, -np.inf, 0.0)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


MISTAKES = (
    "taps reversed",
    "no norm of the features",
    "positions shifted in the block",
    "the block is causal",
)


def exact_block(folder: Path, from_anchor: bool, **changes: Any) -> tuple[Path, Path]:
    """Write a target whose next token follows from the last one, to `folder`/ring, and a DFlash head without a Markov
    bias whose slots draft what it writes, to `folder`/block; return both. `from_anchor`: whether a slot drafts the
    token after it; only `changes` of the config say so.

    The target writes the tokens of a cycle, whose codes are the corners of a circle in the dimensions 0 and 1. In each
    layer a slot attends to the slot before it and adds that one's code, turned by one step: slot i gets the code that
    is i steps after the anchor's. The head's own output layer is that of the target, or names the code's own token.
    """
    target, weights = silent_target(folder, "ring")
    angles = 2 * np.pi * np.arange(VOCAB) / CYCLE
    codes, output = np.zeros((VOCAB, WIDTH), np.float32), np.zeros((VOCAB, WIDTH), np.float32)
    codes[:, 0], codes[:, 1] = np.cos(angles), np.sin(angles)
    codes[MASK, :2], codes[:, [CONSTANT, FILLER]] = 0.0, LARGE  # so that all slots have nearly the same length
    following = np.roll(codes[:CYCLE, :2], 1, 0)  # the row of the token that follows another has its code
    output[:CYCLE, :2] = following * 400
    save_file(weights | {"model.embed_tokens.weight": codes, "lm_head.weight": output}, target / "model.safetensors")
    config = block_config(**{"model_type": "llama", "block_size": 4, "num_hidden_layers": 3} | changes)
    head = {name: np.zeros_like(value) for name, value in block_tensors(config).items() if "embed" not in name}
    head = {name: np.ones_like(value) if "norm" in name else value for name, value in head.items()}
    head["fc.weight"][[CONSTANT, FILLER], CONSTANT] = 1.0  # of the first hidden state
    turn, gain = 2 * np.pi / CYCLE, np.sqrt(WIDTH / 2) / LARGE
    for layer in range(3):
        name = f"layers.{layer}.self_attn."
        queries, keys = head[f"{name}q_proj.weight"], head[f"{name}k_proj.weight"]
        attend_at(1, queries, keys, DEPTH, config["rope_theta"], 2, gain * LARGE)
        head[f"{name}v_proj.weight"][:2, :2] = np.eye(2) / gain
        turned = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        head[f"{name}o_proj.weight"][:2, :2] = np.array(turned)
    head["lm_head.weight"][:CYCLE, :2] = (following if from_anchor else codes[:CYCLE, :2]) * 400
    return target, write_folder(folder / "block", config, head)


LARGE = 8.0
CYCLE = 16


def bigram_pair(folder: Path) -> tuple[Path, Path]:
    """A target whose next token follows from the last one, and a DSpark head that drafts exactly what it writes by its
    Markov bias, in `folder`/bigram and `folder`/good."""
    random = np.random.default_rng(3)
    target, weights = silent_target(folder, "bigram")
    written = np.sort(random.permutation(VOCAB)[:64])  # a token that is never written counts as one of these
    codes = random.standard_normal((64, WIDTH)).astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    output = np.zeros((VOCAB, WIDTH), np.float32)
    output[written[random.permutation(64)]] = codes * 4  # the row of the token that follows another has its code
    embedding = codes[np.arange(VOCAB) % 64]
    embedding[written] = codes
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    save_file(weights, target / "model.safetensors")
    config = block_config(**DSPARK | {"draft_vocab_size": 64, "markov_rank": WIDTH})
    head = {name: np.zeros_like(value) for name, value in block_tensors(config).items()}
    head |= {"markov_head.markov_w1.weight": embedding * 8, "markov_head.markov_w2.weight": output[written]}
    head["confidence_head.proj.weight"] = np.zeros((1, 2 * WIDTH), np.float32)
    head["confidence_head.proj.bias"] = np.array([5.0], np.float32)
    head["d2t"] = written - np.arange(64)
    return target, write_folder(folder / "good", config, head)
