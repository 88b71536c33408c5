"""The budget for keys and values: who gets a session now, and which finished texts are kept for others to start from.

A request that begins like a text that is there (a turn before it in the same chat, a common system prompt, another
answer to its own prompt) starts from a copy of those keys and values instead of reading them again. In exact mode the
copy is what reading would give, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from outpace.core.errors import UserError
from outpace.core.types import Request
from outpace.engine.request import Running
from outpace.models.base import Model, Session

_LEAST = 8  # tokens in common that are worth a copy
_WORTH_WAITING = 64  # tokens that another request is just reading: wait for them
_GIB = 1 << 30


class _Kept(NamedTuple):
    """The session of a finished request and the tokens whose keys and values it holds."""

    tokens: Sequence[int]
    session: Session


class Memory:
    """Opens sessions within the budget. Of kept texts the longest unused goes first."""

    def __init__(self, target: Model, room: int, budget: float | None, most_kept: int) -> None:
        """`room`: pending nodes a session; `budget` in GiB, None for half of what is free."""
        self._target, self._room, self._most_kept = target, room, most_kept
        self._budget = free_bytes(target.device) // 2 if budget is None else int(budget * _GIB)
        self._kept: list[_Kept] = []
        self._open: list[Session] = []

    def check(self, request: Request) -> None:
        """UserError where a request could not run even alone."""
        needed = self._bytes(self._capacity(request) + self._room)
        if needed > self._budget:
            raise UserError(
                f"prompt and answer of {self._capacity(request)} tokens need {needed / _GIB:.2f} GiB of keys and "
                f"values, the budget is {self._budget / _GIB:.2f}: allow fewer tokens or a larger budget"
            )

    def open(self, run: Running, running: Iterable[Running]) -> bool:
        """Gives a request its session; False: there is no room yet."""
        needed = self._capacity(run.request)
        kept, session, length = self._best_start(run, running)
        if kept is not None and kept.session.capacity >= needed:
            self._kept.remove(kept)
            kept.session.truncate(length)
            run.session = kept.session
        else:
            if not self._make_room(needed + self._room, kept):
                return False
            run.session = self._target.open(needed, self._room)
            if session is not None and (kept is None or kept in self._kept):
                run.session.start_from(session, length)
            if kept is not None and length == len(kept.tokens) and kept in self._kept:
                self._kept.remove(kept)
        self._open.append(run.session)
        run.prefilled = run.session.length
        return True

    def should_wait(self, run: Running, running: Iterable[Running]) -> bool:
        """Whether another request is just reading much of what this one would have to read."""
        if not self._may_reuse(run):
            return False
        here = self._best_start(run, running)[2]
        prompt = run.request.prompt
        return any(
            _common(prompt[:-1], other.request.prompt) - here >= _WORTH_WAITING
            for other in running
            if other.is_prefilling
        )

    def close(self, run: Running) -> None:
        """Takes a request's session back, to be kept if what it holds is known."""
        session = run.session
        del run.session  # a request that is over may be held for long, its keys and values may not
        self._open.remove(session)
        if not self._most_kept or run.is_broken:
            return
        session.keep(run.keep[: len(run.committed) - session.length])  # not what a stop or the limit cut off
        self._kept = [*self._kept, _Kept(run.committed[: session.length], session)][-self._most_kept :]

    def _best_start(self, run: Running, running: Iterable[Running]) -> tuple[_Kept | None, Session | None, int]:
        """The text with the longest common beginning: kept or running, its session, the number of tokens in common."""
        best: tuple[_Kept | None, Session | None, int] = (None, None, _LEAST - 1)
        if self._may_reuse(run):
            prompt = run.request.prompt[:-1]
            for kept in self._kept:
                length = _common(prompt, kept.tokens)
                if length > best[2]:
                    best = (kept, kept.session, length)
            for other in running:
                if other.keep:  # accepted in the last round, and as good as committed: it can be copied
                    other.session.keep(other.keep)
                    other.keep = ()
                length = min(_common(prompt, other.committed), other.session.length)
                if length > best[2]:
                    best = (None, other.session, length)
        return best if best[1] is not None else (None, None, 0)

    def _may_reuse(self, run: Running) -> bool:
        """A request that reports on its prompt has to read it."""
        return self._most_kept > 0 and not (run.request.logprobs is not None and run.request.logprobs.prompt)

    def _make_room(self, slots: int, last: _Kept | None) -> bool:
        """Lets kept texts go until so many slots fit; `last` goes last."""
        while self._used() + self._bytes(slots) > self._budget:
            if not self._kept:
                return False
            self._kept.remove(next((kept for kept in self._kept if kept is not last), self._kept[0]))
        return True

    def _capacity(self, request: Request) -> int:
        return min(len(request.prompt) + request.max_tokens, self._target.max_positions)

    def _used(self) -> int:
        sessions = [*self._open, *(kept.session for kept in self._kept)]
        return sum(self._bytes(session.capacity + session.room) for session in sessions)

    def _bytes(self, slots: int) -> int:
        return slots * self._target.token_bytes


def free_bytes(device: torch.device | str) -> int:
    """Memory that is free for use where the model is."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 * _GIB
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():  # a container's own limit
        free = min(free, max(int(limit[0]) - int(used[0]), 0))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
