"""A training on disk: trained weights and the optimizer's two moments as safetensors, whole or not there."""

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
from outpace.distill.parts import index_of, save_parts, shared_out
from outpace.models.files.checkpoint import read_index

STEM = "training"
FILE, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def sizes(trained: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Bytes of each tensor of a checkpoint, by the shapes of what is trained; all of it is float32."""
    return {f"{kind} {name}": 4 * math.prod(trained[name]) for kind in ("weight", *MOMENTS) for name in trained}


def save(
    folder: Path,
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    part_bytes: int | None = None,
) -> None:
    """Writes the state, in files of at most `part_bytes`; UserError where the disk refuses, the last one stays good."""
    tensors = {f"weight {name}": value.detach() for name, value in trained.items()}
    for moment in MOMENTS:
        for name, value in trained.items():
            tensors[f"{moment} {name}"] = optimizer.state[value].get(moment, torch.zeros_like(value))
    is_one = len(shared_out({name: value.nbytes for name, value in tensors.items()}, part_bytes)) == 1
    try:
        stem = STEM if is_one else f"{STEM}-{state['step']}"  # parts of two checkpoints are there until the index says
        placed = save_parts(folder, stem, tensors, part_bytes, {"progress": json.dumps(state)})
        if is_one:
            (folder / INDEX).unlink(missing_ok=True)
        else:
            part = folder / f".{INDEX}.part"
            part.write_text(index_of(tensors, placed), encoding="utf-8")
            part.rename(folder / INDEX)
        for file in set(folder.glob(f"{STEM}*.safetensors")) - {folder / name for name in placed.values()}:
            file.unlink()
    except (UserError, OSError) as error:
        raise UserError(f"{error}; the checkpoint before it stays good") from error


def load(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Puts the saved weights and moments in place; the progress, or None where nothing is saved."""
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
            step = torch.tensor(float(progress["step"]), device=value.device)  # where the fused kernel reads it
            optimizer.state[value].update(step=step, **moments)
    return progress


def check(folder: Path, trained: Mapping[str, Sequence[int]]) -> None:
    """UserError where there is a checkpoint that is torn, or of other tensors than `trained` (their shapes): names the
    first that differs, with both shapes."""
    there: dict[str, Any] = {}
    for file in _files(folder):
        with _opened(file) as opened:
            saved = [name for name in opened.keys() if name.startswith("weight ")]  # noqa: SIM118
            there |= {name.removeprefix("weight "): opened.get_slice(name).get_shape() for name in saved}
    here = {name: list(shape) for name, shape in trained.items()}
    for name in sorted(set(here) | set(there)) if there else ():
        if here.get(name) != there.get(name):
            shapes = f"{there.get(name) or 'not there'} in it and {here.get(name) or 'not there'} in this draft"
            raise UserError(f"{file} is a checkpoint of another shape: {name} is {shapes}; choose another folder")


def _files(folder: Path) -> list[Path]:
    """The files of the checkpoint, none where there is none."""
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
    """Whether the learning curve ends with this step's point."""
    lines = file.read_text().splitlines() if file.exists() else []
    return bool(lines) and json.loads(lines[-1])["step"] == step


def cut_curve(file: Path, step: int) -> None:
    """Drops what a run wrote after the checkpoint that it goes back to."""
    if not file.exists():
        return
    lines = [line for line in file.read_text().splitlines() if line.strip() and json.loads(line)["step"] <= step]
    file.write_text("".join(f"{line}\n" for line in lines))
