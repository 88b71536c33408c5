"""EAGLE-1 heads and MTP layers of random weights in every layout, and their forward from the formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import heads
import numpy as np
from files import model_folder
from heads import BEFORE, CONSTANT, LAYERS, SHARE, VOCAB, WIDTH, WORD, exact_pair, head_config, head_tensors
from safetensors.numpy import load_file, save_file

EAGLE1_CONFIG = {name: value for name, value in head_config().items() if name != "draft_vocab_size"} | {
    "architectures": ["LlamaForCausalLM"]
}
MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
MTP_NAMES = {
    "fc.": "input_proj.",
    "embed_norm.": "token_layernorm.",
    "hidden_norm.": "hidden_layernorm.",
    "norm.": "final_layernorm.",
    "layers.0.": "",
}
SPECULATORS_NAMES = {
    "fc.": "fusion_fc.",
    "embed_norm.": "embedding_layernorm.",
    "norm.": "pre_lm_head_layernorm.",
    "layers.0.": "transformer.",
}
INPUT_NORM = "layers.0.input_layernorm.weight"
VARIANTS: dict[str, tuple[str, ...]] = {  # tensors beyond the usual ones
    "plain": (),
    "bias": ("fc.bias",),
    "biases of queries": ("fc.bias", *(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")),
    "norms": ("fc.bias", "embed_norm.weight", INPUT_NORM, "norm.weight"),
    "own embedding": ("embed_tokens.weight", "lm_head.weight"),
}
MTP_TENSORS = (*VARIANTS["biases of queries"][1:], *VARIANTS["norms"][1:], "hidden_norm.weight")


def joined_tensors(more: Sequence[str] = (), seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights by the names that outpace uses; `more`: tensors that only some heads have."""
    random = np.random.default_rng(seed + 9)
    found = {}
    for name, value in head_tensors(head_config(draft_vocab_size=VOCAB), seed).items():
        is_wide = any(f"self_attn.{part}_proj" in name for part in "qkv")
        columns = WIDTH if is_wide else 2 * WIDTH if name == "fc.weight" else None
        found[name.replace("midlayer.", "layers.0.")] = value[..., :columns] if columns else value
    sizes = {"q": 64, "k": 32, "v": 32}
    found |= {f"layers.0.self_attn.{name}_proj.bias": random.standard_normal(size) for name, size in sizes.items()}
    found["fc.bias"] = random.standard_normal(WIDTH)
    found |= {f"{name}_norm.weight": 1 + 0.3 * random.standard_normal(WIDTH) for name in ("embed", "hidden")}
    optional = {name for names in (MTP_TENSORS, *VARIANTS.values()) for name in names}
    dropped = (optional - set(more)) | {"d2t", "t2d", "layers.0.hidden_norm.weight"}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items() if name not in dropped}


