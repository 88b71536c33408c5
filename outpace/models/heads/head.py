"""A trained head: an object that has a runtime's model of its layers, and calls it with inputs.

The inputs are features, which the head computes from the target's hidden states. A kind of head is one file in `kinds`
with a subclass of `Head`, which says how its files are read, what features are, and how the layers are called. A kind
knows no runtime: `Weights` loads what it needs, and its arithmetic takes the runtime's arrays or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from outpace.core.arrays import join_rows, torch
from outpace.models.base import Model, Part, Session
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.reader import EAGLE_TAPS, base_shapes, read_layers
from outpace.models.llama.config.fields import ReadFields


class Product(Protocol):
    """A product with a matrix, plus its bias."""

    @property
    def bytes(self) -> int:
        """Bytes of the matrix."""

    def __call__(self, rows: Any) -> Any:
        """Multiply rows: [rows, inputs] to [rows, outputs]"""


class Weights(Protocol):
    """Loads a head's tensors for the target's runtime, on its device and in its type."""

    files: HeadFiles
    target: Any  # a runtime's model; None if there is none

    def of(self, files: HeadFiles) -> Weights:
        """Return the same for other files."""

    def layers(self, head: HeadConfig, takes_inputs: bool = True) -> Model:
        """Load the layers, with an embedding and an output layer that are the target's where the files lack them.
        `takes_inputs`: each pass has `Part.inputs`."""

    def storing(self, layers: Any) -> Callable[[Sequence[Part]], None]:
        """Return a function that stores the keys and values of the parts' inputs, normed by `hidden_norm`."""

    def product(self, name: str, norm: str = "", eps: float = 1e-6) -> Product:
        """Load a matrix, which multiplies rows after this norm, if it has a name."""

    def vector(self, name: str) -> Any:
        """Load a norm's weights, among them the target's final norm (target_norm.weight), or the like."""

    def receive(self, hidden: Any) -> Any:
        """Convert the target's hidden states."""

    def captured(self, compute: Callable[[Any], Any], shape: tuple[int, ...]) -> Callable[[Any], Any]:
        """Return the same function of rows; for a target with captured passes, one that is captured too.

        `shape`: that of a row's result.
        """


class HeadSession:
    """A session of the layers, `stored`, with a queue of features; in everything else it is like `stored`.

    `features` [queued, width]: features of the next slots, in order; they are computed when they are read.
    `num_features`: their number.
    `outputs`: the output [width] of each pending node, which its children read; None for nodes without a logit row.
    """

    def __init__(self, stored: Session) -> None:
        self.stored = stored
        self._features: Any = ()
        self._hidden: tuple[Any, ...] = ()  # hidden states of the positions after those of `_features`
        self._fuse: Callable[[Any], Any]
        self.num_features = 0
        self.outputs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    @property
    def length(self) -> int:  # faster than `__getattr__`, and often asked for
        return self.stored.length

    @property
    def pending(self) -> int:
        return self.stored.pending

    @property
    def features(self) -> Any:
        if self._hidden:
            rows = self._fuse(join_rows(self._hidden, 1))
            self._features, self._hidden = join_rows([*([self._features] if len(self._features) else []), rows]), ()
        return self._features

    @features.setter
    def features(self, rows: Any) -> None:
        self._features, self._hidden, self.num_features = rows, (), len(rows)

    def add_features(self, rows: Any) -> None:
        """Queue the features of the next positions."""
        self.features = join_rows([self.features, rows]) if self.num_features else rows

    def add_hidden(self, hidden: Any, fuse: Callable[[Any], Any]) -> None:
        """Queue the target's hidden states at the next positions, [taps, rows, width]. `fuse` computes the features of
        all of them together when they are first read."""
        self._fuse = fuse
        self._hidden, self.num_features = (*self._hidden, hidden), self.num_features + hidden.shape[1]

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        self.stored.keep(path, live)
        self.outputs = [self.outputs[node] for node in live]

    def truncate(self, length: int) -> None:
        if length < self.stored.length:
            self.features = ()
        self.stored.truncate(length)
        self.outputs = []

    def start_from(self, other: HeadSession, length: int) -> None:
        self.stored.start_from(other.stored, length)


