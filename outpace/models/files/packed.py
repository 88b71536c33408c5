"""Packs and unpacks drafts stored without the embeddings, output layer and tokenizer that their target also has.

In a packed draft, config.json says `outpace: {"embedding": "target"}` and model.safetensors holds layers and norms
only. Before loading it is completed with its target's files to a standard folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.cache import DRAFTS, entry_path, identity, make_once, mark_used, new_folder, remove_unused
from outpace.models.files.checkpoint import EMBEDDING, INDEX, OF_TARGET, SINGLE, Checkpoint, lacks_embedding, read_index
from outpace.models.files.find import open_source
from outpace.models.files.gguf.source import GgufSource, is_complete_model
from outpace.models.files.reading import RawTensor, read_json, write_json, write_safetensors
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.options import Progress, silent

TARGET_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json"),
)
USED = (".safetensors", ".json")  # suffixes of files that define a model
FORMAT_VERSION = 2  # part of an unpacked draft's name in the cache


def is_packed(spec: Path | str) -> bool:
    """Return whether this is the folder of a packed draft."""
    try:
        file = Path(spec).expanduser() / "config.json"
        return file.is_file() and lacks_embedding(read_json(file))
    except (OSError, ValueError, RuntimeError):  # not a file name
        return False


def pack(draft: Path, target: Path, out: Path, extra: Sequence[Path] = ()) -> None:
    """Write the draft folder `draft` to `out` without what the folder `target` also holds, plus existing `extra` files.

    Raises UserError if its embeddings differ from the target's, rounded to its own type, or if `out` exists.
    """
    _check_new(out)
    config = read_json(draft / "config.json")
    if lacks_embedding(config):
        raise UserError(f"{draft} is packed already")
    config = {**config, "outpace": {EMBEDDING: OF_TARGET, **(config.get("outpace") or {})}}
    with Checkpoint.open(draft) as small, Checkpoint.open(target) as large:
        _check_compatible(draft, config, target, large.config)
        shapes = tensor_shapes(from_dict(config))
        small.check_shapes(shapes)
        for name in _shared(shapes):
            own = small.raw(name)
            if not np.array_equal(own.float32(), _as_dtype(large, name, own.kind).float32()):
                raise UserError(f"{name} of {draft} is not that of {target}, so it cannot be left out")
        tensors = {name: small.raw(name) for name in shapes if name not in TARGET_TENSORS}
        with new_folder(out) as made:
            _write_model(made, config, tensors)
            for file in (*_others(draft), *extra):
                is_shared = file.name in TOKENIZER_FILES and (target / file.name).is_file()
                if file.is_file() and not (is_shared and file.read_bytes() == (target / file.name).read_bytes()):
                    shutil.copyfile(file, made / file.name)


def unpack(draft: Path, target: Path, out: Path, progress: Progress = silent) -> None:
    """Write the packed draft `draft` to `out` as a standard folder, completed from `target`, a folder or .gguf file.

    Raises UserError if it is not packed, if the target has another width or vocabulary, or if `out` exists. If
    `progress` raises, nothing is left on disk.
    """
    _check_new(out)
    config = read_json(draft / "config.json")
    if not lacks_embedding(config):
        raise UserError(f"{draft} is not packed: it has its own embeddings, and loads as it is")
    ours = {name: value for name, value in config.pop("outpace").items() if name != EMBEDDING}
    config |= {"outpace": ours} if ours else {}
    with Checkpoint.open(draft) as small, open_source(target) as large:
        _check_compatible(draft, config, target, large.config)
        shapes = tensor_shapes(from_dict(config))
        shared = {name: shapes.pop(name) for name in _shared(shapes)}
        small.check_shapes(shapes)
        large.check_shapes(shared)
        tensors = {name: small.raw(name) for name in shapes}
        kind = next(iter(tensors.values())).kind
        for name in shared:
            progress("converting", 0.0)
            tensors[name] = _as_dtype(large, name, kind)
        progress("converting", 0.5)
        with new_folder(out) as made:
            _write_model(made, config, tensors)
            if isinstance(large, GgufSource):
                large.write_tokenizer(made)
            for file in (*(target / name for name in TOKENIZER_FILES), *_others(draft)):
                if file.is_file():
                    shutil.copyfile(file, made / file.name)


def complete_draft(draft: Path, target: Path, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Return the folder of the packed draft completed from `target`, a folder or .gguf file, created once under
    `cache`."""
    config = read_json(draft / "config.json")
    files = [file for file in sorted(draft.iterdir()) if file.suffix in USED]
    with open_source(target) as large:
        _check_compatible(draft, config, target, large.config)
        files += sorted({large.file_of(name) for name in _shared(tensor_shapes(from_dict(config)))})
    own = [target] if target.is_file() else [target / name for name in TOKENIZER_FILES]
    files += [file for file in own if file.is_file()]
    folder = entry_path(f"{DRAFTS}/{identity(files)}-v{FORMAT_VERSION}", cache)
    mark_used(folder)
    progress("converting", 0.0)
    if make_once(folder, is_complete_model, lambda: unpack(draft, target, folder, progress)):
        remove_unused(folder.parent.parent)
    return folder


def _check_compatible(draft: Path, config: Mapping[str, Any], target: Path, other: Mapping[str, Any]) -> None:
    """Raise UserError, naming both, if the target's embeddings cannot serve the draft."""
    own, theirs = from_dict(config), from_dict(other)
    for name in ("hidden_size", "vocab_size", "tie_embeddings"):
        here, there = getattr(own, name), getattr(theirs, name)
        if here != there:
            raise UserError(f"the draft {draft} ({name} {here}) cannot share embeddings with {target} ({name} {there})")


def _shared(shapes: Mapping[str, Any]) -> list[str]:
    return [name for name in TARGET_TENSORS if name in shapes]


def _as_dtype(source: Checkpoint | GgufSource, name: str, kind: str) -> RawTensor:
    found = source.raw(name)
    return found if found.kind == kind else RawTensor.of(found.float32(), kind)


def _others(draft: Path) -> list[Path]:
    """List the draft's files other than configuration and weights."""
    parts = read_index(draft / INDEX).values() if (draft / INDEX).is_file() else ()
    weights = {"config.json", SINGLE, INDEX, *parts}
    return [file for file in sorted(draft.iterdir()) if file.is_file() and file.name not in weights]


def _check_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} already exists")


def _write_model(made: Path, config: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> None:
    write_json(made / "config.json", config)
    kinds = {name: (raw.kind, raw.values.shape) for name, raw in tensors.items()}
    write_safetensors(made / SINGLE, kinds, lambda name: [tensors[name].values])
