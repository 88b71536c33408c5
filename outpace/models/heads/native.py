"""Trained heads on the native kernels: a model of the head's layers, and further ones that compute `fc` or store
features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.arrays import kernels
from outpace.models.base import Part
from outpace.models.heads.config import JOINED, HeadConfig
from outpace.models.heads.dflash import BlockModel, BlockSession, Markov
from outpace.models.heads.eagle3 import EagleModel, FeatureSession, JoinedModel, rms_norm
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import draft_ids
from outpace.models.heads.specformer import SlotModel, SpecFormerModel, context_part, slots_part
from outpace.models.llama.native.binding import NativeOptions, check_supported, read_formats
from outpace.models.llama.native.runtime import NativeLlama, NativeSession, host_floats
from outpace.models.llama.native.weights import EmbeddingAndHead, Fetch, Packing, load_layer, matrix_of_rows
from outpace.models.llama.weight_sources import split_fused

if TYPE_CHECKING:
    from typing_extensions import Self


class NativeFeatureSession(FeatureSession, NativeSession):
    """A native session with features."""


class NativeBlockSession(BlockSession, NativeSession):
    """A native session of a head that drafts blocks."""


class NativeHead(NativeLlama):
    """A head for a native target: its layers, and `fc`."""

    def __init__(
        self,
        head: HeadConfig,
        layers: Sequence[Any],
        ends: EmbeddingAndHead,
        fc: Any,
        own: Mapping[str, np.ndarray],
        options: NativeOptions,
    ) -> None:
        """`layers` and `fc` are packed for the kernels. `own`: see `HeadModel`."""
        super().__init__(head.layers, layers, ends, options)
        self.head, self.own, self._fc = head, own, fc
        self._others: dict[tuple[str, int], Any] = {}  # further kernel models, by name and number of threads

    @classmethod
    def from_files(cls, files: HeadFiles, head: HeadConfig, target: NativeLlama | None, options: NativeOptions) -> Self:
        """Build the head; an embedding or output layer that the file lacks is shared with the target. Without a target
        the file must have both."""
        check_supported(kernels, head.layers)
        packing = Packing(kernels, options.threads or 1)
        source = split_fused(head.layers, lambda name: files.weight(name.removeprefix("model.")))
        fetch = Fetch(source, read_formats(kernels), options.weights)
        shared = target.ends if target else None
        embedding, output, kept = (shared.embedding, shared.head, shared.kept) if shared else (None, None, None)
        if "embed_tokens.weight" in files:
            embedding = matrix_of_rows(packing, fetch, "embed_tokens.weight")
        if "lm_head.weight" in files:
            ids = draft_ids(files, head)
            order = None if ids is None else np.argsort(ids)
            output = matrix_of_rows(packing, fetch, "lm_head.weight", order)
            kept = None if ids is None else ids[order]
        own = {name: files.array(name) for name in files.tensors if name in OWN or name.startswith("fc_norm.")}
        if shared and head.kind in JOINED:
            own["target_norm.weight"] = shared.norm
        ends = EmbeddingAndHead(embedding, own.get("norm.weight", np.zeros(0, np.float32)), output, kept)
        layers = [load_layer(packing, head.layers, number, fetch) for number in range(head.layers.num_layers)]
        model = cls(head, layers, ends, matrix_of_rows(packing, fetch, "fc.weight"), own, options)
        model.precision, model.notice = fetch.precision, fetch.notice
        return model

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        return self.multiply(self.normed_taps(hidden))

    def normed_taps(self, hidden: np.ndarray) -> np.ndarray:
        rows = self.received(hidden).swapaxes(0, 1)  # [rows, taps, target's width]
        if self.head.fc_norm:
            scales = np.stack([self.own[f"fc_norm.{tap}.weight"] for tap in range(len(self.head.taps))])
            rows = rms_norm(rows, scales, self.config.rms_norm_eps)
        return rows.reshape(len(rows), rows.shape[1] * rows.shape[2])  # there may be no rows

    def received(self, hidden: Any) -> np.ndarray:
        return host_floats(hidden)

    def multiply(self, joined: np.ndarray) -> np.ndarray:
        joined, out = host_floats(joined), np.empty((len(joined), self._fc.outputs), np.float32)
        if len(joined):
            self._other("fc", self._product).project(joined, out)
        return out + self.own["fc.bias"] if self.head.has_fc_bias else out

    def limit_window(self, tokens: int) -> None:
        for layer in self._layers:
            layer.window = min(layer.window or tokens, tokens)

    def _other(self, name: str, build: Callable[[int], Any]) -> Any:
        """Return the kernel model with this name for the calling thread's number of threads; build it if it is new."""
        key = name, getattr(self._share, "threads", self._threads)
        if key not in self._others:
            self._others[key] = build(key[1])
        return self._others[key]

    def _product(self, threads: int) -> Any:
        """Create a kernel model without layers, whose output layer is `fc`."""
        norm = self.own.get("input_norm.weight", np.zeros(0, np.float32))
        eps, name = self.config.rms_norm_eps, self.options.instruction_set
        return self.kernels.Model(self.heads, self._fc.inputs, 0, eps, [], self._fc, norm, self._fc, name, threads)


