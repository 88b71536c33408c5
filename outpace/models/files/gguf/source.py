"""A GGUF file read where it lies: what a checkpoint's folder offers, without a copy of the weights in the cache.

Norms and biases come as arrays, matrices as the file's own blocks, which whoever wants floats dequantises.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.config import GgufModel, read_model
from outpace.models.files.gguf.convert import write_tokenizer
from outpace.models.files.gguf.header import GgufHeader
from outpace.models.files.gguf.parts import open_model
from outpace.models.files.gguf.tokenizer import GgufTokenizer
from outpace.models.files.gguf.types import COMMON, type_of
from outpace.models.files.gguf.weights import check_types, half_rotary, read_values, rotary_unit
from outpace.models.llama.config.footprint import StoredSize
from outpace.models.llama.weight_sources import StoredMatrix


class GgufSource(AbstractContextManager["GgufSource"]):
    """An open .gguf file, with the names and shapes of Hugging Face. What was handed out keeps the file mapped."""

    def __init__(self, path: Path | str) -> None:
        """UserError: not a GGUF file, torn, or not a model that runs here."""
        self.path = Path(path)
        with ExitStack() as stack:
            self._header: GgufHeader = stack.enter_context(open_model(self.path))
            self._model: GgufModel = read_model(self._header)
            check_types(self._header, self._model, COMMON)
        special_ids = gguf_tokenizer.special_ids(self.path, self._header.metadata)
        self.config: dict[str, Any] = self._model.settings | special_ids

    def __exit__(self, *error: object) -> None:
        """Nothing is held but the mapping, which goes with the last array."""

    @cached_property
    def tokenizer(self) -> GgufTokenizer:
        """What the header says of it, built when it is asked for; UserError where it is damaged. The header's texts,
        tens of megabytes of a large vocabulary, are not held beside it."""
        built = gguf_tokenizer.build_for(self._header, self._model)
        self._header.forget_front()
        self._header = replace(self._header, metadata={})
        return built

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._model.sources)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """UserError unless every tensor of `shapes` is there with that shape."""
        for name, expected in shapes.items():
            found = self._header.tensors[self._source(name)].shape
            if found != tuple(expected):
                raise UserError(f"{self.path}: tensor {name!r} has shape {list(found)}, expected {list(expected)}")

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; UserError if there is none of that name."""
        return self._header.file_of(self._source(name))

    def held(self, name: str) -> StoredSize:
        """What a tensor takes in the file, and in which format."""
        entry = self._header.tensors[self._source(name)]
        return StoredSize(type_of(entry.kind).name, entry.num_bytes)

    def write_tokenizer(self, folder: Path) -> None:
        """The tokenizer's files of a model folder."""
        write_tokenizer(self.tokenizer, self._model.config.max_positions, folder)

    def array(self, name: str) -> np.ndarray:
        """One tensor as float32. UserError: there is none of that name, or it holds infinities or nan."""
        return read_values(self._header, self._model, self._source(name))

    def tensor(self, name: str) -> torch.Tensor:
        """As `array`."""
        return torch.from_numpy(np.require(self.array(name), requirements="W"))

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """A matrix as the file has it, anything else as float32."""
        source = self._source(name)
        entry = self._header.tensors[source]
        if len(entry.shape) != 2:
            return self.array(name)
        raw = self._header.raw(source).reshape(entry.shape[0], -1)
        order, kind, file = np.arange(len(raw), dtype=np.int32), type_of(entry.kind).name, self._header.file_of(source)
        unit = rotary_unit(self._model, source)
        order = half_rotary(order, len(raw) // unit) if unit > 1 else order
        read, forget = partial(self.array, name), partial(self._header.forget, source)
        return StoredMatrix(file, source, kind, raw, order, entry.shape[1], read, forget)

    def _source(self, name: str) -> str:
        if name not in self._model.sources:
            raise UserError(f"{self.path} holds no tensor {name!r}")
        return self._model.sources[name]
