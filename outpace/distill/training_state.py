"""Saves and loads a training's state: trained weights and the optimizer's two moments, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.atomic_write import write_atomically

FILE = "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Write the state; UserError if that fails, which keeps the last checkpoint."""
    from safetensors.torch import save_file

    tensors = {f"weight {name}": value.detach() for name, value in trained.items()}
    for moment in MOMENTS:
        for name, value in trained.items():
            tensors[f"{moment} {name}"] = optimizer.state[value].get(moment, torch.zeros_like(value))
    metadata = {"progress": json.dumps(progress)}
    write_atomically(
        folder / FILE, lambda part: save_file(tensors, part, metadata), "the checkpoint before it stays good"
    )


def load(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the saved weights and moments; return the progress, or None without a checkpoint. Raises as `check`."""
    progress = check(folder, {name: tuple(value.shape) for name, value in trained.items()})
    if progress is None:
        return None
    from safetensors.torch import load_file

    tensors = load_file(folder / FILE)
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(tensors[f"weight {name}"])
            moments = {moment: tensors[f"{moment} {name}"].to(value.device) for moment in MOMENTS}
            step = torch.tensor(float(progress["step"]), device=value.device)  # the fused kernel reads it there
            optimizer.state[value].update(step=step, **moments)
    return progress


def check(folder: Path, trained: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Return the saved progress, or None without a checkpoint.

    Raises UserError for a checkpoint that is torn, or whose tensors do not have the shapes in `trained`.
    """
    from safetensors import safe_open

    file = folder / FILE
    if not file.exists():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:
            progress: dict[str, Any] = json.loads(opened.metadata()["progress"])
            names = [name for name in opened.keys() if name.startswith("weight ")]  # noqa: SIM118
            saved = {name.removeprefix("weight "): opened.get_slice(name).get_shape() for name in names}
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} is not a whole checkpoint ({error}); remove it to start anew") from error
    own = {name: list(shape) for name, shape in trained.items()}
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            shapes = f"{saved.get(name, 'missing')} in it and {own.get(name, 'missing')} in this draft"
            raise UserError(f"{file} is a checkpoint of another shape: {name} is {shapes}; choose another folder")
    return progress


def read_curve(file: Path) -> list[dict[str, Any]]:
    """Read the points of a learning curve; none if there was no training."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.strip()]
