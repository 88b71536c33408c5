"""Saves and loads a training's state: trained weights and the optimizer's two moments, written atomically."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.sharded_safetensors import group_by_size, index_json, save_sharded
from outpace.models.files.checkpoint import read_index

STEM = "training"
FILE, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def sizes(trained: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the bytes of each tensor of a checkpoint, from the trained shapes; all tensors are float32."""
    return {f"{kind} {name}": 4 * math.prod(trained[name]) for kind in ("weight", *MOMENTS) for name in trained}


def save(
    folder: Path,
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    part_bytes: int | None = None,
) -> None:
    """Write the state in files of at most `part_bytes`; UserError if that fails, which keeps the last checkpoint."""
    tensors = {f"weight {name}": value.detach() for name, value in trained.items()}
    for moment in MOMENTS:
        for name, value in trained.items():
            tensors[f"{moment} {name}"] = optimizer.state[value].get(moment, torch.zeros_like(value))
    is_one = len(group_by_size({name: value.nbytes for name, value in tensors.items()}, part_bytes)) == 1
    try:
        stem = STEM if is_one else f"{STEM}-{state['step']}"  # two checkpoints exist until the index is renamed
        files = save_sharded(folder, stem, tensors, part_bytes, {"progress": json.dumps(state)})
        if is_one:
            (folder / INDEX).unlink(missing_ok=True)
        else:
            part = folder / f".{INDEX}.part"
            part.write_text(index_json(tensors, files), encoding="utf-8")
            part.rename(folder / INDEX)
        for file in set(folder.glob(f"{STEM}*.safetensors")) - {folder / name for name in files.values()}:
            file.unlink()
    except (UserError, OSError) as error:
        raise UserError(f"{error}; the checkpoint before it stays good") from error


def load(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the saved weights and moments; return the progress, or None without a checkpoint."""
    check(folder, {name: tuple(value.shape) for name, value in trained.items()})
    progress: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        with _opened(file) as opened:
            progress = json.loads(opened.metadata()["progress"])
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if progress is None:
        return None
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(tensors[f"weight {name}"])
            moments = {moment: tensors[f"{moment} {name}"].to(value.device) for moment in MOMENTS}
            step = torch.tensor(float(progress["step"]), device=value.device)  # the fused kernel reads it there
            optimizer.state[value].update(step=step, **moments)
    return progress


def check(folder: Path, trained: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError for a checkpoint that is torn, or whose tensors do not have the shapes in `trained`."""
    saved_shapes: dict[str, Any] = {}
    for file in _files(folder):
        with _opened(file) as opened:
            saved = [name for name in opened.keys() if name.startswith("weight ")]  # noqa: SIM118
            saved_shapes |= {name.removeprefix("weight "): opened.get_slice(name).get_shape() for name in saved}
    own_shapes = {name: list(shape) for name, shape in trained.items()}
    for name in sorted(set(own_shapes) | set(saved_shapes)) if saved_shapes else ():
        if own_shapes.get(name) != saved_shapes.get(name):
            shapes = (
                f"{saved_shapes.get(name) or 'missing'} in it and {own_shapes.get(name) or 'missing'} in this draft"
            )
            raise UserError(f"{file} is a checkpoint of another shape: {name} is {shapes}; choose another folder")


def _files(folder: Path) -> list[Path]:
    """Return the files of the checkpoint, none if there is none."""
    if (folder / INDEX).exists():
        return [folder / name for name in dict.fromkeys(read_index(folder / INDEX).values())]
    return [folder / FILE] if (folder / FILE).exists() else []


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} is not a whole checkpoint ({error}); remove it to start anew") from error


def has_point(file: Path, step: int) -> bool:
    """Whether the learning curve ends with the point of this step."""
    lines = file.read_text().splitlines() if file.exists() else []
    return bool(lines) and json.loads(lines[-1])["step"] == step


def cut_curve(file: Path, step: int) -> None:
    """Remove the points written after the checkpoint of this step."""
    if not file.exists():
        return
    lines = [line for line in file.read_text().splitlines() if line.strip() and json.loads(line)["step"] <= step]
    file.write_text("".join(f"{line}\n" for line in lines))