class NativeEagle(EagleModel, NativeHead):
    """An EAGLE-3 or P-EAGLE head for a native target."""

    session_type = NativeFeatureSession

    def mask_features(self, count: int) -> np.ndarray:
        hidden = self.own["mask_hidden"].reshape(len(self.head.taps), 1, -1)
        return np.repeat(self.fuse(hidden), count, axis=0)


class NativeJoined(JoinedModel, NativeHead):
    """An EAGLE-1 head, or an MTP layer, for a native target."""

    session_type = NativeFeatureSession

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        rows = np.empty((len(tokens), self.config.hidden_size), np.float32)
        self.ends.embedding.read(np.array(tokens, np.int32), rows)
        return rows


class NativeBlock(BlockModel, NativeHead):
    """A DFlash or DSpark head for a native target."""

    session_type = NativeBlockSession

    @classmethod
    def from_files(cls, files: HeadFiles, head: HeadConfig, target: NativeLlama | None, options: NativeOptions) -> Self:
        model = super().from_files(files, head, target, options)
        model.markov = Markov.from_files(files, head)
        for layer, is_causal in zip(model._layers, head.causal, strict=True):
            layer.is_causal = is_causal
        return model

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        return self.normed("hidden_norm", super().fuse(hidden))

    def store_features(self, parts: Sequence[Part]) -> None:
        forest = self._forest(parts)
        model = self._other("features", self._storing)
        model.forward(*forest.arrays(self.rope_table.table), np.empty((0, model.outputs), np.float32), **forest.extras)

    def _storing(self, threads: int) -> Any:
        """Create a kernel model that stores keys and values of features, which are normed already."""
        return self._with_threads(threads, [layer.to_kv_only() for layer in self._layers])


class NativeSlots(SlotModel, NativeHead):
    """The layer across SpecFormer's slots, for a native target."""

    session_type = NativeBlockSession


class NativeSpecFormer(SpecFormerModel, NativeJoined):
    """A SpecFormer head for a native target."""

    slots: NativeSlots

    @classmethod
    def from_files(cls, files: HeadFiles, head: HeadConfig, target: NativeLlama | None, options: NativeOptions) -> Self:
        assert target is not None
        model = super().from_files(*context_part(files, head), target, options)
        model.slots = NativeSlots.from_files(*slots_part(files, head, target.ends.norm), target, options)
        return model

    @property
    def weight_bytes(self) -> int:
        fcs: int = self._fc.bytes + self.slots._fc.bytes
        return super().weight_bytes - self.ends.head.bytes + fcs + self.slots.weight_bytes


NORMS = ("norm", "input_norm", "hidden_norm", "embed_norm", "layers.0.hidden_norm")
OWN = ("fc.bias", "mask_hidden", *(f"{name}.weight" for name in NORMS))
