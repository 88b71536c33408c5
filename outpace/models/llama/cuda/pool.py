"""One store of keys and values for all sessions of a model, at fixed addresses, so that captured passes can read it.

A session has one row. Before a pass, the rows of its sessions are moved to the front, so that attention reads them in
place and no keys and values are gathered. Rows and slots grow by doubling; the store then moves, and everything is
captured anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.models.base import Session
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.torch.session import KVFormat

SPARE = 8  # slots after those of the texts: padding rows write to the last one, nothing reads them
MIN_SLOTS = 64  # smallest number of slots of a row, if attention reads all of them
MAX_MOVES = 64  # slots that the next pass can move; more are moved at once


def pool_shape(slots: Sequence[int], min_slots: int) -> tuple[int, int]:
    """Return the rows and slots of a pool for sessions with these numbers of slots, at least `min_slots` slots; (0, 0)
    if no session has any."""
    used = [count for count in slots if count]
    return (next_power_of_two(len(used)), next_power_of_two(max(used), min_slots)) if used else (0, 0)


class Pool:
    """The store: `kv` [layers, keys and values, rows, kv_heads, slots + SPARE, encoded width], finite everywhere."""

    def __init__(self, config: LlamaConfig, kv_format: KVFormat, device: torch.device, min_slots: int) -> None:
        """`min_slots`: the smallest number of slots of a row."""
        self.min_slots = min_slots
        self._shape = config.num_layers, 2, config.num_kv_heads, kv_format.width
        self._sessions: WeakValueDictionary[int, GraphSession] = WeakValueDictionary()  # by row
        self._largest = 0  # the largest product of rows and slots so far: that much memory was allowed
        self.rows = self.slots = 0
        self.kv = self._zeros(0, 0, kv_format.dtype, device)

    @property
    def padding(self) -> int:
        """The slot to which padding rows write."""
        return self.slots + SPARE - 1

    @torch.inference_mode()
    def fit(self, session: GraphSession, slots: int) -> None:
        """Give a session a row with at least `slots` slots; with 0, free its row."""
        others = [other for other in self._by_row() if other is not session]
        rows, width = pool_shape([slots, *(other.slots for other in others)], self.min_slots)
        if not slots and session.row is not None:
            del self._sessions[session.row]
            session.row = None
        elif rows > self.rows or width > self.slots:
            # shrink in no direction, unless the pool would be larger than it ever was
            kept = max(rows, self.rows), max(width, self.slots)
            self.resize(*(kept if math.prod(kept) <= max(self._largest, rows * width) else (rows, width)))
        if slots and session.row is None:
            session.row = next(row for row in range(self.rows) if row not in self._sessions)
            self._sessions[session.row] = session

    def reserve(self, rows: int, max_slots: int) -> None:
        """Make room for this many sessions with short texts; the store may keep up to `max_slots` slots in all rows."""
        self._largest = max(self._largest, max_slots)
        if rows > self.rows:
            self.resize(next_power_of_two(rows), max(self.slots, self.min_slots))

    @torch.inference_mode()
    def bring_to_front(self, sessions: Sequence[GraphSession]) -> None:
        """Move these sessions to the first rows, swapping each with a row of no session among them."""
        count, chosen = len(sessions), set(map(id, sessions))
        free = [row for row in range(count) if id(self._sessions.get(row)) not in chosen]
        for session in sessions:
            if session.row is not None and session.row >= count:
                self._swap(session.row, free.pop())

    def move(self, start: int, source: Tensor, target: Tensor) -> None:
        """In the rows from `start` on, copy slots `source` to `target`, in all layers. [rows, moves] both"""
        kv = self.kv[:, :, start : start + len(source)]  # [layers, 2, rows, kv_heads, slots, width]
        shape = (*kv.shape[:4], source.shape[1], kv.shape[5])
        moved = kv.gather(4, source[None, None, :, None, :, None].expand(shape))
        kv.scatter_(4, target[None, None, :, None, :, None].expand(shape), moved)

    @torch.inference_mode()
    def resize(self, rows: int, slots: int) -> None:
        """Allocate a new store and copy what the sessions hold to its first rows; meanwhile both stores exist."""
        sessions = self._by_row()
        kv = self._zeros(rows, slots, self.kv.dtype, self.kv.device)
        for row, session in enumerate(sessions):
            session.apply_moves()
            kv[:, :, row, :, : session.used] = session.kv[:, :, :, : session.used]
        self.kv, self.rows, self.slots = kv, rows, slots
        self._largest = max(self._largest, rows * slots)
        self._sessions = WeakValueDictionary(enumerate(sessions))
        for row, session in enumerate(sessions):
            session.row = row

    def _by_row(self) -> list[GraphSession]:
        """Return the sessions in the order of their rows."""
        return [session for row in range(self.rows) if (session := self._sessions.get(row)) is not None]

    def _swap(self, one: int, other: int) -> None:
        first, second = self._sessions.pop(one), self._sessions.pop(other, None)
        if second is not None:
            second.apply_moves()
            kept = second.kv[:, :, :, : second.used].clone()
        first.apply_moves()
        self.kv[:, :, other, :, : first.used] = first.kv[:, :, :, : first.used]
        first.row, self._sessions[other] = other, first
        if second is not None:
            self.kv[:, :, one, :, : second.used] = kept
            second.row, self._sessions[one] = one, second

    def _zeros(self, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        layers, kinds, heads, width = self._shape
        return torch.zeros(layers, kinds, rows, heads, slots + SPARE, width, dtype=dtype, device=device)


class GraphSession(Session):
    """One row of a pool. The moves of `keep` are deferred to the next pass, or to the next reader of the row."""

    def __init__(self, capacity: int, max_pending: int, pool: Pool) -> None:
        super().__init__(capacity, max_pending)
        self.pool, self.row = pool, None  # type: Pool, int | None
        self.moves: tuple[np.ndarray, int] | None = None  # slots to move, and the first one's destination

    @property
    def place(self) -> int:
        """The row of a session that has slots."""
        assert self.row is not None, "a session without slots has no row"
        return self.row

    @property
    def kv(self) -> Tensor:
        """Its row: [layers, keys and values, kv_heads, slots, encoded width]."""
        return self.pool.kv[:, :, self.row]

    @property
    def used(self) -> int:
        return self.length + self.pending

    def read(self, length: int) -> Tensor:
        """Return the first `length` slots, layer after layer [keys and values, kv_heads, slots, width], flattened."""
        self.apply_moves()
        if self.row is None:  # nothing was ever stored
            return self.pool.kv.new_empty(0)
        return self.kv[:, :, :, :length].flatten()

    @torch.inference_mode()
    def apply_moves(self) -> None:
        if self.moves is None:
            return
        (source, start), self.moves = self.moves, None
        index = to_device(source, np.int64, self.kv.device)
        self.kv[:, :, :, start : start + len(source)] = self.kv[:, :, :, index]

    def _resize(self, slots: int) -> None:
        self.pool.fit(self, slots)

    def _move(self, source: Sequence[int], start: int) -> None:
        self.apply_moves()
        self.moves = np.array(source, dtype=np.int64), start
        if len(source) > MAX_MOVES:
            self.apply_moves()

    @torch.inference_mode()
    def _copy(self, other: GraphSession, length: int) -> None:
        other.apply_moves()
        if length:
            self.kv[:, :, :, :length] = other.kv[:, :, :, :length]
