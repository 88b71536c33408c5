"""A forest as the native kernels take it: rows of all parts one behind the other, and what single parts ask for beside
their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.models.base import Part

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[Any, int, int, int, bytes]
"""A session's store, its committed tokens, those that are pending, the new ones, and which of these each of them sees:
a byte each, 1 or 0."""


class Forest:
    """Reserves the slots of all parts. `more`: what the kernels are told beside tokens and positions; {} for those who
    ask for nothing else. `best`: so many best tokens all ask for of each wanted row; below 1: none."""

    def __init__(self, parts: Sequence[Part], last_position: int, middle: int) -> None:
        """`middle`: the MLP's width in the kernels, whole groups."""
        self.spans: list[Span] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        self.more: dict[str, Any] = {}
        self.best = -1
        self._last_position = last_position
        for number, part in enumerate(parts):
            if part.keep is not None:
                part.session.keep(part.keep)
            if part.length is not None or part.inputs is not None or part.steer is not None:
                self._add_more(number, part, middle)
            if part.wanted:
                self.best = part.best if self.best in (-1, part.best) else 0
            first = len(self.tokens)
            self.wanted += [first + node for node in part.wanted] if first else part.wanted
            self.tokens += part.tokens
            self._add_span(part)

    def arrays(self, turns: np.ndarray) -> tuple[Any, ...]:
        """Spans, tokens, what each row turns by, of `turns` [positions, pairs, 2], and wanted rows: as the kernels take
        them from those who ask for more than scores."""
        spans = [
            (store, length, before, count, np.ndarray((count, before + count), bool, sees))
            for store, length, before, count, sees in self.spans
        ]
        tokens, wanted = np.array(self.tokens, np.int32), np.array(self.wanted, np.int32)
        return spans, tokens, turns.take(self.positions, 0), wanted

    def show(self, rows: Sequence[int], layers: Sequence[int], width: int) -> np.ndarray:
        """Asks for hidden states of these rows after so many layers each; where they will be, float32 [layers, rows,
        width]."""
        hidden = np.empty((len(layers), len(rows), width), np.float32)
        self.more |= {"shown": np.array(rows, np.int32), "layers": np.array(layers, np.int32), "hidden": hidden}
        return hidden

    def _add_more(self, number: int, part: Part, middle: int) -> None:
        """What a part has beside its tokens."""
        if part.length is not None:
            self._add("gaps", number, part.session.length - part.length)
        if part.inputs is not None:
            self._add("inputs", number, array_of(part.inputs))
        if part.steer is not None:
            steer = array_of(part.steer)
            self._add("steer", number, np.pad(steer, [(0, 0), (0, middle - steer.shape[1])]))

    def _add(self, name: str, number: int, value: Any) -> None:
        self.more.setdefault(name, {})[number] = value

    def _add_span(self, part: Part) -> None:
        """Reserves a part's slots: where its rows lie, what they see, and their positions."""
        session = part.session
        depths, length = session.pending_depths, session.length
        before = len(depths)
        sees = session.add(part.parents)
        start, last = length if part.length is None else part.length, self._last_position
        for node in range(before, len(depths)):  # a tree may reach past the context; that is never committed
            self.positions.append(min(start + depths[node], last))
        self.spans.append((session.store, length, before, len(part.tokens), sees))


def array_of(values: Tensor | np.ndarray) -> np.ndarray:
    """float32 on the host, row by row in memory."""
    host = values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()
    return np.ascontiguousarray(host, np.float32)
