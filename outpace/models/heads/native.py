"""EAGLE-3 heads on the native kernels: a model of one layer, and a model without layers that computes `fc`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.core.kernels import kernels
from outpace.models.heads.config import HeadConfig, draft_ids
from outpace.models.heads.eagle3 import EagleModel, FeatureSession, rms_norm
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.native.binding import NativeOptions, check_supported, read_formats
from outpace.models.llama.native.runtime import NativeLlama, NativeSession, host_floats
from outpace.models.llama.native.weights import EmbeddingAndHead, Fetch, Packing, load_layer, matrix_of_rows


class NativeFeatureSession(FeatureSession, NativeSession):
    """A native session with features."""


class NativeEagle(EagleModel, NativeLlama):
    """An EAGLE-3 head for a native target."""

    session_type = NativeFeatureSession

    def __init__(
        self,
        head: HeadConfig,
        layer: Any,
        ends: EmbeddingAndHead,
        fc: Any,
        norms: Mapping[str, np.ndarray],
        options: NativeOptions,
    ) -> None:
        """`layer` and `fc` are packed for the kernels. `norms`: those outside of the layer, by name, and fc's bias."""
        super().__init__(head.layer, [layer], ends, options)
        self.head, self._norms, self._fc = head, norms, fc
        self._products: dict[int, Any] = {}  # by number of threads

    @classmethod
    def from_files(
        cls, files: HeadFiles, head: HeadConfig, target: NativeLlama | None, options: NativeOptions
    ) -> NativeEagle:
        """Build the head; an embedding or output layer that the file lacks is shared with the target. Without a target
        the file must have both."""
        check_supported(kernels, head.layer)
        packing = Packing(kernels, options.threads or 1)
        fetch = Fetch(lambda name: files.weight(name.removeprefix("model.")), read_formats(kernels), options.weights)
        shared, kept = target.ends if target else None, None
        embedding, output = (shared.embedding, shared.head) if shared else (None, None)
        if "embed_tokens.weight" in files:
            embedding = matrix_of_rows(packing, fetch, "embed_tokens.weight")
        if "lm_head.weight" in files:
            ids = draft_ids(files, head)
            order = None if ids is None else np.argsort(ids)
            output = matrix_of_rows(packing, fetch, "lm_head.weight", order)
            kept = None if ids is None else ids[order]
        norms = {name: files.array(f"{name}.weight") for name in _norm_names(head)}
        if head.has_fc_bias:
            norms["fc.bias"] = files.array("fc.bias")
        ends = EmbeddingAndHead(embedding, files.array("norm.weight"), output, kept)
        fc = matrix_of_rows(packing, fetch, "fc.weight")
        model = cls(head, load_layer(packing, head.layer, 0, fetch), ends, fc, norms, options)
        model.precision, model.notice = fetch.precision, fetch.notice
        return model

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        rows = host_floats(hidden).swapaxes(0, 1)  # [rows, taps, target's width]
        eps = self.config.rms_norm_eps
        if self.head.fc_norm:
            scales = np.stack([self._norms[f"fc_norm.{tap}"] for tap in range(len(self.head.taps))])
            rows = rms_norm(rows, scales, eps)
        joined = np.ascontiguousarray(rows.reshape(len(rows), -1), np.float32)
        out = np.empty((len(joined), self.config.hidden_size), np.float32)
        if len(joined):
            self._product().project(joined, out)
        return out + self._norms["fc.bias"] if self.head.has_fc_bias else out

    def norm_feature(self, features: np.ndarray) -> np.ndarray:
        return rms_norm(features, self._norms["layers.0.hidden_norm"], self.config.rms_norm_eps)

    def norm_output(self, outputs: np.ndarray) -> np.ndarray:
        return rms_norm(outputs, self.ends.norm, self.config.rms_norm_eps)

    def limit_window(self, tokens: int) -> None:
        [layer] = self._layers
        layer.window = min(layer.window or tokens, tokens)

    def _product(self) -> Any:
        """Return a kernels' model that computes `fc`, as its output layer, with this thread's number of threads."""
        threads = getattr(self._share, "threads", self._threads)
        if threads not in self._products:
            width, norm = self._fc.inputs, self._norms.get("input_norm", np.zeros(0, np.float32))
            config, name = self.config, self.options.instruction_set
            self._products[threads] = self.kernels.Model(
                self.heads, width, 0, config.rms_norm_eps, [], self._fc, norm, self._fc, name, threads
            )
        return self._products[threads]


def _norm_names(head: HeadConfig) -> list[str]:
    """List the norms outside of the layer."""
    each = [f"fc_norm.{tap}" for tap in range(len(head.taps))] if head.fc_norm else []
    before = ["input_norm"] if head.norm_before_fc else []
    return [*each, *before, *(["layers.0.hidden_norm"] if head.norm_before_residual else [])]
