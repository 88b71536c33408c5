"""Loads heads for a target that runs by torch, on its device and in its dtype. Drafts do not change the text, so heads
have no exact mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import next_power_of_two
from outpace.models.base import Part
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import rms_norm
from outpace.models.heads.reader import draft_ids
from outpace.models.llama.cuda.captures import Captures
from outpace.models.llama.cuda.runtime import MAX_HEAD_ROWS, GraphLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.llama.torch.weights import load_head, load_keys_and_values, load_layer
from outpace.models.llama.weight_sources import split_fused


class TorchProduct:
    """A matrix with its bias, and the norm before it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._norm, self._eps = weight, bias, norm, eps
        self.bytes = weight.numel() * weight.element_size()

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows if self._norm is None else rms_norm(rows, self._norm, self._eps)
        return F.linear(rows, self._weight, self._bias)


class CapturedFunction:
    """A function of rows, captured for each power of two of rows; more than MAX_HEAD_ROWS are computed as they are."""

    def __init__(self, compute: Callable[[Tensor], Tensor], shape: tuple[int, ...], captures: Captures) -> None:
        self._compute, self._shape, self._captures = compute, shape, captures

    @property
    def num_captures(self) -> int:
        return self._captures.count

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        count = next_power_of_two(len(rows))
        if count > MAX_HEAD_ROWS:
            return self._compute(rows)
        inputs = self._captures.buffers(("inputs", count), lambda: rows.new_zeros(count, rows.shape[1]))
        outputs: Tensor = self._captures.buffers(("outputs", count), lambda: rows.new_zeros(count, *self._shape))
        inputs[: len(rows)].copy_(rows)

        def work() -> None:
            outputs.copy_(self._compute(inputs))

        self._captures.prepare(count, work, inputs, outputs)
        self._captures.replay(count)
        return outputs[: len(rows)].clone()


class TorchWeights:
    """See `Weights`. `of_target` returns the target's weights by name: its final norm (target_norm.weight), and its
    embedding and output layer for files that lack them."""

    def __init__(self, files: Any, target: Any, of_target: Callable[[str], Any], kv_dtype: str) -> None:
        self.files, self.target, self._of_target, self._kv_dtype = files, target, of_target, kv_dtype
        self._device, self._dtype = target.device, target.dtype
        self._is_eager: bool | None = target.captures.is_eager if isinstance(target, GraphLlama) else None

    def of(self, files: HeadFiles) -> TorchWeights:
        return TorchWeights(files, self.target, self._of_target, self._kv_dtype)

    def layers(self, head: HeadConfig, takes_inputs: bool = True) -> Llama:
        config, width = replace(head.layer_config, norms_output="norm.weight" in self.files), head.layers.hidden_size

        def named(name: str) -> Tensor:
            name = name.removeprefix("model.")
            if name in ("norm.weight", "layers.0.input_layernorm.weight") and name not in self.files:
                return self._placed(torch.full((width,), width**-0.5))  # a factor of 1 in `load_layer`
            return self.vector(name)

        fetch = split_fused(config, named)
        embedding = fetch("embed_tokens.weight")
        layers = [load_layer(config, number, fetch) for number in range(config.num_layers)]
        output = load_head(config, embedding, None, fetch)
        ids = draft_ids(self.files, head) if "lm_head.weight" in self.files else None
        tokens = None if ids is None else torch.from_numpy(ids).to(self._device)
        parts = config, layers, embedding, output, False, tokens, self._kv_dtype
        if self._is_eager is None:
            return Llama(*parts)
        model = GraphLlama(*parts)
        model.captures = Captures(self._is_eager)
        if takes_inputs:
            model.take_vectors()
        return model

    def storing(self, layers: Llama) -> Callable[[Sequence[Part]], None]:
        norm, config = self.vector("hidden_norm.weight"), layers.config
        fetch = split_fused(config, lambda name: self.vector(name.removeprefix("model.")))
        products = [load_keys_and_values(config, number, norm, fetch) for number in range(config.num_layers)]
        return lambda parts: layers.store_inputs(parts, products)

    def product(self, name: str, norm: str = "", eps: float = 1e-6) -> TorchProduct:
        bias = self.vector(f"{name}.bias") if f"{name}.bias" in self.files else None
        return TorchProduct(self.vector(f"{name}.weight"), bias, self.vector(norm) if norm else None, eps)

    def vector(self, name: str) -> Tensor:
        held = name in self.files
        return self._placed(torch.from_numpy(np.array(self.files.array(name))) if held else self._of_target(name))

    def receive(self, hidden: Any) -> Tensor:
        return torch.as_tensor(hidden).to(self._device, self._dtype)

    def captured(self, compute: Callable[[Any], Any], shape: tuple[int, ...]) -> Callable[[Any], Any]:
        return compute if self._is_eager is None else CapturedFunction(compute, shape, Captures(self._is_eager))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=self._device, dtype=self._dtype)
