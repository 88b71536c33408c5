"""SpecFormer heads of random weights, their forward from the formulas in float64, and one that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from block_heads import BlockReference
from heads import CONFIG as EAGLE_CONFIG
from heads import DEPTH, VOCAB, WIDTH, RandomWeights, silent_target, write_folder
from safetensors.numpy import load_file, save_file

SLOTS, TAPS, ROWS = 4, (0, 4, 7, 8), 128
CONFIG: dict[str, Any] = {
    **{name: value for name, value in EAGLE_CONFIG.items() if name != "draft_vocab_size"},
    "architectures": ["SpecFormerDraftModel"],
    "num_slots": SLOTS,
    "aux_hidden_state_layer_ids": list(TAPS),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "reduced vocabulary": {"draft_vocab_size": ROWS},
}


def slot_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights."""
    random, middle = RandomWeights(seed), config["intermediate_size"]
    matrix, norm = random.matrix, random.norm
    queries, keys = (config[f"num_{name}_heads"] * DEPTH for name in ("attention", "key_value"))

    taps = len(config["aux_hidden_state_layer_ids"])
    tensors = {f"fc_norm.{tap}.weight": norm(WIDTH) for tap in range(taps)}
    tensors |= {"embed_norm.weight": norm(WIDTH), "hidden_norm.weight": norm(WIDTH)}
    tensors |= {
        "fc.weight": matrix(WIDTH, (1 + taps) * WIDTH),
        "slots.weight": matrix(config["num_slots"] * WIDTH, WIDTH),
    }
    for own in ("context.", "layers.0."):
        shapes = {"q": (queries, WIDTH), "k": (keys, WIDTH), "v": (keys, WIDTH), "o": (WIDTH, queries)}
        tensors |= {f"{own}self_attn.{name}_proj.weight": matrix(*shape) * 2 for name, shape in shapes.items()}
        tensors[f"{own}input_layernorm.weight"] = norm(WIDTH)
        if config["model_type"] == "qwen3":
            tensors |= {f"{own}self_attn.{name}_norm.weight": norm(DEPTH) for name in "qk"}
    for name, shape in {"gate": (middle, WIDTH), "up": (middle, WIDTH), "down": (WIDTH, middle)}.items():
        tensors[f"layers.0.mlp.{name}_proj.weight"] = matrix(*shape)
    tensors["layers.0.post_attention_layernorm.weight"] = norm(WIDTH)
    if rows := config.get("draft_vocab_size"):
        tensors["d2t"] = random.offsets(rows)
        tensors["lm_head.weight"] = matrix(rows, WIDTH) * 4
    return tensors


def write_slots(folder: Path, **changes: Any) -> Path:
    config = CONFIG | changes
    return write_folder(folder, config, slot_tensors(config))


