"""A forest as the native kernels take it: rows of all parts one behind the other, and what single parts ask for beside
their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.models.base import Part

if TYPE_CHECKING:
    from torch import Tensor


class Forest:
    """Reserves the slots of all parts. `more`: what the kernels are told beside tokens and positions; {} for those who
    ask for nothing else."""

    def __init__(self, parts: Sequence[Part], last_position: int, middle: int) -> None:
        """`middle`: the MLP's width in the kernels, whole groups."""
        self.spans: list[tuple[Any, ...]] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        self.more: dict[str, Any] = {}
        self._last_position = last_position
        for number, part in enumerate(parts):
            if part.keep is not None:
                part.session.keep(part.keep)
            if part.length is not None:
                self._add("gaps", number, part.session.length - part.length)
            if part.inputs is not None:
                self._add("inputs", number, array_of(part.inputs))
            if part.steer is not None:
                steer = array_of(part.steer)
                self._add("steer", number, np.pad(steer, [(0, 0), (0, middle - steer.shape[1])]))
            self.wanted += [len(self.tokens) + node for node in part.wanted]
            self.tokens += part.tokens
            self.spans.append(self._span(part))

    def show(self, rows: Sequence[int], layers: Sequence[int], width: int) -> np.ndarray:
        """Asks for hidden states of these rows after so many layers each; where they will be, float32 [layers, rows,
        width]."""
        hidden = np.empty((len(layers), len(rows), width), np.float32)
        self.more |= {"shown": np.array(rows, np.int32), "layers": np.array(layers, np.int32), "hidden": hidden}
        return hidden

    def _add(self, name: str, number: int, value: Any) -> None:
        self.more.setdefault(name, {})[number] = value

    def _span(self, part: Part) -> tuple[Any, ...]:
        """Reserves a part's slots: where its rows lie and what they see. Adds their positions."""
        session = part.session
        before, length = session.pending, session.length
        sees = session.extend(part.parents)  # [nodes, pending]
        start, last = length if part.length is None else part.length, self._last_position
        # a tree may reach past the context; what lies there is never committed
        self.positions += [min(start + depth, last) for depth in session.pending_depths[before:]]
        return session.store, length, before, len(part.tokens), sees


def array_of(values: Tensor | np.ndarray) -> np.ndarray:
    """float32 on the host, row by row in memory."""
    host = values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()
    return np.ascontiguousarray(host, np.float32)
