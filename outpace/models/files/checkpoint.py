"""A model folder: config.json and safetensors files, opened lazily and checked before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.base import UnsupportedModel
from outpace.models.files import reading
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.model_kind import has_text_part, text_config, text_names
from outpace.models.files.reading import check_file, is_there, read_json
from outpace.models.llama.config.footprint import FLOATS, StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes, by type
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_RUNTIME = "`--runtime transformers`"
EMBEDDING, OF_TARGET = "embedding", "target"  # config.json's outpace.embedding where a draft has none of its own


@dataclass
class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An open model folder; `close` (or `with`) lets go of the files, tensors handed out before stay valid."""

    path: Path
    config: dict[str, Any]
    _files: dict[str, Any] = field(default_factory=dict, repr=False)  # tensor name -> open safetensors file
    _shards: dict[str, str] = field(default_factory=dict, repr=False)  # tensor name -> file name
    _stored: dict[str, str] = field(default_factory=dict, repr=False)  # tensor name -> name in the file
    _others: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)  # file name, way -> opened once more
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Opens the folder `path` and reads the headers of its weight files; UserError if one is missing or torn."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        config = read_json(path / "config.json")
        has_more = has_text_part(config)
        config = text_config(config, path / "config.json") if has_more else config
        cls._check_config(path, config)
        checkpoint = cls(path, config)
        try:
            checkpoint._open_files()
            checkpoint._name_tensors(has_more)
            checkpoint._check_layers()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the weight files; calling it twice does nothing."""
        self._files.clear()
        self._others.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._shards)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; UserError if there is none of that name."""
        self._file(name)
        return self.path / self._shards[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from the header alone."""
        return tuple(self._slice(name).get_shape())

    def held(self, name: str) -> StoredSize:
        """A tensor's type, and bytes in the file."""
        part = self._slice(name)
        return StoredSize(part.get_dtype(), prod(part.get_shape()) * WIDTHS.get(part.get_dtype(), 1))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in the type that is stored, mapped from the file.

        UserError: there is none of that name, or it holds infinities or nan, which no sound model does.
        """
        return self._read(name, _as_tensor, is_finite)

    def array(self, name: str) -> np.ndarray:
        """One tensor as float32, without torch: mapped from the file where it holds float32. UserError as `tensor`."""
        return self.raw(name).float32()

    def raw(self, name: str) -> reading.Raw:
        """One tensor as it is stored, without torch, mapped from the file. UserError as `tensor`."""
        return self._read(name, _as_raw, reading.Raw.is_finite)

    def _read(self, name: str, way: Callable[[Checkpoint, str, str], Any], is_sound: Callable[[Any], bool]) -> Any:
        value = self._find(name, way)
        if not is_sound(value):
            raise UserError(f"{self.file_of(name)} is damaged: tensor {name!r} holds values that are not finite")
        return value

    def _find(self, name: str, way: Callable[[Checkpoint, str, str], Any]) -> Any:
        file = self.file_of(name)
        try:
            return way(self, file.name, name)
        except Exception as error:
            raise UserError(f"{file}: tensor {name!r} cannot be read ({error!s:.200})") from error

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """A matrix as the file has it, which nobody has looked into; anything else as `array`."""
        if len(self.shape(name)) != 2 or self.held(name).kind not in FLOATS:
            return self.array(name)
        kind, values = self._mapped(name)
        rows, columns = values.shape
        order, data = np.arange(rows, dtype=np.int32), values.view(np.uint8)
        read, forget = partial(self.array, name), partial(self._forget, name)
        return StoredMatrix(self.file_of(name), name, kind, data, order, columns, read, forget)

    def _mapped(self, name: str) -> reading.Raw:
        """A tensor as it is stored, mapped from the file, which nobody has looked into."""
        found: reading.Raw = self._find(name, _as_raw)
        return found

    def _forget(self, *names: str) -> None:
        """Gives the memory of tensors that were read as arrays back."""
        for name in names:
            _arrays_of(self, self._shards[name]).forget(self._stored[name])

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """UserError unless every tensor of `shapes` is there with that shape and a floating point type."""
        for name, expected in shapes.items():
            part = self._slice(name)
            where = self.path / self._shards[name]
            if tuple(part.get_shape()) != tuple(expected):
                raise UserError(f"{where}: tensor {name!r} has shape {part.get_shape()}, expected {list(expected)}")
            if part.get_dtype() not in WIDTHS:
                allowed = f"allowed are {', '.join(sorted(WIDTHS))}"
                scaled = f"; weights of 8 bits and fewer go with scales, which {OTHER_RUNTIME} may know to apply"
                raise UnsupportedModel(f"{where}: tensor {name!r} has type {part.get_dtype()}, {allowed}{scaled}")

    def once(self, shard: str, way: str, make: Callable[[ExitStack], Any]) -> Any:
        """A file opened in another way than for its header, when that is first asked for."""
        if (shard, way) not in self._others:
            self._others[shard, way] = make(self._stack)
        return self._others[shard, way]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._stored[name])

    def _file(self, name: str) -> Any:
        if name not in self._shards:
            packed = "; it is its target's: load this as that one's draft, or see `outpace distill --unpack`"
            raise UserError(f"{self.path} holds no tensor {name!r}{packed if lacks_embedding(self.config) else ''}")
        if name not in self._files:
            raise RuntimeError(f"{self.path} is closed")
        return self._files[name]

    @staticmethod
    def _check_config(path: Path, config: Mapping[str, Any]) -> None:
        """UnsupportedModel for one that is quantised."""
        for name in ("quantization_config", "compression_config"):
            found = config.get(name)
            if found:
                method = found.get("quant_method") if isinstance(found, Mapping) else found
                said = f"is quantised ({name} {method!r:.50})"
                raise UnsupportedModel(f"{path} {said}: {OTHER_RUNTIME} runs it, this runtime cannot")

    def _open_files(self) -> None:
        if is_there(self.path / SINGLE):
            self._add_file(SINGLE)
            return
        if not is_there(self.path / INDEX):
            raise _without_weights(self.path)
        shards = parts_of(self.path / INDEX)
        for shard in sorted(set(shards.values())):
            self._add_file(shard)
        for name, shard in shards.items():
            if self._shards.get(name) != shard:
                raise UserError(f"{self.path / shard} holds no tensor {name!r}, although {INDEX} says so")

    def _add_file(self, shard: str) -> None:
        from safetensors import safe_open

        file = self.path / shard
        check_file(file)
        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="np"))
            names = list(opened.keys())
        # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        except Exception as error:
            raise UserError(f"{file} is not a whole safetensors file ({error!s:.200})") from error
        for name in names:
            self._files[name], self._shards[name] = opened, shard

    def _name_tensors(self, has_more: bool) -> None:
        """Names as of a language model alone; `has_more`: the files hold other models beside it."""
        self._stored = text_names(self._shards) if has_more else {name: name for name in self._shards}
        self._shards = {name: self._shards[stored] for name, stored in self._stored.items()}
        self._files = {name: self._files[stored] for name, stored in self._stored.items()}

    def _check_layers(self) -> None:
        """Before anybody lists what a config.json announces: each layer has tensors of its own."""
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(self._shards):
            said = f"num_hidden_layers is {layers!r:.50}"
            raise UserError(
                f"{self.path / 'config.json'}: {said}, but the weight files hold {len(self._shards)} tensors"
            )


def _as_tensor(checkpoint: Checkpoint, shard: str, name: str) -> torch.Tensor:
    from safetensors import safe_open

    file = str(checkpoint.path / shard)
    opened = checkpoint.once(shard, "tensors", lambda stack: stack.enter_context(safe_open(file, framework="pt")))
    value: torch.Tensor = opened.get_tensor(checkpoint._stored[name])
    return value


def _as_raw(checkpoint: Checkpoint, shard: str, name: str) -> reading.Raw:
    return _arrays_of(checkpoint, shard).raw(checkpoint._stored[name])


def _arrays_of(checkpoint: Checkpoint, shard: str) -> reading.MappedFile:
    file: reading.MappedFile = checkpoint.once(shard, "arrays", lambda _: reading.MappedFile(checkpoint.path / shard))
    return file


def lacks_embedding(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a draft stored without embeddings, which are its target's (see packed.py)."""
    ours = config.get("outpace")
    return isinstance(ours, Mapping) and ours.get(EMBEDDING) == OF_TARGET


def is_finite(value: torch.Tensor) -> bool:
    """Whether no element is nan or infinite, in one pass and without memory of its own."""
    if not value.is_floating_point() or value.itemsize == 1 or not value.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(value))).all())


