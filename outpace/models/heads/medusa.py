"""Medusa as a draft model: further output layers on the target's last hidden state. Cai et al., arXiv:2401.10774.

Head i predicts the token i + 2 positions after the state's, independently of the tokens in between. So one forward
drafts a block, as with DFlash, and a session stores nothing but the feature of its last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outpace.core.arrays import join_rows, kernels, torch
from outpace.core.logits import SparseLogits
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.dflash import BlockDraft, BlockModel, Markov
from outpace.models.heads.eagle3 import FeatureSession
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import host_floats
from outpace.models.llama.native.weights import Packing
from outpace.models.options import INT8

Product = Callable[[Any], Any]  # of rows with a matrix, plus its bias


class MedusaSession(FeatureSession):
    """A session that stores `last`, the feature of the last position it has read, [1, width]: zeros if there is none,
    so that the first token's draft is a guess."""

    last: Any

    def _resize(self, slots: int) -> None:
        """Do nothing: slots are empty."""

    def _copy(self, other: Any, length: int) -> None:
        """Do nothing: the target computes the last position of a prefix again, and with it the feature."""


class MedusaModel(BlockModel):
    """Medusa's heads."""

    token_bytes = 0
    num_layers = 1

    def __init__(self, head: HeadConfig, target: Any, norm: Any, product: Callable[[str], Product]) -> None:
        """`norm`: the weights of the target's final norm. `product` returns one of the file's matrices by its name."""
        self.head, self.own, self.markov = head, {"target_norm.weight": norm}, Markov(None, {}, None)
        self.device, self.dtype, self.max_positions = target.device, target.dtype, target.max_positions
        self.vocab_size, blocks = head.layers.vocab_size, range(head.layers.num_layers)
        self._blocks = [[product(f"blocks.{one}.layers.{block}") for block in blocks] for one in range(head.block)]
        self._outputs = [product(f"lm_heads.{one}") for one in range(head.block)]

    @property
    def precision(self) -> str:
        return super().precision or INT8

    def open(self, capacity: int, max_pending: int) -> MedusaSession:
        session = MedusaSession(min(capacity, self.max_positions), max_pending)
        session.last = 0 * self.own["target_norm.weight"][None]
        return session

    def fuse(self, hidden: Any) -> Any:
        received = host_floats(hidden[0]) if self.dtype is None else hidden[0].to(self.device, self.dtype)
        return self.normed("target_norm", received, self.head.target_eps)

    def limit_window(self, tokens: int) -> None:
        """Do nothing: the heads read one position."""

    def read_features(self, sessions: Sequence[Any]) -> None:
        for session in sessions:
            if count := len(session.features):
                session.last, session.features = session.features[-1:], ()
                session.length += count

    def draft(self, sessions: Sequence[Any], anchors: Sequence[int]) -> BlockDraft:
        self.read_features(sessions)
        values = self.logits(join_rows([session.last for session in sessions]))
        held = SparseLogits(values.reshape(len(sessions) * self.head.block, -1), None, self.vocab_size)
        return BlockDraft(self.head, self.markov, held, None)

    def logits(self, rows: Any) -> Any:
        """Return the logits of all heads for these features: [rows, width] to [rows, heads, vocab]."""
        found = []
        for blocks, output in zip(self._blocks, self._outputs, strict=True):
            x = rows
            for block in blocks:
                x = x + _silu(block(x))
            found.append(output(x)[:, : self.vocab_size])
        return np.stack(found, 1) if isinstance(rows, np.ndarray) else torch.stack(found, 1)


def native_products(files: Any, options: NativeOptions) -> Callable[[str], Product]:
    """Return a function that packs a matrix of the file, with its bias, for the kernels: in int8."""
    packing, threads, none = Packing(kernels, options.threads or 1), options.threads or 1, np.zeros(0, np.float32)
    heads = kernels.Heads(1, 1, 2, "float32", 1e-6)  # a model without layers has none

    def product(name: str) -> Product:
        bias = files.array(f"{name}.bias").tolist() if f"{name}.bias" in files else ()
        matrix = packing.of_floats(np.ascontiguousarray(files.array(f"{name}.weight"), np.float32), bias)
        model = kernels.Model(heads, matrix.inputs, 0, 1e-6, [], matrix, none, matrix, options.instruction_set, threads)

        def multiply(rows: np.ndarray) -> np.ndarray:
            out = np.empty((len(rows), matrix.outputs), np.float32)
            model.project(host_floats(rows), out)
            return out

        return multiply

    return product


def torch_products(
    files: HeadFiles, of_target: Callable[[str], Any], device: Any, dtype: Any
) -> tuple[Any, Callable[[str], Product]]:
    """Return the target's final norm, and a function that loads a matrix of the file, with its bias, for torch."""

    def fetch(name: str) -> Any:
        found = torch.from_numpy(np.array(files.array(name))) if name in files else of_target(name)
        return found.to(device=device, dtype=dtype)

    def product(name: str) -> Product:
        weight, bias = fetch(f"{name}.weight"), fetch(f"{name}.bias") if f"{name}.bias" in files else None
        return lambda rows: torch.nn.functional.linear(rows, weight, bias)

    return fetch("target_norm.weight"), product


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x)) if isinstance(x, np.ndarray) else torch.nn.functional.silu(x)
