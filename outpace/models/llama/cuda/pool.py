"""One storage of keys and values for all sessions of a model, at fixed places, so that a captured forward can read it.

A session holds one row. Before a forward the rows of its sessions are brought to the front, so that attention reads
them as they lie: no keys and values are gathered. Rows and slots grow by doubling; what was captured before is then
captured anew, because the storage has moved.
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
from outpace.models.llama.cuda.captures import seen_bits
from outpace.models.llama.torch.session import KVFormat

SPARE = 8  # slots behind those of the texts: padding is written to the last, nothing reads them
LEAST = 64  # slots
MOST_MOVES = 64  # slots that the next forward moves along; more are moved at once


def pool_shape(slots: Sequence[int]) -> tuple[int, int]:
    """Rows and slots of a pool whose sessions have so many slots each; (0, 0) where none has any."""
    held = [count for count in slots if count]
    return (next_power_of_two(len(held)), next_power_of_two(max(held), LEAST)) if held else (0, 0)


def finite(values: Tensor) -> Tensor:
    """What may be stored. Hidden slots are multiplied by 0, which leaves nan of inf and nan: a request whose numbers
    overflow must not spoil the one that comes into its row."""
    return torch.nan_to_num(values)


class Pool:
    """The storage. `kv` [layers, keys and values, rows, kv_heads, slots + SPARE, width of a held head], finite wherever
    it is."""

    def __init__(self, config: LlamaConfig, holding: KVFormat, device: torch.device) -> None:
        self._config, self._width = config, holding.width
        self._sessions: list[ref[GraphSession] | None] = []  # by row; dead or None: the row is free
        self._largest = 0  # rows times slots that there were at most: so many were allowed
        self.rows = self.slots = 0
        self.kv = torch.zeros(self._shape(0, 0), dtype=holding.dtype, device=device)

    @property
    def padding(self) -> int:
        """The slot to which what nobody wants is written."""
        return self.slots + SPARE - 1

    def at(self, row: int) -> GraphSession | None:
        """The session that holds a row."""
        held = self._sessions[row]
        return held() if held is not None else None

    @torch.inference_mode()
    def fit(self, session: GraphSession, slots: int) -> None:
        """Gives a session a row with at least so many slots; with none, its row is free again."""
        others = [other for row in range(self.rows) if (other := self.at(row)) and other is not session]
        rows, wide = pool_shape([slots, *(other.slots for other in others)])
        if not slots:
            self._leave(session)
        elif rows > self.rows or wide > self.slots:
            self.resize(*self._kept(rows, wide))
        if slots and session.row is None:
            session.row = next(row for row in range(self.rows) if self.at(row) is None)
            self._sessions[session.row] = ref(session)

    @torch.inference_mode()
    def bring_to_front(self, sessions: Sequence[GraphSession]) -> None:
        """Moves these sessions into the first rows, each in the place of one that is not among them."""
        count, chosen = len(sessions), set(map(id, sessions))
        free = [row for row in range(count) if id(self.at(row)) not in chosen]
        for session in sessions:
            if session.row is not None and session.row >= count:
                self._swap(session.row, free.pop())

    def move(self, start: int, source: Tensor, goal: Tensor) -> None:
        """In the rows from `start` on slots `source` go to `goal`, in all layers. [rows, moves] both"""
        kv = self.kv[:, :, start : start + len(source)]  # [layers, 2, rows, kv_heads, slots, width]
        shape = (*kv.shape[:4], source.shape[1], kv.shape[5])
        moved = kv.gather(4, source[None, None, :, None, :, None].expand(shape))
        kv.scatter_(4, goal[None, None, :, None, :, None].expand(shape), moved)

    def _leave(self, session: GraphSession) -> None:
        if session.row is not None:
            self._sessions[session.row], session.row = None, None

    def _kept(self, rows: int, slots: int) -> tuple[int, int]:
        """The larger of what there is and what is needed in both directions, unless that is more than ever was."""
        most = max(rows, self.rows), max(slots, self.slots)
        return most if most[0] * most[1] <= max(self._largest, rows * slots) else (rows, slots)

    def resize(self, rows: int, slots: int) -> None:
        """New storage with what the sessions hold, in the first rows. While it is copied, both are there."""
        sessions = [session for row in range(self.rows) if (session := self.at(row)) is not None]
        kv = self.kv.new_zeros(self._shape(rows, slots))
        for row, session in enumerate(sessions):
            session.settle()
            kv[:, :, row, :, : session.held] = self.kv[:, :, session.row, :, : session.held]
        for row, session in enumerate(sessions):
            session.row = row
        self.kv, self.rows, self.slots = kv, rows, slots
        self._largest = max(self._largest, rows * slots)
        self._sessions = [*map(ref, sessions), *[None] * (rows - len(sessions))]

    def _swap(self, one: int, other: int) -> None:
        first, second = self.at(one), self.at(other)
        if second is not None:
            second.settle()
        kept = self.kv[:, :, other, :, : second.held if second else 0].clone()
        if first is not None:
            first.settle()
            self.kv[:, :, other, :, : first.held] = self.kv[:, :, one, :, : first.held]
            first.row = other
        if second is not None:
            self.kv[:, :, one, :, : second.held] = kept
            second.row = one
        held = self._sessions
        held[one], held[other] = held[other], held[one]

    def _shape(self, rows: int, slots: int) -> tuple[int, ...]:
        config = self._config
        return config.num_layers, 2, rows, config.num_kv_heads, slots + SPARE, self._width


class GraphSession(Session):
    """One row of a pool. What `keep` moves is moved by the next forward, or by whoever needs the row before."""

    def __init__(self, capacity: int, room: int, pool: Pool) -> None:
        super().__init__(capacity, room)
        self.pool, self.row = pool, None  # type: Pool, int | None
        self.moves: tuple[np.ndarray, int] | None = None  # slots, and where the first of them goes

    @property
    def place(self) -> int:
        """The row of a session that has slots."""
        assert self.row is not None, "a session without slots has no row"
        return self.row

    @property
    def held(self) -> int:
        """Slots that hold anything."""
        return self.length + self.pending

    def read(self, length: int) -> Tensor:
        """What the first `length` slots hold. [layers, keys then values of the kv_heads, length, width]"""
        self.settle()
        if self.row is None:  # nothing was ever stored
            shape = self.pool.kv.shape
            return self.pool.kv.new_empty(shape[0], 2 * shape[3], 0, shape[5])
        return self.pool.kv[:, :, self.row, :, :length].flatten(1, 2)

    @torch.inference_mode()
    def settle(self) -> None:
        """Carries out what `keep` left to be moved."""
        if self.moves is None:
            return
        (source, start), self.moves = self.moves, None
        mine = self.pool.kv[:, :, self.row]
        index = to_device(source, np.int64, mine.device)
        mine[:, :, :, start : start + len(source)] = mine[:, :, :, index]

    def seen_bits(self) -> np.ndarray:
        """Which pending nodes each pending node sees, itself among them, as bits: int64 [pending, WORDS]"""
        rows = bytearray().join([row.ljust(self.pending, b"\0") for row in self._sees])
        return seen_bits(np.ndarray((self.pending, self.pending), bool, rows))

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
