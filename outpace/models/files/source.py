"""Where a model's weights are read from: a folder of safetensors, or a .gguf file where it lies."""

from __future__ import annotations

from pathlib import Path

from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.gguf.source import GgufSource


def open_source(path: Path) -> Checkpoint | GgufSource:
    """Both have `path`, `config`, `check_shapes`, `tensor`, and `weight`, which gives a matrix as the file has it."""
    return Checkpoint.open(path) if path.is_dir() else GgufSource(path)