class SlotReference(BlockReference):
    """The forward in float64. `mistake`: one of MISTAKES, which change the drafts and not the text."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Mapping[str, Any], mistake: str = ""
    ) -> None:
        """`target`: its `embedding` and `output` [vocab, width], and its final `norm` [width]."""
        self.config, self.mistake = config, mistake
        self.tensors = {name: np.asarray(value, np.float64) for name, value in (target | dict(tensors)).items()}
        self.ids = tensors["d2t"] + np.arange(len(tensors["d2t"])) if "d2t" in tensors else np.arange(VOCAB)

    def __call__(self, hidden: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits of all slots after a text: [slots, rows]. `hidden` [taps, n, width] are the target's of the
        first n positions, `tokens` [n] those after each of these positions."""
        taps = np.asarray(hidden, np.float64)
        taps = np.roll(taps, 1, 0) if self.mistake == "tap off by one" else taps
        taps = np.roll(taps, 1, 1) if self.mistake == "stale features" else taps
        shifted = np.roll(tokens, 1) if self.mistake == "shifted by one" else tokens
        embedded = self._norm(self._of("embedding")[list(shifted)], "embed_norm")
        embedded *= self.mistake != "no embedding"
        normed = [self._norm(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)]
        normed = [*taps] if self.mistake == "no norm of the hidden states" else normed
        x = np.concatenate([embedded, *normed], -1) @ self._of("fc.weight").T
        last = x[-1] + self._attended(x)
        last = last if self.mistake == "no norm before the slots" else self._norm(last, "hidden_norm")
        slots = (self._of("slots.weight") @ last).reshape(self.config["num_slots"], -1)
        slots = self._layer("layers.0.", 0, np.empty((0, WIDTH)), slots)
        slots = slots[::-1] if self.mistake == "slots in another order" else slots
        slots = slots if self.mistake == "no norm of the target" else self._norm(slots, "norm")
        return slots @ self._of("lm_head.weight" if "lm_head.weight" in self.tensors else "output").T

    def _attended(self, x: np.ndarray) -> np.ndarray:
        """Return the output of the attention at the last position: [width]."""
        inner, places, name = self._norm(x, "context.input_layernorm"), np.arange(len(x)), "context.self_attn."
        query, key, value = (inner @ self._of(f"{name}{part}_proj.weight").T for part in "qkv")
        query, key = (self._heads(part, places, f"{name}{of}_norm") for part, of in ((query, "q"), (key, "k")))
        value = value.reshape(len(x), -1, DEPTH)
        return self._of(f"{name}o_proj.weight") @ self._weighted(query[-1], key, value)


def reference_of(target: Path, variant: str, mistake: str = "") -> SlotReference:
    """Return the reference of a head of random weights for the target in a folder."""
    config, stored = CONFIG | VARIANTS[variant], load_file(target / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    ends = {"embedding": table, "output": table, "norm.weight": stored["model.norm.weight"]}
    return SlotReference(config, slot_tensors(config), ends, mistake)


MISTAKES = (
    "tap off by one",
    "stale features",
    "shifted by one",
    "no embedding",
    "no norm of the hidden states",
    "no norm before the slots",
    "no norm of the target",
    "slots in another order",
    "the block is causal",
)


def exact_slots(folder: Path) -> tuple[Path, Path]:
    """Write a target whose next token follows from the last one, and a head that drafts its next SLOTS tokens, to
    `folder`/cycled and `folder`/slots; to `folder`/states a head that does so from the last hidden state alone.

    The target writes the tokens of a cycle. Their codes are the corners of a circle in the dimensions 0 and 1, and slot
    i turns the code of the last token by i steps.
    """
    target, weights = silent_target(folder, "cycled")
    angles = 2 * np.pi * np.arange(VOCAB) / CYCLE
    codes = np.zeros((VOCAB, WIDTH), np.float32)
    codes[:, 0], codes[:, 1] = np.cos(angles), np.sin(angles)
    output = np.zeros_like(codes)
    output[:CYCLE] = np.roll(codes[:CYCLE], 1, 0) * 400  # the row of the token that follows another has its code
    save_file(weights | {"model.embed_tokens.weight": codes, "lm_head.weight": output}, target / "model.safetensors")
    head = {name: np.zeros_like(value) for name, value in slot_tensors(CONFIG).items()}
    head = {name: np.ones_like(value) if "norm" in name else value for name, value in head.items()}
    for slot in range(SLOTS):
        head["slots.weight"][slot * WIDTH : slot * WIDTH + 2, :2] = _turn(slot)
    reads_state = np.zeros_like(head["fc.weight"])
    head["fc.weight"][:2, :2] = np.eye(2)
    reads_state[:2, -WIDTH : 2 - WIDTH] = _turn(1)
    write_folder(folder / "states", CONFIG, head | {"fc.weight": reads_state})
    return target, write_folder(folder / "slots", CONFIG, head)


def exact_states(folder: Path) -> tuple[Path, Path]:
    """Write the same files; return the target and the head that reads hidden states."""
    return exact_slots(folder)[0], folder / "states"


def _turn(steps: int) -> np.ndarray:
    angle = 2 * np.pi * steps / CYCLE
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


CYCLE = 16
