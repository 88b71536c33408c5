"""Medusa heads of random weights in every layout, and their forward from the formulas in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import VOCAB, WIDTH, silent_target, write_folder
from safetensors.numpy import load_file, save_file

HEADS, BLOCKS = 3, 2
MEDUSA_CONFIG = {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS, "base_model_name_or_path": "some/target"}


def medusa_tensors(seed: int = 0, vocab: int = VOCAB, width: int = WIDTH) -> dict[str, np.ndarray]:
    random, found = np.random.default_rng(seed + 20), {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            found[f"{head}.{block}.linear.weight"] = random.standard_normal((width, width)) / 8
            found[f"{head}.{block}.linear.bias"] = random.standard_normal(width)
        found[f"{head}.{BLOCKS}.weight"] = random.standard_normal((vocab, width)) / 2
    return {name: one.astype(np.float32) for name, one in found.items()}


def _named(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a file with the name that FasterDecoding's repositories use."""
    path = write_folder(folder, config, tensors)
    (path / "model.safetensors").rename(path / "medusa_lm_head.safetensors")
    return path


def _pickled(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    path = write_folder(folder, config, tensors)
    (path / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(one) for name, one in tensors.items()}, path / "medusa_lm_head.pt")
    return path


def _merged(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write the heads into the files of a fine-tuned target."""
    others = {"model.norm.weight": np.ones(WIDTH, np.float32), "lm_head.weight": np.zeros((VOCAB, WIDTH), np.float32)}
    return write_folder(folder, config, others | {f"medusa_head.{name}": one for name, one in tensors.items()})


def _vllm(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    renamed = {}
    for name, one in tensors.items():
        head, block, *_, kind = name.split(".")
        renamed[f"blocks.{head}.layers.{block}.{kind}" if "linear" in name else f"lm_heads.{head}.weight"] = one
    return write_folder(folder, {"architectures": ["MedusaModel"], "model_type": "medusa"}, renamed)


LAYOUTS = {"named": _named, "single": write_folder, "pickled": _pickled, "merged": _merged, "vllm": _vllm}


def write_medusa(folder: Path, layout: str = "named", **changes: Any) -> Path:
    return LAYOUTS[layout](folder, MEDUSA_CONFIG | changes, medusa_tensors())


def medusa_logits(target: Path, tensors: Mapping[str, np.ndarray], hidden: np.ndarray, mistake: str = "") -> np.ndarray:
    """Return the logits of all heads after a target's hidden state [width]: [heads, vocab]. `mistake`: one of
    MEDUSA_MISTAKES."""
    norm = load_file(target / "model.safetensors")["model.norm.weight"].astype(float)
    state = hidden.astype(float)
    feature = state if mistake == "no norm of the target" else state / np.sqrt((state**2).mean() + 1e-5) * norm
    rows = []
    for head in range(HEADS):
        x = feature
        for block in range(BLOCKS):
            inner = tensors[f"{head}.{block}.linear.weight"].astype(float) @ x + tensors[f"{head}.{block}.linear.bias"]
            x = x * (mistake != "no residual") + inner / (1 + np.exp(-inner))
        rows.append(tensors[f"{head}.{BLOCKS}.weight"].astype(float) @ x)
    return np.array(rows[::-1] if mistake == "heads in another order" else rows)


MEDUSA_MISTAKES = ("no norm of the target", "no residual", "heads in another order")


def exact_medusa(folder: Path) -> tuple[Path, Path]:
    """Write a target whose next token follows from the last one, and heads that draft its next HEADS tokens, to
    `folder`/chained and `folder`/medusa."""
    random = np.random.default_rng(3)
    target, weights = silent_target(folder, "chained")
    codes = random.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    following = random.permutation(VOCAB)
    output = np.zeros_like(codes)
    output[following] = codes * 4  # the row of the token that follows another has its code
    save_file(weights | {"model.embed_tokens.weight": codes, "lm_head.weight": output}, target / "model.safetensors")
    heads, after = {}, following
    for head in range(HEADS):
        after = following[after]
        rows = np.zeros_like(codes)
        rows[after] = codes * 4
        heads[f"{head}.{BLOCKS}.weight"] = rows
        for block in range(BLOCKS):
            heads[f"{head}.{block}.linear.weight"] = np.zeros((WIDTH, WIDTH), np.float32)
            heads[f"{head}.{block}.linear.bias"] = np.zeros(WIDTH, np.float32)
    path = _named(folder / "medusa", MEDUSA_CONFIG, heads)
    return target, path
