"""Turns a GGUF file into a Hugging Face folder, once; later starts find the folder in the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256
from outpace.models.files.cache import made_once
from outpace.models.files.cache_place import new_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.config import read_model
from outpace.models.files.gguf.header import GgufHeader
from outpace.models.files.gguf.parts import open_model, part_files
from outpace.models.files.gguf.tokenizer import GgufTokenizer
from outpace.models.files.gguf.weights import check_types, num_bytes, write_weights
from outpace.models.llama.config.llama_config import llama_config as llama

Progress = Callable[[str, float], None]
FORMAT_VERSION = 2  # part of the folder's name: a change of what is written must raise it
ENDS_READ = 2**20  # bytes at each end of the file that go into its identity
LONGEST_NAME = 100  # characters of the file's own name in the folder's
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def convert(path: Path, cache: Path, progress: Progress = lambda stage, fraction: None) -> Path:
    """The Hugging Face folder for the GGUF file `path`, made under `cache` if it is not there.

    `progress(stage, fraction)` is called while it works, fraction from 0 to 1. Processes that convert the same file
    at once wait for the first. UserError: not a GGUF file, torn, not a model that runs here, or the disk refuses.
    """
    folder = cache / f"{path.stem[:LONGEST_NAME]}-{_identity(path)}-v{FORMAT_VERSION}"

    def make() -> None:
        with open_model(path) as header:
            _write_folder(header, folder, progress)
        progress("done", 1.0)

    made_once(folder, _is_whole, make, lambda: progress("waiting for another conversion", 0.0))
    return folder


def _identity(path: Path) -> str:
    """A short name for the content of this file and its further parts, from size, time and both ends: cheap, however
    large they are."""
    digest = lazy_sha256()
    for part in (file for file in part_files(path) if file == path or file.is_file()):
        try:
            with part.open("rb") as stream:
                status = part.stat()
                digest.update(f"{part.name} {status.st_size} {status.st_mtime_ns}".encode())
                digest.update(stream.read(ENDS_READ))
                stream.seek(max(0, status.st_size - ENDS_READ))
                digest.update(stream.read(ENDS_READ))
        except OSError as error:
            raise UserError(f"{part} cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    """Whether a folder from an earlier conversion is there and nobody has taken files out of it or cut them."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.check_shapes(llama.tensor_shapes(llama.from_dict(checkpoint.config)))
    except UserError:
        return False
    return True


def _write_folder(header: GgufHeader, folder: Path, progress: Progress) -> None:
    progress("reading", 0.0)
    model = read_model(header)
    check_types(header, model)
    tokenizer = gguf_tokenizer.build_for(header, model)
    _check_space(header.path, folder.parent, num_bytes(header, model))
    with new_folder(folder) as temporary:
        _write_json(temporary / "config.json", model.settings | tokenizer.special_ids)
        write_tokenizer(tokenizer, model.config.max_positions, temporary)
        write_weights(header, model, temporary / SINGLE, progress)


def write_tokenizer(tokenizer: GgufTokenizer, max_positions: int, folder: Path) -> None:
    """The tokenizer's files of a model folder."""
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "generation_config.json", {"_from_model_config": True} | tokenizer.special_ids)
    _write_json(folder / "tokenizer_config.json", tokenizer.settings | {"model_max_length": max_positions})


def _check_space(path: Path, folder: Path, needed: int) -> None:
    """Weights that are four bits here take 32 there, so it is told before and not after an hour."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if needed > free:
        told = f"{path} becomes {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
        raise UserError(f"{told}: make room, or name another folder by OUTPACE_CACHE")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
