"""Loads heads on the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from outpace.core.arrays import kernels, num_cores
from outpace.models.base import Part
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import rms_norm
from outpace.models.heads.reader import draft_ids
from outpace.models.llama.native.binding import NativeOptions, check_supported, read_formats
from outpace.models.llama.native.runtime import NativeLlama, host_floats, load_layer
from outpace.models.llama.native.weights import EmbeddingAndHead, Fetch, Packing, matrix_of_rows
from outpace.models.llama.weight_sources import split_fused

NO_NORM = np.zeros(0, np.float32)


class NativeProduct:
    """A matrix packed for the kernels, as a kernels' model without layers."""

    def __init__(self, matrix: Any, norm: np.ndarray, eps: float, options: NativeOptions) -> None:
        self._matrix, self._norm, self._eps, self._options = matrix, norm, eps, options

    @property
    def bytes(self) -> int:
        return int(self._matrix.bytes)

    @cached_property
    def _model(self) -> Any:
        matrix, eps, options = self._matrix, self._eps, self._options
        none = kernels.Heads(1, 1, 2, "float32", eps)
        ends, threads = (matrix, self._norm, matrix), options.threads or num_cores()
        return kernels.Model(none, matrix.inputs, 0, eps, [], *ends, options.instruction_set, threads)

    def __call__(self, rows: Any) -> np.ndarray:
        rows, out = host_floats(rows), np.empty((len(rows), self._matrix.outputs), np.float32)
        if len(rows):
            self._model.project(rows, out)
        return out


class NativeWeights:
    """See `Weights`. Without a target the files must have all weights."""

    def __init__(self, files: Any, target: NativeLlama | None, options: NativeOptions) -> None:
        self.files, self.target, self._options = files, target, options
        self._packing = Packing(kernels, options.threads or 1)

    def of(self, files: HeadFiles) -> NativeWeights:
        return NativeWeights(files, self.target, self._options)

    def layers(self, head: HeadConfig, takes_inputs: bool = True) -> NativeLlama:
        config, files, target = head.layer_config, self.files, self.target
        check_supported(kernels, config)
        fetch = self._fetch(split_fused(config, lambda name: files.weight(name.removeprefix("model."))))
        embedding, output, kept = (target.ends.embedding, target.ends.head, target.ends.kept) if target else (None,) * 3
        if "embed_tokens.weight" in files:
            embedding = matrix_of_rows(self._packing, fetch, "embed_tokens.weight")
        if "lm_head.weight" in files:
            ids = draft_ids(files, head)
            order = None if ids is None else np.argsort(ids)
            output = matrix_of_rows(self._packing, fetch, "lm_head.weight", order)
            kept = None if ids is None else ids[order]
        norm = files.array("norm.weight") if "norm.weight" in files else NO_NORM
        ends = EmbeddingAndHead(embedding, norm, output, kept)
        loaded = [load_layer(self._packing, config, number, fetch) for number in range(config.num_layers)]
        layers, experts = [layer for layer, _ in loaded], [found for _, found in loaded if found]
        model = NativeLlama(config, layers, ends, self._options, experts)
        model.precision, model.notice = fetch.precision, fetch.notice
        return model

    def storing(self, layers: NativeLlama) -> Callable[[Sequence[Part]], None]:
        norm, eps = self.vector("hidden_norm.weight"), layers.config.rms_norm_eps

        def store(parts: Sequence[Part]) -> None:
            layers.store_inputs([part._replace(inputs=rms_norm(part.inputs, norm, eps)) for part in parts])

        return store

    def product(self, name: str, norm: str = "", eps: float = 1e-6) -> NativeProduct:
        files = self.files
        bias = files.array(f"{name}.bias").tolist() if f"{name}.bias" in files else ()
        matrix = matrix_of_rows(self._packing, self._fetch(files.weight), f"{name}.weight", bias=bias)
        return NativeProduct(matrix, self.vector(norm) if norm else NO_NORM, eps, self._options)

    def vector(self, name: str) -> np.ndarray:
        if name == "target_norm.weight":
            assert self.target is not None
            return self.target.ends.norm
        found: np.ndarray = self.files.array(name)
        return found

    def receive(self, hidden: Any) -> np.ndarray:
        return host_floats(hidden)

    def captured(self, compute: Callable[[Any], Any], shape: tuple[int, ...]) -> Callable[[Any], Any]:
        return compute

    def _fetch(self, weight: Callable[[str], Any]) -> Fetch:
        return Fetch(weight, read_formats(kernels), self._options.weights)
