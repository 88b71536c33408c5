"""EAGLE-3 heads of random weights in every layout, and their forward from the formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from files import interleaved, model_folder
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file

from outpace.core.tree import PREFIX
from outpace.models.base import Part
from outpace.models.files.checkpoint import INDEX

LAYERS = 8  # of the target
WIDTH, ROWS, VOCAB, DEPTH = 64, 128, 272, 16
TAPS = (2, 4, 5)  # without ids in the file: 2, L // 2, L - 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DEPTH,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,  # only the size of a table
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "draft_vocab_size": ROWS,
}
SPECULATORS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "draft_vocab_size",
    "mask_token_id",
)
MASK = 270
PARENTS = (PREFIX, 0, 0, 1, 1, 2, 3, 6)  # a tree below the root
P_EAGLE: dict[str, Any] = {"num_hidden_layers": 2, "mask_token_id": MASK}  # with mask slots and a second layer
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwen3": {"model_type": "qwen3"},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "window": {
        "model_type": "qwen3",
        "layer_types": ["sliding_attention"],
        "sliding_window": 5,
        "use_sliding_window": True,
    },
    "scaled": {"logit_scale": 0.5},
}


class RandomWeights:
    """Random float32 weights; the same for equal seeds."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> np.ndarray:
        return (self._random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.3 * self._random.standard_normal(size)).astype(np.float32)

    def offsets(self, rows: int, vocab: int = VOCAB) -> np.ndarray:
        """Return the `d2t` of a random draft vocabulary: int64 [rows]"""
        ids = np.sort(self._random.permutation(vocab)[:rows])
        return (ids - np.arange(rows)).astype(np.int64)


def head_config(**changes: Any) -> dict[str, Any]:
    return CONFIG | changes


def head_tensors(config: Mapping[str, Any], seed: int = 0, taps: int = 3) -> dict[str, np.ndarray]:
    """Return random float32 weights, named as in public heads; the draft vocabulary is random too."""
    random, width, middle = RandomWeights(seed), config["hidden_size"], config["intermediate_size"]
    matrix, norm = random.matrix, random.norm
    depth, rows = config["head_dim"], config["draft_vocab_size"]
    queries, keys = config["num_attention_heads"] * depth, config["num_key_value_heads"] * depth

    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    tensors = {
        "fc.weight": matrix(width, taps * width),
        "midlayer.input_layernorm.weight": norm(width),
        "midlayer.hidden_norm.weight": norm(width),
        "midlayer.post_attention_layernorm.weight": norm(width),
        "norm.weight": norm(width),
        attention + "q_proj.weight": matrix(queries, 2 * width) * 2,
        attention + "k_proj.weight": matrix(keys, 2 * width) * 2,
        attention + "v_proj.weight": matrix(keys, 2 * width),
        attention + "o_proj.weight": matrix(width, queries),
        mlp + "gate_proj.weight": matrix(middle, width),
        mlp + "up_proj.weight": matrix(middle, width),
        mlp + "down_proj.weight": matrix(width, middle),
        "lm_head.weight": matrix(rows, width) * 4,
        "embed_tokens.weight": matrix(config["vocab_size"], width),
    }
    for layer in range(1, config["num_hidden_layers"]):
        for name in [one for one in tensors if one.startswith("midlayer.") and "hidden_norm" not in one]:
            shape, ordinary = tensors[name].shape, name.replace("midlayer.", f"layers.{layer}.")
            is_wide = len(shape) == 2 and shape[1] == 2 * width
            is_matrix = len(shape) == 2
            tensors[ordinary] = matrix(shape[0], width if is_wide else shape[1]) if is_matrix else norm(shape[0])
    if "mask_token_id" in config:
        tensors["mask_hidden"] = matrix(1, 1, taps * width) * np.float32(np.sqrt(taps * width))
    if config["model_type"] == "qwen3":
        tensors[attention + "q_norm.weight"], tensors[attention + "k_norm.weight"] = norm(depth), norm(depth)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(taps * width)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{tap}.weight": norm(width) for tap in range(taps)}
    tensors["d2t"] = random.offsets(rows, config["vocab_size"])
    ids = tensors["d2t"] + np.arange(rows)
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), ids)
    return tensors