def renamed(tensors: Mapping[str, np.ndarray], names: Mapping[str, str], prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, value in tensors.items():
        begin = next((one for one in names if name.startswith(one)), None)
        found[prefix + (name if begin is None else names[begin] + name.removeprefix(begin))] = value
    return found


def _speculators(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    whole = {
        "speculators_model_type": "eagle",
        "fusion_bias": "fc.bias" in tensors,
        "transformer_layer_config": {name: value for name, value in config.items() if name != "architectures"},
        "speculators_config": {"verifier": verifier},
    }
    return heads.write_folder(folder, whole, renamed(tensors, SPECULATORS_NAMES))


def _hass(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    return heads.write_folder(folder, config, renamed(tensors, {"embed_norm.": "embed_layernorm."}))


LAYOUTS = {name: heads.LAYOUTS[name] for name in ("layers.0", "sharded", "pickled")} | {
    "eagle": heads.write_folder,
    "hass": _hass,
    "speculators": _speculators,
}


def write_eagle1(folder: Path, variant: str = "bias", layout: str = "eagle", **changes: Any) -> Path:
    return LAYOUTS[layout](folder, EAGLE1_CONFIG | changes, joined_tensors(VARIANTS[variant]))


def write_mimo(folder: Path, name: str = "mimo", seed: int = 0) -> Path:
    """Write a target with an MTP layer in its files."""
    options = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "max_position_embeddings": 512}
    path = model_folder(folder, name, **MIMO | options)
    add_mtp(path, joined_tensors(MTP_TENSORS, seed))
    return path


def add_mtp(target: Path, tensors: Mapping[str, np.ndarray]) -> None:
    file = target / "model.safetensors"
    save_file(load_file(file) | renamed(tensors, MTP_NAMES, "model.mtp_layers.0."), file)


class JoinedReference(heads.Reference):
    """The forward, slot by slot in float64. `mistake`: one of JOINED_MISTAKES."""

    def __init__(
        self, target: Path, tensors: Mapping[str, np.ndarray], mistake: str = "", is_mtp: bool = False
    ) -> None:
        own = json.loads((target / "config.json").read_text())
        held, tied = load_file(target / "model.safetensors"), own["tie_word_embeddings"]
        of_target = {
            "embed_tokens.weight": held["model.embed_tokens.weight"],
            "lm_head.weight": held["model.embed_tokens.weight" if tied else "lm_head.weight"],
            "target_norm.weight": held["model.norm.weight"],
            "d2t": np.zeros(VOCAB, np.int64),
        }
        config = (
            EAGLE1_CONFIG
            | {"norm_output": is_mtp != (mistake == "norm of the feedback")}
            | ({"rope_theta": own["rope_theta"]} if is_mtp else {})
        )
        super().__init__(config, of_target | {**tensors}, mistake)
        self.is_mtp = is_mtp

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        rows = np.asarray(hidden[0], np.float64)
        return rows if self.mistake == "no norm of the target" else self._norm(rows, "target_norm")

    def _layer(
        self, feature: np.ndarray, token: int, slot: int, keys: list[Any], values: list[Any], is_known: bool
    ) -> np.ndarray:
        embedded = self._of("embed_tokens.weight")[token] * (
            slot > 0 or self.is_mtp == (self.mistake == "first embedding")
        )
        both = [self._norm(embedded, "embed_norm"), self._norm(feature, "hidden_norm")]
        if self.is_mtp != (self.mistake == "embedding and feature swapped"):
            both.reverse()
        x = self._of("fc.weight") @ np.concatenate(both) + self.tensors.get("fc.bias", 0.0)
        inner = self._norm(x, "layers.0.input_layernorm")
        if self.mistake == "another norm before attention":
            inner = inner / np.sqrt((inner * inner).mean() + 1e-5) * np.linspace(0.5, 1.5, WIDTH)
        position = slot + (not is_known and self.mistake == "position shifted in the chain")
        return self._attend("layers.0.", x, inner, slot, position, keys, values)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return super()._norm(x, name) if f"{name}.weight" in self.tensors else x


JOINED_MISTAKES = (
    "no norm of the target",
    "embedding and feature swapped",
    "another norm before attention",
    "position shifted in the chain",
    "norm of the feedback",
    "first embedding",
)


def exact_joined(folder: Path) -> tuple[Path, Path, Path]:
    """Write a target, an EAGLE-1 head that drafts exactly what it writes, and the same target with such an MTP layer,
    to `folder`/exact, `folder`/joined and `folder`/mtp.

    The target is that of `exact_pair`: its state holds the last token in WORD and SHARE of the one before in BEFORE.
    `fc` takes WORD from the embedding and BEFORE from the feature's WORD; the layer adds nothing.
    """
    target, _ = exact_pair(folder)
    length, width = np.sqrt(2 + SHARE**2), np.sqrt(WIDTH)  # of the states, and of all normed vectors
    tensors = joined_tensors(MTP_TENSORS)
    zero = {name: np.ones_like(one) if "norm" in name else np.zeros_like(one) for name, one in tensors.items()}
    fc, of_feature = zero["fc.weight"], slice(WIDTH, 2 * WIDTH)
    embedded, feature = fc[:, :WIDTH], fc[:, of_feature]
    embedded[WORD, WORD], feature[BEFORE, WORD] = np.eye(16) * width / length, np.eye(16) * SHARE
    kept = [name for name in joined_tensors() if name not in ("embed_tokens.weight", "lm_head.weight")]
    head = heads.write_folder(folder / "joined", EAGLE1_CONFIG, {name: zero[name].copy() for name in kept})
    mtp = model_folder(
        folder, "mtp", **MIMO, num_hidden_layers=LAYERS, tie_word_embeddings=False, max_position_embeddings=512
    )
    biases = {name: np.zeros_like(one) for name, one in load_file(mtp / "model.safetensors").items() if "bias" in name}
    save_file(load_file(target / "model.safetensors") | biases, mtp / "model.safetensors")
    first, second = fc[:, :WIDTH], fc[:, of_feature]  # the feature is first
    fc[:] = 0.0
    second[WORD, WORD], second[CONSTANT, CONSTANT] = np.eye(16) * np.sqrt(2) / width, np.sqrt(2) / width
    first[BEFORE, WORD] = np.eye(16) * SHARE * length / width
    add_mtp(mtp, zero)
    return target, head, mtp
