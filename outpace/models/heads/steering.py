"""Steering of a draft model by the target's hidden states. SD2, arXiv:2511.09844.

`fc` joins the hidden states of several layers at one position to a feature, which is normed. From it `delta` computes
a bias for the up projection of each of the draft's MLPs: down(act(gate) * (up + bias)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.models.base import Capability, runtime_name
from outpace.models.files.reading import SafetensorsFile
from outpace.models.heads.config import STEERING
from outpace.models.heads.head import Product
from outpace.models.heads.native import NativeWeights
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import AUTO, INT8

FC, NORM, NORM_BIAS, DELTA = "fc.weight", "norm.weight", "norm.bias", "delta.weight"
EPS = 1e-5  # of the norm
TAPS = "taps"  # in the metadata


def steering_shapes(draft: LlamaConfig, taps: int, target_width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors for a draft, and for a target of this width with this number of taps."""
    width = draft.hidden_size
    outputs = draft.num_layers * draft.intermediate_size
    return {FC: (width, taps * target_width), NORM: (width,), NORM_BIAS: (width,), DELTA: (outputs, width)}


class SteeringFile:
    """The steering in a draft's folder. `taps`: numbers of the target's layers after which it reads hidden states.
    `trained_on`: digests of the target's weights, tokenizer and chat template, and its runtime."""

    def __init__(self, path: Path) -> None:
        self._file, self.path = SafetensorsFile(path), path
        self.trained_on = {**self._file.metadata}
        taps = self.trained_on.get(TAPS, "")
        if not taps.replace(",", "").isdecimal():
            raise UserError(f"{path}: taps is {taps!r:.50}, it must be numbers of layers as in 2,15,27")
        self.taps = tuple(map(int, taps.split(",")))

    def __contains__(self, name: str) -> bool:
        return name in self._file.entries

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as float32."""
        return self._file.raw(name).float32()

    weight = array

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the file holds these tensors with these shapes, and finite values."""
        for name, shape in shapes.items():
            found = self._file.entries[name].shape if name in self else None
            if found != shape:
                raise UserError(
                    f"{self.path}: tensor {name!r} has shape {found and list(found)}, expected {list(shape)}"
                )
            if not self._file.raw(name).is_finite():
                raise UserError(f"{self.path} is damaged: tensor {name!r} holds values that are not finite")

    def check_target(self, target: Any) -> None:
        """Raise UserError, naming the difference, if this is a steering for another target, which is loaded."""
        for name, value in target.identity.items():
            if name != "runtime" and self.trained_on.get(name, value) != value:
                raise UserError(
                    f"{self.path} was trained for a target with another {name} than {target.name}: {name}"
                    f" {self.trained_on[name]}, not {value}; without this file the folder is an ordinary draft"
                )


def open_steering(folder: Path) -> SteeringFile | None:
    """Open the steering in a draft's folder; None if there is none. UserError if it is damaged."""
    path = folder / STEERING
    return SteeringFile(path) if path.is_file() else None


@dataclass(frozen=True)
class Steering:
    """The steering of a loaded draft, in arrays or tensors of the draft's runtime.

    `receive` converts hidden states to the runtime's type; `fuse` and `widen` multiply rows by `fc` and `delta`.
    `norm`, `norm_bias` [width]: weights of the norm in between.
    """

    taps: tuple[int, ...]
    num_layers: int
    receive: Callable[[Any], Any]
    fuse: Product
    norm: Any
    norm_bias: Any
    widen: Product

    @property
    def width(self) -> int:
        """Size of a feature."""
        return len(self.norm)

    def features(self, hidden: Any) -> Any:
        """Return the features of the target's hidden states: [taps, rows, target's width] to [rows, width]."""
        rows = self.receive(hidden).swapaxes(0, 1)
        return layer_norm(self.fuse(rows.reshape(len(rows), -1)), self.norm, self.norm_bias)

    def biases(self, features: Any) -> Any:
        """Return the biases of the up projections: [rows, width] to [rows, layers, MLP width]."""
        return self.widen(features).reshape(len(features), self.num_layers, -1)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """Apply a layer norm, computed in float32, to the rows of an array or a tensor."""
    if isinstance(x, np.ndarray):
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(EPS)) * weight + bias
    wide = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPS)
    return wide.to(x.dtype)


def attach_steering(draft: Any, target: Any) -> Any:
    """Return the draft with the steering in its folder, which drafter `steered` then uses; UserError for a steering
    that does not fit the target or the draft."""
    file = SteeringFile(draft.files() / STEERING)
    target.model.check_capability(Capability.HIDDEN)
    draft.model.check_capability(Capability.MLP_BIAS)
    file.check_target(target)
    config = draft.model.config
    file.check_shapes(steering_shapes(config, len(file.taps), target.model.config.hidden_size))
    if max(file.taps) > target.model.max_hidden_layer:
        raise UserError(
            f"{file.path} reads the hidden states after layer {max(file.taps)}, and {target.name} gives those after"
            f" layer {target.model.max_hidden_layer} at most"
        )
    draft.model.steering = _load(file, draft.model)
    notice, runtime = draft.notice, runtime_name(target.model)
    if file.trained_on.get("runtime", runtime) != runtime:
        other = f"the steering was trained on hidden states of {file.trained_on['runtime']}, not {runtime}"
        notice = f"{notice}; {other}" if notice else other
    return replace(draft, drafter="steered", notice=notice)


def _load(file: SteeringFile, draft: Any) -> Steering:
    """Load a steering into the draft's runtime: in int8 for the native kernels, otherwise in the draft's dtype."""
    if isinstance(draft, NativeLlama):
        weights: Any = NativeWeights(file, draft, replace(draft.options, weights=INT8))
    else:
        from outpace.models.heads.torch import TorchWeights

        weights = TorchWeights(file, draft, file.array, AUTO)
    fc, norms, delta = (
        weights.product("fc"),
        (weights.vector(NORM), weights.vector(NORM_BIAS)),
        weights.product("delta"),
    )
    return Steering(file.taps, draft.num_layers, weights.receive, fc, *norms, delta)
