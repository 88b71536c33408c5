"""Where a model's weights are read from: a folder of safetensors, in 4 bits or not, or a .gguf file where it lies."""

from __future__ import annotations

from pathlib import Path

from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.four_bit_folder import FourBitFolder, is_four_bits
from outpace.models.files.gguf.source import GgufSource


def open_source(path: Path) -> Checkpoint | GgufSource:
    """Both have `path`, `config`, `check_shapes`, `tensor`, and `weight`, which gives a matrix as the file has it."""
    return open_folder(path) if path.is_dir() else GgufSource(path)


def open_folder(path: Path) -> Checkpoint:
    """A folder of safetensors, in 4 bits or not."""
    return FourBitFolder.open(path) if is_four_bits(path) else Checkpoint.open(path)
