"""A training on disk: trained weights and the optimizer's two moments in one safetensors file, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError

FILE = "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Writes the state under another name and renames it; UserError where the disk refuses, the last one stays good."""
    from safetensors.torch import save_file

    tensors = {f"weight {name}": value.detach() for name, value in trained.items()}
    for name, value in trained.items():
        for moment in MOMENTS:
            tensors[f"{moment} {name}"] = optimizer.state[value].get(moment, torch.zeros_like(value))
    file = folder / FILE
    part = folder / f".{FILE}.part"
    try:
        save_file(tensors, part, {"progress": json.dumps(state)})
        part.rename(file)
    except Exception as error:  # safetensors has an error class of its own
        part.unlink(missing_ok=True)
        raise UserError(f"{file} cannot be written ({error}); the checkpoint before it stays good") from error


def load(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Puts the saved weights and moments in place; the progress, or None where nothing is saved."""
    check(folder, {name: tuple(value.shape) for name, value in trained.items()})
    file = folder / FILE
    if not file.exists():
        return None
    with _opened(file) as opened:
        progress: dict[str, Any] = json.loads(opened.metadata()["progress"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(tensors[f"weight {name}"])
            moments = {moment: tensors[f"{moment} {name}"].to(value.device) for moment in MOMENTS}
            optimizer.state[value].update(step=torch.tensor(float(progress["step"])), **moments)
    return progress


def check(folder: Path, trained: Mapping[str, Sequence[int]]) -> None:
    """UserError where there is a checkpoint that is torn, or of other tensors than `trained` (their shapes): names the
    first that differs, with both shapes."""
    file = folder / FILE
    if not file.exists():
        return
    with _opened(file) as opened:
        saved = [name for name in opened.keys() if name.startswith("weight ")]  # noqa: SIM118
        there = {name.removeprefix("weight "): opened.get_slice(name).get_shape() for name in saved}
    here = {name: list(shape) for name, shape in trained.items()}
    for name in sorted(set(here) | set(there)):
        if here.get(name) != there.get(name):
            shapes = f"{there.get(name) or 'not there'} in it and {here.get(name) or 'not there'} in this draft"
            raise UserError(f"{file} is a checkpoint of another shape: {name} is {shapes}; choose another folder")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} is not a whole checkpoint ({error}); remove it to start anew") from error


def has_point(file: Path, step: int) -> bool:
    """Whether the learning curve ends with this step's point."""
    lines = file.read_text().splitlines() if file.exists() else []
    return bool(lines) and json.loads(lines[-1])["step"] == step


def cut_curve(file: Path, step: int) -> None:
    """Drops what a run wrote after the checkpoint that it goes back to."""
    if not file.exists():
        return
    lines = [line for line in file.read_text().splitlines() if line.strip() and json.loads(line)["step"] <= step]
    file.write_text("".join(f"{line}\n" for line in lines))