def write_checkpoint(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a new model folder at `path`, whole or not at all; UserError if it exists or the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if path.exists():
        raise UserError(f"{path} already exists")
    with new_folder(path) as folder:
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, folder / SINGLE, {"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{path} cannot be written ({error})") from error


def _without_weights(path: Path) -> UserError:
    """The error for a folder without safetensors, by what it holds instead."""
    names = sorted(file.name for file in path.iterdir())
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return UserError(f"{path} holds no {SINGLE}; to run its GGUF file, name the file itself: {path / gguf[0]}")
    if "adapter_config.json" in names:
        advice = f"merge it into its model first, or use {OTHER_RUNTIME}"
        return UnsupportedModel(f"{path} holds an adapter and no model: {advice}")
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        rule = "reading them can run any code and nothing is executed from a file; save the model as safetensors"
        return UserError(f"{path} holds pickled weights only ({pickled[0]}): {rule}")
    return UserError(f"{path} holds neither {SINGLE} nor {INDEX}, only safetensors weights can be read")


def parts_of(file: Path) -> dict[str, str]:
    """The file of each tensor by an index of several weight files; UserError where it makes no sense."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{file} has no weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(
                f"{file}: weight_map names {shard!r:.100} for {name!r:.100}, it must be a file beside the index"
            )
    return shards
