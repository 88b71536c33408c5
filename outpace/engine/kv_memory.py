"""The budget for keys and values: who gets a session, whose grows, and which finished texts are kept to start from.

Sessions grow by blocks as texts do, and what is there counts: an answer that may become long takes no more than it has
written. A prompt counts whole from the start, so that its reading never has to stop, and its slots are made as it is
read: new memory is filled with zeros, and those of a long prompt would keep everybody waiting at once. Drafts count
with the most that they can hold for as long a text, so that they need not ask before they grow. Where the budget ends
kept texts go first, then the engine pauses the request that came last.

A request that begins like a text that is there (a turn before it in the same chat, a common system prompt, another
answer to its own prompt) starts from a copy of those keys and values instead of reading them again. In exact mode the
copy is what reading would give, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.core.machine import available_bytes
from outpace.engine.prefix_index import HashedTokens, PrefixIndex
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, Session

_AHEAD = 64  # slots that each running request should still find when another one joins
_WORTH_WAITING = 64  # tokens that another request is just reading: wait for them
_SHORT = 8  # a text is short beside one of so many times its tokens
_AT_ONCE = 512  # slots that a prompt finds when its reading begins; then twice as many each time
_GIB = 1 << 30

Drafts = Callable[[Sequence[tuple[TokenSequence, int]]], int]
"""The most bytes that drafts hold for requests whose texts have so many tokens each."""


@dataclass(eq=False)
class _Kept:
    """The session of a finished request, and the text whose keys and values it holds."""

    text: HashedTokens
    session: Session

    @property
    def tokens(self) -> Sequence[int]:
        return self.text.tokens


class _Followed(NamedTuple):
    """A request that is reading `shared` tokens with which another begins, who found `start` of them elsewhere."""

    run: TokenSequence
    shared: int
    start: int


class KVMemory:
    """Opens sessions and lets them grow within the budget. Of kept texts the longest unused goes first."""

    def __init__(self, target: Model, drafts: Drafts, room: int, budget: float | None, most_kept: int) -> None:
        """`room`: pending nodes a session; `budget` in GiB, None for half of what is free."""
        self._target, self._drafts, self._room, self._most_kept = target, drafts, room, most_kept
        self.budget = free_bytes(target.device) // 2 if budget is None else int(budget * _GIB)
        self._kept: list[_Kept] = []
        self._open: list[TokenSequence] = []
        self._stored: PrefixIndex[TokenSequence | _Kept] = (
            PrefixIndex()
        )  # running ones as far as the last search saw them
        self._reading: PrefixIndex[TokenSequence] = PrefixIndex()  # whole texts that are being read
        self._followed: WeakKeyDictionary[TokenSequence, _Followed] = WeakKeyDictionary()

    @property
    def used(self) -> int:
        """Bytes that running requests, their drafts and kept texts take."""
        return self._bytes(self._slots(), (kept.session.slots for kept in self._kept))

    def check(self, run: TokenSequence) -> None:
        """UserError where a request could not run even alone."""
        most = [(run, self._most(run))]
        needed, drafts = self._bytes(most), self._drafts(most)
        if needed > self.budget:
            with_drafts = f", {drafts / _GIB:.2f} of them for drafts" if drafts else ""
            raise UserError(
                f"prompt and answer of {self._capacity(run)} tokens need {needed / _GIB:.2f} GiB of keys and values"
                f"{with_drafts}, the budget is {self.budget / _GIB:.2f}: allow fewer tokens or a larger budget"
            )

    def has_room(self, run: TokenSequence) -> bool:
        """Whether a waiting request's text fits beside the others, and all of them may write on for a while."""
        if not self._open:
            return True
        ahead = [(run, self._slots_for(run, len(run.committed) + _AHEAD))]
        for other, slots in self._slots():
            ahead.append((other, other.storage.session.slots_after(slots + _AHEAD, least=True)))
        return self._bytes(ahead) <= self.budget

    def should_wait(self, run: TokenSequence) -> bool:
        """Whether another request is just reading much of what this one would have to read."""
        if not self._may_reuse(run):
            return False
        followed = self._followed.get(run)
        if followed is None or not self._is_reading(followed.run):
            followed = self._follow(run)
        if followed is None:
            return False
        there = max(followed.start, min(followed.shared, followed.run.prefilled))
        return followed.shared - there >= _WORTH_WAITING

    def open(self, run: TokenSequence) -> None:
        """Gives a request for which there is room its session, with what is known of its text."""
        self._followed.pop(run, None)
        holder, length = self._best_start(run)
        session, slots = self._target.open(self._capacity(run), self._room), self._slots_for(run, len(run.committed))
        if isinstance(holder, _Kept) and self._is_replaced(holder, length, run, session.slots_after(slots, least=True)):
            self._drop(holder)
            holder.session.truncate(length)
            holder.session.trim()
            holder.session.capacity = session.capacity
            session, holder = holder.session, None
        self._reserve(run, session, min(slots, max(length, _AT_ONCE)), slots, holder)
        if holder is not None:
            self._copy(holder, session, length)
        run.storage.session = session
        self._open.append(run)
        if run.is_prefilling:
            self._reading.hold(run, len(run.committed))

    def fit(self, run: TokenSequence, rows: int) -> bool:
        """Makes slots for a request's rows of the next pass; False: another one has to go first."""
        session, tokens = run.storage.session, run.prefilled + rows
        if tokens + run.draft.needs.session <= session.slots:
            return True
        if (slots := self._slots_for(run, tokens)) <= session.slots:
            return True
        promised = self._promised(run)
        return self._reserve(run, session, max(slots, min(2 * session.slots, promised)), promised)

    def release(self, run: TokenSequence) -> None:
        """Takes a running request's keys and values away: they are read again when it is opened the next time."""
        self._open.remove(run)
        self._stored.drop(run)
        self._reading.drop(run)
        run.storage.release()

    def close(self, run: TokenSequence) -> None:
        """Takes a finished request's session back, to be kept if what it holds is known."""
        if run not in self._open:
            return
        session, keep = run.storage.session, run.storage.keep
        self.release(run)
        if not self._most_kept or run.storage.is_broken:
            return
        session.keep(keep[: len(run.committed) - session.length])  # not what a stop or the limit cut off
        session.trim()
        kept = _Kept(run.text.upto(session.length), session)
        self._kept.append(kept)
        self._stored.hold(kept, session.length)
        for oldest in self._kept[: -self._most_kept]:
            self._drop(oldest)

    def _follow(self, run: TokenSequence) -> _Followed | None:
        """Finds who reads most of what this request begins with."""
        self._followed.pop(run, None)
        for other in self._open:
            self._is_reading(other)
        most = len(run.committed) - 1
        found = [(run.text.common(other.text, most), other) for other in self._reading.nearest(run.text, most)]
        if not found:
            return None
        shared, other = max(found, key=lambda each: each[0])
        self._followed[run] = followed = _Followed(other, shared, self._best_start(run)[1])
        return followed

    def _is_reading(self, run: TokenSequence) -> bool:
        if run in self._reading and not run.is_prefilling:
            self._reading.drop(run)
        return run in self._reading

    def _best_start(self, run: TokenSequence) -> tuple[TokenSequence | _Kept | None, int]:
        """Who holds the longest beginning of a request's text, and how many tokens of it."""
        best: tuple[TokenSequence | _Kept | None, int] = (None, 0)
        if self._may_reuse(run):
            for other in self._open:
                self._stored.hold(other, other.prefilled)
            most = len(run.committed) - 1
            for holder in self._stored.nearest(run.text, most):
                held = holder.session.length if isinstance(holder, _Kept) else holder.prefilled
                length = run.text.common(holder.text, min(most, held))
                if (length, isinstance(holder, _Kept)) > (best[1], isinstance(best[0], _Kept)):
                    best = (holder, length)
        return best

    def _is_replaced(self, kept: _Kept, length: int, run: TokenSequence, slots: int) -> bool:
        """Whether a request takes over the kept session that it begins like, in place of a new one of so many slots:
        little of that is lost, or both together are too much. Little is nothing, what stands behind all of the
        request's own text too, and what is short beside that which both share."""
        lost = len(kept.text.tokens) - length
        if not lost or _SHORT * lost <= length or kept.text.tokens[: length + 1] == run.committed:
            return True
        return self._bytes([*self._slots(), (run, slots)], [kept.session.slots]) > self.budget

    def _copy(self, holder: TokenSequence | _Kept, session: Session, length: int) -> None:
        if isinstance(holder, _Kept):
            self._kept.remove(holder)  # the last used stands last
            self._kept.append(holder)
        else:
            holder.storage.settle()
        session.start_from(holder.session if isinstance(holder, _Kept) else holder.storage.session, length)

    def _may_reuse(self, run: TokenSequence) -> bool:
        """A request that reports on its prompt, or whose drafter is told of it, has to read it."""
        return self._most_kept > 0 and not run.must_read

    def _reserve(
        self,
        run: TokenSequence,
        session: Session,
        slots: int,
        promised: int,
        spared: TokenSequence | _Kept | None = None,
    ) -> bool:
        """Makes slots for a request, and lets kept texts go for all that it is promised but the one that is spared;
        False: they are too many."""
        others = [pair for pair in self._slots() if pair[0] is not run]
        for least in (False, True):
            needed = [*others, (run, max(session.slots_after(slots, least), session.slots_after(promised, least=True)))]
            if self._bytes(needed) <= self.budget:
                break
        else:
            return False
        self._make_room(needed, spared)
        session.reserve(slots, least)
        return True

    def _make_room(self, needed: Sequence[tuple[TokenSequence, int]], spared: TokenSequence | _Kept | None) -> None:
        """Lets kept texts go, the longest unused first, until the others have room for what these requests need."""
        for kept in [kept for kept in self._kept if kept is not spared]:
            if self._bytes(needed, (other.session.slots for other in self._kept)) <= self.budget:
                return
            self._drop(kept)

    def _slots(self) -> list[tuple[TokenSequence, int]]:
        """Those of the running requests' sessions, and those that their prompts are still to get."""
        return [(run, run.storage.session.slots_after(self._promised(run), least=True)) for run in self._open]

    def _promised(self, run: TokenSequence) -> int:
        """Slots that a request needs for what it still has to read."""
        return self._slots_for(run, len(run.committed)) if run.is_prefilling else 0

    def _bytes(self, texts: Sequence[tuple[TokenSequence, int]], kept: Iterable[int] = ()) -> int:
        """What requests take whose sessions have so many slots, their drafts included, and kept texts that have."""
        return self._target.stored_bytes([*(slots for _, slots in texts), *kept]) + self._drafts(texts)

    def _slots_for(self, run: TokenSequence, tokens: int) -> int:
        """Slots for so many tokens of a request's, and for what its drafter may hang behind them."""
        return min(tokens + run.draft.needs.session, self._most(run))

    def _most(self, run: TokenSequence) -> int:
        return self._capacity(run) + self._room

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._stored.drop(kept)

    def _capacity(self, run: TokenSequence) -> int:
        return min(len(run.request.prompt) + run.request.max_tokens, self._target.max_positions)


def free_bytes(device: torch.device | str) -> int:
    """Memory that is free for use where the model is."""
    if str(device).startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
