"""Trained heads by torch, on the target's device and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.core.logits import SparseLogits
from outpace.models.base import Part
from outpace.models.heads.config import JOINED, HeadConfig
from outpace.models.heads.dflash import BlockModel, BlockSession, Markov
from outpace.models.heads.eagle3 import EagleModel, FeatureSession, JoinedModel, rms_norm
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import draft_ids
from outpace.models.heads.specformer import SlotModel, SpecFormerModel, context_part, slots_part
from outpace.models.llama.torch.attention import SessionRows, WindowView
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.session import LlamaSession
from outpace.models.llama.torch.weights import FetchTensor, Normed, load_head, load_keys_and_values, load_layer
from outpace.models.llama.weight_sources import split_fused

if TYPE_CHECKING:
    from typing_extensions import Self


class TorchFeatureSession(FeatureSession, LlamaSession):
    """A session of the torch runtime with features."""


class TorchBlockSession(BlockSession, LlamaSession):
    """A session of the torch runtime of a head that drafts blocks."""


class TorchHead(Llama):
    """A head for a target that runs by torch. It has no exact mode, because drafts do not change the text."""

    def __init__(
        self,
        files: HeadFiles,
        head: HeadConfig,
        fetch: FetchTensor,
        ids: Tensor | None,
        kv_dtype: str,
    ) -> None:
        """`ids` [rows]: the tokens of a reduced output layer's rows."""
        embedding = fetch("embed_tokens.weight")
        layers = [load_layer(head.layers, number, fetch) for number in range(head.layers.num_layers)]
        output = load_head(head.layers, embedding, None, fetch)
        super().__init__(head.layers, layers, embedding, output, False, ids, kv_dtype)
        self.head = head
        self.own: Mapping[str, Tensor] = {
            name: fetch(name)
            for name in (*files.tensors, *(["target_norm.weight"] if head.kind in JOINED else []))
            if name.startswith(("fc", "input_norm", "mask_hidden")) or name.endswith("norm.weight")
        }

    @classmethod
    def from_files(
        cls,
        files: HeadFiles,
        head: HeadConfig,
        of_target: Callable[[str], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str,
    ) -> Self:
        """Build the head; `of_target` returns the target's weights by name: its final norm (target_norm.weight), and
        its embedding and output layer for files that lack them."""

        def fetch(name: str) -> Tensor:
            name = name.removeprefix("model.")
            if name in files:
                found = torch.from_numpy(np.array(files.array(name)))
            elif name in ("norm.weight", "layers.0.input_layernorm.weight"):  # EAGLE-1: a factor of 1 in `load_layer`
                found = torch.full((head.layers.hidden_size,), head.layers.hidden_size**-0.5)
            else:
                found = of_target(name)
            return found.to(device=device, dtype=dtype)

        ids = draft_ids(files, head) if "lm_head.weight" in files else None
        tokens = None if ids is None else torch.from_numpy(ids).to(device)
        return cls(files, head, split_fused(head.layers, fetch), tokens, kv_dtype)

    def normed_taps(self, hidden: Tensor) -> Tensor:
        rows = self.received(hidden).transpose(0, 1)  # [rows, taps, width]
        if self.head.fc_norm:
            scales = torch.stack([self.own[f"fc_norm.{tap}.weight"] for tap in range(len(self.head.taps))])
            rows = rms_norm(rows, scales, self.config.rms_norm_eps)
        return rows.flatten(1)

    @torch.inference_mode()
    def fuse(self, hidden: Tensor) -> Tensor:
        joined = self.normed_taps(hidden)
        if self.head.norm_before_fc:
            joined = rms_norm(joined, self.own["input_norm.weight"], self.config.rms_norm_eps)
        return self.multiply(joined)

    def received(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.device, self.dtype)

    def multiply(self, joined: Tensor) -> Tensor:
        return F.linear(joined, self.own["fc.weight"], self.own.get("fc.bias"))

    def limit_window(self, tokens: int) -> None:
        windows = [min(self.config.window(layer) or tokens, tokens) for layer in range(self.num_layers)]
        self.config, self._windows = replace(self.config, windows=tuple(windows)), {*windows}

    def score_sparse_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[SparseLogits, Any]:
        scored = self._score_hidden(forest, layers)
        return SparseLogits(scored.logits, None, scored.logits.shape[-1]), scored.hidden


class TorchEagle(EagleModel, TorchHead):
    """An EAGLE-3 or P-EAGLE head for a target that runs by torch."""

    session_type = TorchFeatureSession

    def mask_features(self, count: int) -> Tensor:
        return self.fuse(self.own["mask_hidden"].view(len(self.head.taps), 1, -1)).expand(count, -1)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Store the embeddings for the first layer; its residual starts from the features, which replace these
        zeros."""
        self._embedded = super()._embed(tokens)
        return torch.zeros_like(self._embedded)

    def _qkv_product(self, number: int, x: Tensor) -> Tensor:
        """Project the first layer's normed embeddings and features, side by side, to queries, keys and values."""
        if number:
            return super()._qkv_product(number, x)
        normed = self._layers[0].qkv
        both = torch.cat(
            [self._norm(self._embedded, None), self._norm(x, None) if self.config.norms_features else x], -1
        )
        return self._apply(normed.linear, both if normed.norm is None else (both * normed.norm).to(x.dtype))


class TorchJoined(JoinedModel, TorchHead):
    """An EAGLE-1 head, or an MTP layer, for a target that runs by torch."""

    session_type = TorchFeatureSession

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self._embed(to_device(tokens, np.int64, self.device))

    def _qkv_product(self, number: int, x: Tensor) -> Tensor:
        if number or self.config.norms_features:
            return super()._qkv_product(number, x)
        return self._apply(self._layers[0].qkv.linear, x)

    def _norm_output(self, x: Tensor) -> Tensor:
        return super()._norm_output(x) if "norm.weight" in self.own else x


class TorchSlots(SlotModel, TorchHead):
    """The layer across SpecFormer's slots, for a target that runs by torch."""

    session_type = TorchBlockSession


class TorchSpecFormer(SpecFormerModel, TorchJoined):
    """A SpecFormer head for a target that runs by torch."""

    slots: TorchSlots
    slots_type = TorchSlots

    @classmethod
    def from_files(cls, files: HeadFiles, head: HeadConfig, of_target: Callable[[str], Tensor], *others: Any) -> Self:
        model = super().from_files(*context_part(files, head), of_target, *others)
        norm = of_target("target_norm.weight").float().cpu()
        model.slots = cls.slots_type.from_files(*slots_part(files, head, norm), of_target, *others)
        return model

    @property
    def weight_bytes(self) -> int:
        fcs = [model.own["fc.weight"] for model in (self, self.slots)]
        layer = super().weight_bytes - self.config.vocab_size * self.config.hidden_size * self.dtype.itemsize
        return layer + sum(one.numel() * one.element_size() for one in fcs) + self.slots.weight_bytes


class TorchBlock(BlockModel, TorchHead):
    """A DFlash or DSpark head for a target that runs by torch."""

    session_type = TorchBlockSession

    def __init__(self, files: HeadFiles, head: HeadConfig, fetch: FetchTensor, *others: Any) -> None:
        super().__init__(files, head, fetch, *others)
        self.markov, norm = Markov.from_files(files, head), fetch("hidden_norm.weight")
        self._storing = [load_keys_and_values(head.layers, n, norm, fetch) for n in range(self.num_layers)]
        self._is_causal = [*head.causal]

    @torch.inference_mode()
    def store_features(self, parts: Sequence[Part]) -> None:
        for part in parts:
            rows = SessionRows(part, 0, self.max_positions - 1, (), self.device)
            factors = self._rope(to_device(rows.positions, np.int64, self.device))
            features = rows.inputs.to(self.device, self.dtype)
            for number, product in enumerate(self._storing):
                self._store(number, rows, self._keys_and_values(number, product, features, factors))

    def _keys_and_values(self, number: int, product: Normed, features: Tensor, factors: Any) -> Tensor:
        """Compute a layer's keys and values of features: [rows, 2 kv_heads, head_dim]"""
        first, layer = self.config.num_heads, self._layers[number]
        both = self._apply_normed(product, features)
        both = both if layer.head_norm is None else self._norm_heads(both, layer.head_norm[first:])
        return self._attention[number].prepare(both, factors[self.config.rotation(number)][:, first:])

    def _view(self, number: int, rows: SessionRows) -> WindowView:
        """Return what a layer's rows see; in causal layers, no later ones of the block."""
        view, count = super()._view(number, rows), rows.rows.stop - rows.rows.start
        if not self._is_causal[number]:
            return view
        later = torch.full((count, count), -torch.inf, dtype=torch.float64, device=self.device).triu(1)
        mask = later.new_zeros(count, count) if view.mask is None else view.mask.clone()
        mask[:, -count:] += later
        return view._replace(mask=mask)
