"""Medusa: further output layers on the target's last hidden state. Cai et al., arXiv:2401.10774.

Head i predicts the token i + 2 positions after the state's, independently of the tokens in between. So one forward
drafts a block, as with DFlash, and a session stores nothing but the feature of its last position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace.core.arrays import join_rows, torch
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.models.base import Model, Session
from outpace.models.heads.config import MEDUSA, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head, HeadSession, Weights, stack_rows
from outpace.models.heads.kinds.block import BlockDraft
from outpace.models.heads.reader import MAX_DRAFTED, check_count
from outpace.models.llama.config.fields import ReadFields, number, size
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.options import INT8

PLACE = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")


class CountedTokens(Session):
    """A session without layers."""

    def _resize(self, slots: int) -> None:
        """Do nothing: slots are empty."""

    def _copy(self, other: Any, length: int) -> None:
        """Do nothing: the target computes the last position of a prefix again, and with it the feature."""


class NoLayers(Model):
    """A model without layers, whose sessions count tokens."""

    token_bytes = 0
    num_layers = 1

    def __init__(self, target: Any, vocab_size: int) -> None:
        self.device, self.dtype, self.max_positions = target.device, target.dtype, target.max_positions
        self.vocab_size = vocab_size

    @property
    def precision(self) -> str:
        return super().precision or INT8

    def open(self, capacity: int, max_pending: int) -> CountedTokens:
        return CountedTokens(min(capacity, self.max_positions), max_pending)

    def limit_window(self, tokens: int) -> None:
        """Do nothing: the heads read one position."""


class MedusaHead(Head):
    """Medusa's heads. A session's `outputs` hold the feature of the last position that it has read, [1, width].

    They are zeros if there is none, so that the first token's draft is a guess.
    """

    kinds: tuple[str, ...] = (MEDUSA,)
    drafter = "block"
    shares_config = True
    is_best_first = False

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        super().__init__(spec, weights, layers or NoLayers(weights.target, spec.layers.vocab_size))
        self.vectors["target_norm.weight"] = weights.vector("target_norm.weight")
        heads, blocks = range(spec.block), range(spec.layers.num_layers)
        self._blocks = [[weights.product(f"blocks.{one}.layers.{block}") for block in blocks] for one in heads]
        self._outputs = [weights.product(f"lm_heads.{one}") for one in heads]
        self._all_logits = weights.captured(self._compute, (spec.block, spec.num_rows))

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
        """Read the heads. Their sizes are those of the tensors; config.json may say fewer heads than there are."""
        shape = files.shape("lm_heads.0.weight")
        if len(shape) != 2:
            raise UserError(f"tensor 'lm_heads.0.weight' has shape {list(shape)}, it must be a matrix")
        rows, hidden = shape
        for name, held in (("vocab_size", rows), ("hidden_size", hidden)):
            if (said := size(config, name, held)) != held:
                raise UserError(f"{name} is {said}, but tensor 'lm_heads.0.weight' has shape {list(shape)}")
        places = [tuple(map(int, found.groups())) for name in files.tensors if (found := PLACE.match(name))]
        blocks = size(config, "medusa_num_layers", 1 + max((block for _, block in places), default=0))
        check_count("medusa_num_layers", blocks, files)
        eps = number(target, "rms_norm_eps", 1e-6, 1.0)
        layers = LlamaConfig(rows, hidden, hidden, blocks, 1, 1, 2, eps, 1e4, max_positions, False, False, False)
        block = max(size(config, "medusa_num_heads", 1), *(1 + head for head, _ in places), 1)
        if block > MAX_DRAFTED:
            raise UserError(f"medusa_num_heads is {block}, it must be at most {MAX_DRAFTED}")
        return HeadConfig(kind, layers, (num_layers,), rows, hidden, eps, block=block, from_anchor=True)

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        hidden = head.layers.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for one in range(head.block):
            shapes[f"lm_heads.{one}.weight"] = (head.num_rows, hidden)
            for block in range(head.layers.num_layers):
                name = f"blocks.{one}.layers.{block}."
                shapes |= {f"{name}weight": (hidden, hidden), f"{name}bias": (hidden,)}
        return shapes

    def open(self, capacity: int, max_pending: int) -> HeadSession:
        session = super().open(capacity, max_pending)
        session.outputs = [0 * self.vectors["target_norm.weight"][None]]
        return session

    def fuse(self, hidden: Any) -> Any:
        return self.normed("target_norm", self.receive(hidden[0]), self.spec.target_eps)

    def read_features(self, sessions: Sequence[Any]) -> None:
        for session in sessions:
            if count := len(session.features):
                session.outputs, session.features = [session.features[-1:]], ()
                session.stored.length += count

    def draft(self, sessions: Sequence[Any], anchors: Sequence[int]) -> BlockDraft:
        self.read_features(sessions)
        values = self.logits(join_rows([session.outputs[0] for session in sessions]))
        logits = SparseLogits(values.reshape(len(sessions) * self.spec.block, -1), None, self.vocab_size)
        return BlockDraft(self.spec, logits)

    def logits(self, rows: Any) -> Any:
        """Return the logits of all heads for these features: [rows, width] to [rows, heads, vocab]."""
        return self._all_logits(rows)[..., : self.vocab_size]

    @property
    def num_captures(self) -> int:
        return getattr(self._all_logits, "num_captures", 0)

    def _compute(self, rows: Any) -> Any:
        found = []
        for blocks, output in zip(self._blocks, self._outputs, strict=True):
            x = rows
            for block in blocks:
                x = x + _silu(block(x))
            found.append(output(x))
        return stack_rows(found, 1)


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x)) if isinstance(x, np.ndarray) else torch.nn.functional.silu(x)
