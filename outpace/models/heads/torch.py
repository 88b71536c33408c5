"""EAGLE-3 heads by torch, on the target's device and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.logits import SparseLogits
from outpace.models.base import Part
from outpace.models.heads.config import HeadConfig, draft_ids
from outpace.models.heads.eagle3 import EagleModel, FeatureSession, rms_norm
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.session import LlamaSession
from outpace.models.llama.torch.weights import LayerWeights, Normed, load_head, load_layer


class TorchFeatureSession(FeatureSession, LlamaSession):
    """A session of the torch runtime with features."""


class TorchEagle(EagleModel, Llama):
    """An EAGLE-3 head for a target that runs by torch. Drafts do not change the text: it needs no exact mode."""

    session_type = TorchFeatureSession

    def __init__(
        self,
        head: HeadConfig,
        layer: LayerWeights,
        embedding: Tensor,
        output: Normed,
        ids: Tensor | None,
        own: dict[str, Tensor],
        kv_dtype: str,
    ) -> None:
        """`own`: fc's weight and bias, and the norms outside of the layer, by name."""
        super().__init__(head.layer, [layer], embedding, output, False, ids, kv_dtype)
        self.head, self._own = head, own
        self._embedded = embedding[:0]

    @classmethod
    def from_files(
        cls,
        files: HeadFiles,
        head: HeadConfig,
        embedding: Callable[[], Tensor],
        output: Callable[[], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str,
    ) -> TorchEagle:
        """Build the head; `embedding` and `output` return the target's layers, for files that lack them."""

        def fetch(name: str) -> Tensor:
            name = name.removeprefix("model.")
            if name == "lm_head.weight" and name not in files:
                return output().to(device=device, dtype=dtype)
            return torch.from_numpy(np.array(files.array(name))).to(device=device, dtype=dtype)

        has_own = "embed_tokens.weight" in files
        table = fetch("embed_tokens.weight") if has_own else embedding().to(device=device, dtype=dtype)
        ids = draft_ids(files, head) if "lm_head.weight" in files else None
        tokens = None if ids is None else torch.from_numpy(ids).to(device)
        names = [
            name
            for name in files.tensors
            if name.startswith(("fc", "input_norm")) or name in ("norm.weight", "layers.0.hidden_norm.weight")
        ]
        own = {name: fetch(name) for name in names}
        layer = load_layer(head.layer, 0, fetch)
        return cls(head, layer, table, load_head(head.layer, table, None, fetch), tokens, own, kv_dtype)

    @torch.inference_mode()
    def fuse(self, hidden: Tensor) -> Tensor:
        rows, eps = hidden.transpose(0, 1).to(self.device, self.dtype), self.config.rms_norm_eps  # [rows, taps, width]
        if self.head.fc_norm:
            scales = torch.stack([self._own[f"fc_norm.{tap}.weight"] for tap in range(len(self.head.taps))])
            rows = rms_norm(rows, scales, eps)
        joined = rows.flatten(1)
        if self.head.norm_before_fc:
            joined = rms_norm(joined, self._own["input_norm.weight"], eps)
        return F.linear(joined, self._own["fc.weight"], self._own.get("fc.bias"))

    @torch.inference_mode()
    def norm_feature(self, features: Tensor) -> Tensor:
        return rms_norm(features, self._own["layers.0.hidden_norm.weight"], self.config.rms_norm_eps)

    @torch.inference_mode()
    def norm_output(self, outputs: Tensor) -> Tensor:
        return rms_norm(outputs, self._own["norm.weight"], self.config.rms_norm_eps)

    def limit_window(self, tokens: int) -> None:
        window = min(self.config.window(0) or tokens, tokens)
        self.config, self._windows = replace(self.config, windows=(window,)), {window}

    def score_sparse_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[SparseLogits, Any]:
        scored = self._score_hidden(forest, layers)
        return SparseLogits(scored.logits, None, scored.logits.shape[-1]), scored.hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        """Store the embeddings for the layer; its residual starts from the features, which replace these zeros."""
        self._embedded = super()._embed(tokens)
        return torch.zeros_like(self._embedded)

    def _qkv_product(self, normed: Normed, x: Tensor) -> Tensor:
        """Project the concatenation of normed embeddings and features to queries, keys and values."""
        both = torch.cat(
            [self._norm(self._embedded, None), self._norm(x, None) if self.config.norms_features else x], -1
        )
        return self._apply(normed.linear, both if normed.norm is None else (both * normed.norm).to(x.dtype))
