"""A draft stored without what its target has as well: embeddings, output layer and tokenizer come from there.

Packed, config.json says `outpace: {"embedding": "target"}` and model.safetensors holds layers and norms alone. It is
made whole with the files of its target, as a standard folder, before anything loads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256
from outpace.models.files import reading
from outpace.models.files.cache import DIGESTS, DRAFTS, Digests, made_once, mark_used, remove_unused
from outpace.models.files.cache_folder import cache_folder, new_folder
from outpace.models.files.checkpoint import (
    EMBEDDING,
    INDEX,
    OF_TARGET,
    SINGLE,
    Checkpoint,
    lacks_embedding,
    parts_of,
)
from outpace.models.files.find import open_source
from outpace.models.files.gguf.source import GgufSource
from outpace.models.files.reading import Raw, read_json
from outpace.models.llama.config.llama_config import from_dict, tensor_shapes
from outpace.models.llama.weight_sources import StoredMatrix
from outpace.models.options import silent

SHARED = ("model.embed_tokens.weight", "lm_head.weight")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
USED = (".safetensors", ".json")  # files that say what a model is
FORMAT_VERSION = 2  # part of an unpacked draft's name in the cache


def is_packed(spec: Path | str) -> bool:
    """Whether this is the folder of a draft that takes its embeddings from its target."""
    try:
        file = Path(spec).expanduser() / "config.json"
        return file.is_file() and lacks_embedding(read_json(file))
    except (OSError, ValueError, RuntimeError):  # no name of a file
        return False


def pack(draft: Path, target: Path, out: Path, extra: Sequence[Path] = ()) -> None:
    """Writes the draft in the folder `draft` to `out`, without what the folder `target` holds as well; `extra` files
    go with it where they are there.

    UserError where its embeddings are not the target's, rounded to its own type, or where `out` is there already.
    """
    _check_new(out)
    config = read_json(draft / "config.json")
    if lacks_embedding(config):
        raise UserError(f"{draft} is packed already")
    config = {**config, "outpace": {EMBEDDING: OF_TARGET, **(config.get("outpace") or {})}}
    with Checkpoint.open(draft) as small, Checkpoint.open(target) as large:
        _check_fit(draft, config, target, large.config)
        shapes = tensor_shapes(from_dict(config))
        small.check_shapes(shapes)
        for name in _shared(shapes):
            own = small.raw(name)
            if not np.array_equal(own.float32(), _typed(large, name, own.kind).float32()):
                raise UserError(f"{name} of {draft} is not that of {target}, so it cannot be left out")
        tensors = {name: small.raw(name) for name in shapes if name not in SHARED}
        with new_folder(out) as made:
            _write(made, config, tensors)
            for file in (*_others(draft), *extra):
                is_there = file.is_file() and not (file.name in TOKENIZER_FILES and _is_same(file, target / file.name))
                if is_there:
                    shutil.copyfile(file, made / file.name)


def unpack(draft: Path, target: Path, out: Path) -> None:
    """Writes the packed draft in the folder `draft` to `out` as a standard folder, whole with what `target` holds.

    UserError where it is not packed, where the target has another width or vocabulary, or where `out` is there already.
    """
    _check_new(out)
    _unpack(draft, target, out)


def _unpack(draft: Path, target: Path, out: Path, progress: Callable[[str, float], None] = silent) -> None:
    """`target` may be a .gguf file. What `progress` raises ends it, and nothing is left."""
    config = read_json(draft / "config.json")
    if not lacks_embedding(config):
        raise UserError(f"{draft} is not packed: it has its own embeddings, and loads as it is")
    ours = {name: value for name, value in config.pop("outpace").items() if name != EMBEDDING}
    config |= {"outpace": ours} if ours else {}
    with Checkpoint.open(draft) as small, open_source(target) as large:
        _check_fit(draft, config, target, large.config)
        shapes = tensor_shapes(from_dict(config))
        shared = {name: shapes.pop(name) for name in _shared(shapes)}
        small.check_shapes(shapes)
        large.check_shapes(shared)
        tensors = {name: small.raw(name) for name in shapes}
        kind = next(iter(tensors.values())).kind
        for name in shared:
            progress("converting", 0.0)
            tensors[name] = _typed(large, name, kind)
        progress("converting", 0.5)
        with new_folder(out) as made:
            _write(made, config, tensors)
            if isinstance(large, GgufSource):
                large.write_tokenizer(made)
            for file in (*(target / name for name in TOKENIZER_FILES), *_others(draft)):
                if file.is_file():
                    shutil.copyfile(file, made / file.name)


def whole(
    draft: Path, target: Path, cache: Path | None = None, progress: Callable[[str, float], None] = silent
) -> Path:
    """The folder of this packed draft with the embeddings of `target`, a folder or a .gguf file, made once under
    `cache`, with `progress(stage, fraction)`."""
    cache = cache or cache_folder()
    folder = cache / DRAFTS / f"{_content(draft, target, cache / DRAFTS / DIGESTS)}-v{FORMAT_VERSION}"
    mark_used(folder)
    progress("converting", 0.0)
    if made_once(folder, _is_whole, lambda: _unpack(draft, target, folder, progress)):
        remove_unused(cache)
    return folder


def _check_fit(draft: Path, config: Mapping[str, Any], target: Path, other: Mapping[str, Any]) -> None:
    """UserError names both where the target's embeddings cannot be the draft's."""
    own, theirs = from_dict(config), from_dict(other)
    for name in ("hidden_size", "vocab_size", "tie_embeddings"):
        here, there = getattr(own, name), getattr(theirs, name)
        if here != there:
            raise UserError(
                f"the draft {draft} ({name} {here}) cannot have the embeddings of the target {target} ({name} {there})"
            )


def _shared(shapes: Mapping[str, Any]) -> list[str]:
    return [name for name in SHARED if name in shapes]


def _typed(source: Checkpoint | GgufSource, name: str, kind: str) -> Raw:
    """A tensor in this type."""
    found = source.raw(name) if isinstance(source, Checkpoint) else None
    return found if found and found.kind == kind else Raw.of(source.array(name), kind)


def _others(draft: Path) -> Iterator[Path]:
    """The files beside configuration and weights, which may lie in parts."""
    parts = set(parts_of(draft / INDEX).values()) if (draft / INDEX).is_file() else set()
    weights = {"config.json", SINGLE, INDEX, *parts}
    return (file for file in sorted(draft.iterdir()) if file.is_file() and file.name not in weights)


def _is_same(file: Path, other: Path) -> bool:
    return other.is_file() and file.read_bytes() == other.read_bytes()


def _check_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} already exists")


def _write(made: Path, config: Mapping[str, Any], tensors: Mapping[str, Raw]) -> None:
    (made / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    try:
        reading.write(made / SINGLE, tensors)
    except OSError as error:
        raise UserError(f"{made / SINGLE} cannot be written ({error})") from error


def _is_whole(folder: Path) -> bool:
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.check_shapes(tensor_shapes(from_dict(checkpoint.config)))
    except UserError:
        return False
    return True


def _content(draft: Path, target: Path, memory: Path) -> str:
    """A short name for all that the whole draft is made of: what the files hold, wherever they lie."""
    config = read_json(draft / "config.json")
    digest = lazy_sha256()
    with open_source(target) as large, Digests(memory, memory.parent.parent) as digests:
        _check_fit(draft, config, target, large.config)
        for file in sorted(draft.iterdir()):
            if file.suffix in USED:
                digest.update(f"draft {file.name} {digests.of_file(file)}\n".encode())
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                digest.update(f"target {name} {digests.of_file(target / name)}\n".encode())
        if isinstance(large, GgufSource):
            held = digests.of_part(target, "tokenizer", partial(_hash_tokenizer, large))
            digest.update(f"target tokenizer {held}\n".encode())
        for name in _shared(tensor_shapes(from_dict(config))):
            held = digests.of_part(large.file_of(name), name, partial(_hash, large, name))
            digest.update(f"target {name} {held}\n".encode())
    return digest.hexdigest()[:16]


def _hash_tokenizer(source: GgufSource) -> str:
    """Of all that the tokenizer's files would hold."""
    built = source.tokenizer
    return lazy_sha256(f"{built.tokenizer.to_str()} {built.settings} {built.special_ids}".encode()).hexdigest()


def _hash(checkpoint: Checkpoint | GgufSource, name: str) -> str:
    """Of a tensor's type, shape and values, in the blocks that the file has."""
    weight = checkpoint.raw(name) if isinstance(checkpoint, Checkpoint) else checkpoint.weight(name)
    if isinstance(weight, StoredMatrix):
        digest = lazy_sha256(f"{weight.kind} {weight.data.shape} {weight.columns}\n".encode())
        digest.update(np.ascontiguousarray(weight.data).data)
        return digest.hexdigest()
    kind, values = weight if isinstance(weight, Raw) else Raw("F32", weight)
    dtype = "bfloat16" if kind == "BF16" else f"float{kind[1:]}"
    digest = lazy_sha256(f"torch.{dtype} {values.shape}\n".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