class Head:
    """Base class of the kinds; in everything else it is like its `layers`, a runtime's model.

    `fc` joins hidden states, or a state and an embedding, to a feature. `vectors`: weights of norms, and P-EAGLE's
    mask, by name.
    """

    kinds: tuple[str, ...]  # the kinds that it runs
    drafter: str  # the drafter that runs it
    own_fields: tuple[str, ...] = ()  # fields of config.json that no other kind has
    tap_fields: Mapping[str, int] = EAGLE_TAPS  # that name layers, and what is added to count the layers completed
    reads_last = False  # the target's last hidden state only, whatever a field says
    joins_embedding = False  # whether `fc` reads a token's embedding too
    is_block = False  # whether it drafts a block of mask tokens
    shares_config = False  # whether its config.json may have fields of the target

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        """`layers`: by default those in the files."""
        self.spec, files = spec, weights.files
        self.layers: Any = layers or weights.layers(spec, takes_inputs=not self.is_block)
        self.receive, self.vectors = (
            weights.receive,
            {one: weights.vector(one) for one in files.tensors if _is_vector(one)},
        )
        if "fc.weight" in files:
            norm = "input_norm.weight" if spec.norm_before_fc else ""
            self.fc = weights.product("fc", norm, spec.layers.rms_norm_eps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)

    @classmethod
    def read(
        cls,
        kind: str,
        config: ReadFields,
        files: HeadFiles,
        target: Mapping[str, Any],
        max_positions: int,
        num_layers: int,
    ) -> HeadConfig:
        """Read a head for a target with these config.json fields and this number of layers."""
        head = read_layers(cls, kind, config, files, target, max_positions, num_layers)
        return cls.complete(head, config, files, target)

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        """Return the configuration with what only this kind has; UserError if the files contradict themselves."""
        return head

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the head must have, and of the optional ones that it has."""
        return base_shapes(head, files)

    @classmethod
    def usual_taps(cls, own_layers: int, num_layers: int) -> tuple[int, ...]:
        """Return the taps of heads whose files do not name them."""
        return 2, num_layers // 2, num_layers - 3

    def fuse(self, hidden: Any) -> Any:
        """Compute features from the target's hidden states: [taps, rows, target's width] to [rows, width]"""
        return self.fc(self.normed_taps(hidden))

    def normed_taps(self, hidden: Any) -> Any:
        """Norm hidden states, if the head does, and join them: [rows, taps * target's width]"""
        rows = self.receive(hidden).swapaxes(0, 1)  # [rows, taps, width]
        if self.spec.fc_norm:
            scales = [self.vectors[f"fc_norm.{tap}.weight"] for tap in range(len(self.spec.taps))]
            rows = rms_norm(rows, stack_rows(scales), self.spec.layers.rms_norm_eps)
        return rows.reshape(len(rows), rows.shape[1] * rows.shape[2])  # there may be no rows

    def normed(self, name: str, rows: Any, eps: float = 0.0) -> Any:
        """Apply the norm of this name, if the head has one. With `eps` 0 the head's own epsilon is used."""
        weight = self.vectors.get(f"{name}.weight")
        return rows if weight is None else rms_norm(rows, weight, eps or self.spec.layers.rms_norm_eps)

    @property
    def vocab_size(self) -> int:
        size: int = self.layers.vocab_size
        return size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.layers.vocab_size = size

    def open(self, capacity: int, max_pending: int) -> HeadSession:
        session = HeadSession(self.layers.open(capacity, max_pending))
        session.stored.is_block = self.is_block
        return session


def _is_vector(name: str) -> bool:
    return name.endswith("norm.weight") or name.startswith("fc_norm.") or name == "mask_hidden"


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Apply an RMS norm, computed in float32, to the rows of an array or a tensor."""
    if isinstance(x, np.ndarray):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def stack_rows(rows: Sequence[Any], axis: int = 0) -> Any:
    """Stack arrays, or tensors."""
    return np.stack(rows, axis) if isinstance(rows[0], np.ndarray) else torch.stack([*rows], axis)
