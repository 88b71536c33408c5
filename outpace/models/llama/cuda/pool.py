"""One store of keys and values for all sessions of a model, at fixed addresses, so that captured passes can read it.

A session has one row. Before a pass, the rows of its sessions are moved to the front, so that attention reads them in
place and no keys and values are gathered. Rows and slots grow by doubling; the store then moves, and everything is
captured anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import next_power_of_two, to_device
from outpace.models.base import Session
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda.captures import visible_bits
from outpace.models.llama.torch.session import KVFormat

SPARE = 8  # slots after those of the texts: padding rows write to the last one, nothing reads them
LEAST = 64  # slots
MOST_MOVES = 64  # slots that the next pass can move; more are moved at once


def pool_shape(slots: Sequence[int]) -> tuple[int, int]:
    """Return the rows and slots of a pool for sessions with these numbers of slots; (0, 0) if none has any."""
    used = [count for count in slots if count]
    return (next_power_of_two(len(used)), next_power_of_two(max(used), LEAST)) if used else (0, 0)


def finite(values: Tensor) -> Tensor:
    """Replace nan and infinities before values are stored.

    Hidden slots are multiplied by 0, which keeps nan: a request whose numbers overflow must not spoil the request that
    gets its row next.
    """
    return torch.nan_to_num(values)


class Pool:
    """The store: `kv` [layers, keys and values, rows, kv_heads, slots + SPARE, encoded width], finite everywhere."""

    def __init__(self, config: LlamaConfig, kv_format: KVFormat, device: torch.device) -> None:
        self._config, self._width = config, kv_format.width
        self._sessions: list[ref[GraphSession] | None] = []  # by row; a dead reference or None: the row is free
        self._largest = 0  # the largest product of rows and slots so far: that much memory was allowed
        self.rows = self.slots = 0
        self.kv = torch.zeros(self._shape(0, 0), dtype=kv_format.dtype, device=device)

    @property
    def padding(self) -> int:
        """The slot to which padding rows write."""
        return self.slots + SPARE - 1

    def at(self, row: int) -> GraphSession | None:
        """Return the session of a row."""
        found = self._sessions[row]
        return found() if found is not None else None

    @torch.inference_mode()
    def fit(self, session: GraphSession, slots: int) -> None:
        """Give a session a row with at least `slots` slots; with 0, free its row."""
        others = [other for row in range(self.rows) if (other := self.at(row)) and other is not session]
        rows, width = pool_shape([slots, *(other.slots for other in others)])
        if not slots and session.row is not None:
            self._sessions[session.row], session.row = None, None
        elif rows > self.rows or width > self.slots:
            self.resize(*self._grown(rows, width))
        if slots and session.row is None:
            session.row = next(row for row in range(self.rows) if self.at(row) is None)
            self._sessions[session.row] = ref(session)

    @torch.inference_mode()
    def bring_to_front(self, sessions: Sequence[GraphSession]) -> None:
        """Move these sessions to the first rows, swapping each with a row of no session among them."""
        count, chosen = len(sessions), set(map(id, sessions))
        free = [row for row in range(count) if id(self.at(row)) not in chosen]
        for session in sessions:
            if session.row is not None and session.row >= count:
                self._swap(session.row, free.pop())

    def move(self, start: int, source: Tensor, target: Tensor) -> None:
        """In the rows from `start` on, copy slots `source` to `target`, in all layers. [rows, moves] both"""
        kv = self.kv[:, :, start : start + len(source)]  # [layers, 2, rows, kv_heads, slots, width]
        shape = (*kv.shape[:4], source.shape[1], kv.shape[5])
        moved = kv.gather(4, source[None, None, :, None, :, None].expand(shape))
        kv.scatter_(4, target[None, None, :, None, :, None].expand(shape), moved)

    def resize(self, rows: int, slots: int) -> None:
        """Allocate a new store and copy what the sessions hold to its first rows; meanwhile both stores exist."""
        sessions = [session for row in range(self.rows) if (session := self.at(row)) is not None]
        kv = self.kv.new_zeros(self._shape(rows, slots))
        for row, session in enumerate(sessions):
            session.settle()
            kv[:, :, row, :, : session.used] = self.kv[:, :, session.row, :, : session.used]
        for row, session in enumerate(sessions):
            session.row = row
        self.kv, self.rows, self.slots = kv, rows, slots
        self._largest = max(self._largest, rows * slots)
        self._sessions = [*map(ref, sessions), *[None] * (rows - len(sessions))]

    def _grown(self, rows: int, slots: int) -> tuple[int, int]:
        """Return a size that shrinks in no direction, unless that would be larger than the pool ever was."""
        most = max(rows, self.rows), max(slots, self.slots)
        return most if most[0] * most[1] <= max(self._largest, rows * slots) else (rows, slots)

    def _swap(self, one: int, other: int) -> None:
        first, second = self.at(one), self.at(other)
        if second is not None:
            second.settle()
        kept = self.kv[:, :, other, :, : second.used if second else 0].clone()
        if first is not None:
            first.settle()
            self.kv[:, :, other, :, : first.used] = self.kv[:, :, one, :, : first.used]
            first.row = other
        if second is not None:
            self.kv[:, :, one, :, : second.used] = kept
            second.row = one
        rows = self._sessions
        rows[one], rows[other] = rows[other], rows[one]

    def _shape(self, rows: int, slots: int) -> tuple[int, ...]:
        config = self._config
        return config.num_layers, 2, rows, config.num_kv_heads, slots + SPARE, self._width


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
    def used(self) -> int:
        """Number of slots that hold a token."""
        return self.length + self.pending

    def read(self, length: int) -> Tensor:
        """Return the first `length` slots: [layers, keys then values of the kv_heads, length, width]"""
        self.settle()
        if self.row is None:  # nothing was ever stored
            shape = self.pool.kv.shape
            return self.pool.kv.new_empty(shape[0], 2 * shape[3], 0, shape[5])
        return self.pool.kv[:, :, self.row, :, :length].flatten(1, 2)

    @torch.inference_mode()
    def settle(self) -> None:
        """Perform the deferred moves."""
        if self.moves is None:
            return
        (source, start), self.moves = self.moves, None
        mine = self.pool.kv[:, :, self.row]
        index = to_device(source, np.int64, mine.device)
        mine[:, :, :, start : start + len(source)] = mine[:, :, :, index]

    def visible_bits(self) -> np.ndarray:
        """Return which pending nodes each pending node sees, itself included, as bits: int64 [pending, WORDS]"""
        rows = bytearray().join([row.ljust(self.pending, b"\0") for row in self._visible])
        return visible_bits(np.ndarray((self.pending, self.pending), bool, rows))

    def _resize(self, slots: int) -> None:
        self.pool.fit(self, slots)

    def _move(self, source: Sequence[int], start: int) -> None:
        self.settle()
        self.moves = np.array(source, dtype=np.int64), start
        if len(source) > MOST_MOVES:
            self.settle()

    @torch.inference_mode()
    def _copy(self, other: GraphSession, length: int) -> None:
        other.settle()
        if length:
            self.pool.kv[:, :, self.row, :, :length] = self.pool.kv[:, :, other.row, :, :length]