def write_head(folder: Path, layout: str = "midlayer", seed: int = 0, drop: Sequence[str] = (), **changes: Any) -> Path:
    """Write a head in one of LAYOUTS; `drop`: tensors to leave out; `changes` of its config."""
    config = head_config(**changes)
    tensors = {name: value for name, value in head_tensors(config, seed).items() if name not in drop}
    return LAYOUTS[layout](folder, config, tensors)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def _by_layers(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    return write_folder(folder, config, {f"model.{renamed(name)}": value for name, value in tensors.items()})


def _speculators(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    outer = {name: config[name] for name in SPECULATORS if name in config}
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["LlamaForCausalLM"]}
    whole = (
        {"norm_before_residual": False}
        | outer
        | {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "peagle" if "mask_token_id" in config else "eagle3",
            "transformer_layer_config": {name: value for name, value in config.items() if name not in outer},
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"speculative_tokens": 3}],
                "verifier": verifier,
            },
        }
    )
    return write_folder(folder, whole, {renamed(name): value for name, value in tensors.items()})


def _sharded(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    write_folder(folder, config, tensors)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: np.ascontiguousarray(tensors[name]) for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def _pickled(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    write_folder(folder, config, tensors)
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
    return folder


def _gguf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """As llama.cpp's converter writes a head: d2t holds token ids, rotary pairs of queries and keys are neighbours."""
    folder.mkdir(parents=True)
    writer = GGUFWriter(folder / "head.gguf", "eagle3")
    for name, field in GGUF_FIELDS.items():
        value = config[field]
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"eagle3.{name}", value)
    for name in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{name}", bool(config.get(name)))
    writer.add_array("eagle3.target_layers", list(TAPS))
    for name, value in tensors.items():
        if name == "t2d":
            continue
        stored = (
            value + np.arange(len(value)) if name == "d2t" else interleaved(name, value) if value.ndim == 2 else value
        )
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    return finish_gguf(writer, folder / "head.gguf")


def finish_gguf(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
LAYOUTS = {
    "midlayer": write_folder,
    "layers.0": _by_layers,
    "speculators": _speculators,
    "sharded": _sharded,
    "pickled": _pickled,
    "gguf": _gguf,
}
GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
}
GGUF_WHOLE = {"norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "input_norm": "enc.output_norm"}


def renamed(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("midlayer."):
        return f"blk.0.{GGUF_PARTS[stem.removeprefix('midlayer.')]}.{kind}"
    return f"{GGUF_WHOLE.get(stem, stem)}.{kind}" if stem else name


class Reference:
    """The forward, slot by slot in float64. `mistake`: one of MISTAKES, which change the drafts and not the text."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], mistake: str = "") -> None:
        self.config, self.mistake = config, mistake
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        ids = tensors["d2t"] if mistake == "d2t as ids" else tensors["d2t"] + np.arange(len(tensors["d2t"]))
        self.ids = ids.astype(np.int64)

    def __call__(self, hidden: np.ndarray, tokens: Sequence[int], masks: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return logits of the draft's rows, and features, of a path of slots with these `tokens`. `hidden` [taps, n,
        width] are the target's of the first n positions; later slots read the feature of the slot before, and
        `masks` slots of P-EAGLE's mask token after them its feature."""
        known = self.fuse(np.asarray(hidden, np.float64))
        keys: list[list[Any]] = [[] for _ in range(self.config["num_hidden_layers"])]
        values: list[list[Any]] = [[] for _ in keys]
        logits, outputs = [], []
        for slot, token in enumerate([*tokens, *[MASK] * masks]):
            if slot >= len(tokens):
                feature = self.fuse(self._of("mask_hidden").reshape(3, 1, -1))[0]
            else:
                feature = known[slot] if slot < len(known) else outputs[-1]
            if slot >= len(known) and self.mistake == "fc on the feedback":
                feature = self._of("fc.weight") @ np.tile(feature, 3)
            output = self._layer(feature, token, slot, keys[0], values[0], slot < len(known))
            for layer in range(1, len(keys)):
                output = self._ordinary(f"layers.{layer}.", output, slot, keys[layer], values[layer])
            final = self._norm(output, "norm")
            logits.append(self._of("lm_head.weight") @ final * self.config.get("logit_scale", 1.0))
            outputs.append(final if self.config.get("norm_output") else output)
        return np.array(logits), np.array(outputs)

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        taps = list(hidden[::-1] if self.mistake == "taps reversed" else hidden)
        if self.config.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)]
        joined = np.concatenate(taps, axis=-1)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm")
        return joined @ self._of("fc.weight").T

    def _layer(
        self, feature: np.ndarray, token: int, slot: int, keys: list[Any], values: list[Any], is_known: bool
    ) -> np.ndarray:
        config = self.config
        embedded = self._norm(self._of("embed_tokens.weight")[token], "midlayer.input_layernorm")
        normed = feature if self.mistake == "no hidden norm" else self._norm(feature, "midlayer.hidden_norm")
        both = np.concatenate([normed, embedded] if self.mistake == "feature first" else [embedded, normed])
        position = slot + (not is_known and self.mistake == "position shifted in the chain")
        residual = normed if config.get("norm_before_residual") else feature
        return self._attend("midlayer.", residual, both, slot, position, keys, values)

    def _ordinary(self, name: str, x: np.ndarray, slot: int, keys: list[Any], values: list[Any]) -> np.ndarray:
        return self._attend(name, x, self._norm(x, f"{name}input_layernorm"), slot, slot, keys, values)

    def _attend(
        self,
        layer: str,
        residual: np.ndarray,
        both: np.ndarray,
        slot: int,
        position: int,
        keys: list[Any],
        values: list[Any],
    ) -> np.ndarray:
        config, name = self.config, f"{layer}self_attn."
        query = self._heads(self._product(name + "q_proj", both), position, f"{name}q_norm")
        keys.append(self._heads(self._product(name + "k_proj", both), position, f"{name}k_norm"))
        values.append(self._product(name + "v_proj", both).reshape(-1, config["head_dim"]))
        first = max(0, slot + 1 - config.get("sliding_window", slot + 1))
        return self._finish(layer, residual, self._weighted(query, np.array(keys[first:]), np.array(values[first:])))

    def _weighted(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: Any = 0.0) -> np.ndarray:
        """Attention of queries [.., heads, depth] over keys and values [slots, kv_heads, depth]: [.., heads * depth]"""
        keys, values = (np.repeat(one, queries.shape[-2] // one.shape[1], axis=1) for one in (keys, values))
        scores = np.einsum("...hd,khd->h...k", queries, keys) / np.sqrt(queries.shape[-1]) + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("h...k,khd->...hd", weights, values).reshape(*queries.shape[:-2], -1)

    def _finish(self, layer: str, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """Add the projection of what was attended, and the MLP, to rows."""
        x = x + attended @ self._of(f"{layer}self_attn.o_proj.weight").T
        inner = self._norm(x, f"{layer}post_attention_layernorm")
        gate, up = (inner @ self._of(f"{layer}mlp.{part}_proj.weight").T for part in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ self._of(f"{layer}mlp.down_proj.weight").T

    def _heads(self, x: np.ndarray, places: Any, norm: str) -> np.ndarray:
        """Split rows [.., heads * depth] at these places into heads, norm and rotate them."""
        depth = self.config["head_dim"]
        x = x.reshape(*x.shape[:-1], -1, depth)
        if self.config["model_type"] == "qwen3":
            x = self._norm(x, norm)
        turns = self.config["rope_theta"] ** (-np.arange(0, depth, 2) / depth)
        angles = np.asarray(places)[..., None, None] * turns
        first, second = x[..., : depth // 2], x[..., depth // 2 :]
        turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
        return np.concatenate(turned, axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        squares = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(squares + self.config["rms_norm_eps"]) * self._of(f"{name}.weight")

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._of(f"{name}.weight") @ x + self.tensors.get(f"{name}.bias", 0.0)

    def _of(self, name: str) -> np.ndarray:
        return self.tensors[name]


MISTAKES = (
    "taps reversed",
    "feature first",
    "d2t as ids",
    "position shifted in the chain",
    "fc on the feedback",
    "no hidden norm",
)

WORD, BEFORE, CONSTANT, FILLER, SHARE = slice(0, 16), slice(16, 32), 48, 49, 0.5


def silent_target(folder: Path, name: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a target to `folder`/`name`; return its path, and weights for it whose layers add nothing to their input.
    The embedding and the output layer are for the caller to set."""
    target = model_folder(
        folder, name, num_hidden_layers=LAYERS, tie_word_embeddings=False, max_position_embeddings=512
    )
    stored = load_file(target / "model.safetensors")
    return target, {one: (np.zeros_like if "proj" in one else np.ones_like)(value) for one, value in stored.items()}


def exact_pair(folder: Path) -> tuple[Path, Path]:
    """A target and a head that drafts exactly what it writes, in `folder`/exact and `folder`/good.

    The target's next token depends on the last two: the embedding of the last is in the dimensions WORD, and the first
    block copies SHARE of the one before it to BEFORE; all later blocks add nothing. The head's layer attends to its own
    slot only, and moves what WORD holds of its feature to BEFORE, and the slot's token to WORD. FILLER gives the
    features of passed positions the length that the head's own outputs have, because the layer norms both.
    """
    random = np.random.default_rng(7)
    target, weights = silent_target(folder, "exact")
    words = random.standard_normal((VOCAB, 16))
    embedding = np.zeros((VOCAB, WIDTH), np.float32)
    embedding[:, WORD] = words / np.linalg.norm(words, axis=1, keepdims=True)
    embedding[:, CONSTANT] = 1.0
    gain = np.sqrt(WIDTH / 2)  # the length of all embeddings is sqrt(2)
    output = np.zeros((VOCAB, WIDTH), np.float32)
    output[:, WORD], output[:, BEFORE] = (random.standard_normal((VOCAB, 16)) * 4 for _ in range(2))
    attention = "model.layers.0.self_attn."
    attend_at(1, weights[attention + "q_proj.weight"], weights[attention + "k_proj.weight"], DEPTH, 50000.0, 3, gain)
    weights[attention + "v_proj.weight"][:16, WORD] = np.eye(16) / gain
    weights[attention + "o_proj.weight"][BEFORE, :16] = np.eye(16) * SHARE
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    save_file(weights, target / "model.safetensors")
    config = head_config(num_attention_heads=1, num_key_value_heads=1, head_dim=64, draft_vocab_size=VOCAB)
    head = {name: np.zeros_like(value) for name, value in head_tensors(config).items() if name not in OF_TARGET}
    head = {name: np.ones_like(value) if "norm" in name else value for name, value in head.items()}
    feature, tap, gain_of_feature = slice(WIDTH, 2 * WIDTH), slice(WIDTH, 2 * WIDTH), np.sqrt(WIDTH / (1 + SHARE**2))
    fc = head["fc.weight"][:, tap]
    fc[WORD, WORD], fc[FILLER, CONSTANT] = np.eye(16), SHARE
    name = "midlayer.self_attn."
    attend_at(0, head[name + "q_proj.weight"], head[name + "k_proj.weight"], 64, config["rope_theta"], 16, gain)
    values = head[name + "v_proj.weight"]
    read = values[:, feature]
    values[WORD, WORD] = np.eye(16) / gain
    read[WORD, WORD], read[BEFORE, BEFORE] = -np.eye(16) / gain_of_feature, -np.eye(16) / gain_of_feature
    read[BEFORE, WORD], read[FILLER, FILLER] = np.eye(16) * SHARE / gain_of_feature, -1 / gain_of_feature
    head[name + "o_proj.weight"][:] = np.eye(64)
    return target, write_folder(folder / "good", config, head)


def attend_at(
    distance: int, queries: np.ndarray, keys: np.ndarray, depth: int, theta: float, pairs: int, gain: float
) -> None:
    """Make the first head attend to the token at this distance: there the product of its constant queries and keys is
    largest."""
    for pair in range(pairs):
        angle = distance * theta ** (-2 * pair / depth)
        queries[pair, CONSTANT] = 30 * np.sqrt(depth) / gain
        keys[pair, CONSTANT], keys[pair + depth // 2, CONSTANT] = np.cos(angle) / gain, np.sin(angle) / gain


OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


def layers_of(part: Part) -> list[Part]:
    """Split a part into passes, children after their parents. Nodes keep their numbers."""
    depths = [0]
    for parent in part.parents[1:]:
        depths.append(depths[parent] + 1)
    cuts = [0, *(node for node in range(1, len(depths)) if depths[node] > depths[node - 1]), len(depths)]
    return [
        part._replace(tokens=part.tokens[a:b], parents=part.parents[a:b], logit_rows=range(b - a))
        for a, b in pairwise(cuts)
    ]
