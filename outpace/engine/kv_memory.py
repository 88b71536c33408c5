"""The memory budget for keys and values, and the prefix cache.

Sessions grow by blocks with their texts, and only what they hold counts: an answer that may become long takes no more
than its tokens so far. A prompt counts in full from the start, so that reading it never has to stop; its slots are
allocated as it is read, because new memory is filled with zeros and all slots of a long prompt at once would delay
all requests. Drafts count with the most that they can hold for a text of that length, so that they can grow without
asking. When the budget is used up, kept texts are dropped first; then the scheduler pauses the youngest sequence.

A request that begins like a text in memory (an earlier turn of a chat, a common system prompt, another answer to its
own prompt) copies those keys and values instead of computing them again. In exact mode the copy is bit for
bit what reading would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from outpace.core.errors import UserError
from outpace.core.machine import free_bytes
from outpace.engine.earlier_texts import HashedTokens, PrefixIndex
from outpace.engine.sequence import DraftLink, TokenSequence
from outpace.models.base import Model, Session

_AHEAD = 64  # slots that every running sequence should still get when another one is admitted
_WORTH_WAITING = 64  # tokens that another sequence is reading now: wait and copy them
_SHORT = 8  # a kept text loses little if it loses at most 1/8 of what is shared
_SNAPSHOT_TOKENS = 2048  # tokens of a text between two snapshots of recurrent states
_AT_ONCE = 512  # slots allocated when the reading of a prompt begins; then they double each time
_GIB = 1 << 30

Drafts = Callable[[Sequence[tuple[TokenSequence, int]]], int]
"""Returns the most bytes that drafts may hold for sequences with texts of these lengths."""


@dataclass(eq=False)
class _KeptText:
    """The session of a finished sequence, and the text whose keys and values it holds.

    `draft`: holds the state of a drafter that needs the target's output for prompts; `draft_bytes`: the most memory
    that this state takes.
    """

    text: HashedTokens
    session: Session
    draft: DraftLink
    draft_bytes: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.text.tokens


class _SharedRead(NamedTuple):
    """A sequence that reads the first `shared` tokens of another text; `start` of them are in memory elsewhere."""

    sequence: TokenSequence
    shared: int
    start: int


class KVMemory:
    """Opens sessions and grows them within the budget. Kept texts are dropped least recently used first."""

    def __init__(self, target: Model, drafts: Drafts, max_pending: int, budget: float | None, max_kept: int) -> None:
        """`max_pending`: pending nodes of a session; `budget` in GiB, None for half of the free memory."""
        self._target, self._drafts, self._max_pending, self._max_kept = target, drafts, max_pending, max_kept
        if budget is None:
            self.budget = max(0, free_bytes(target.device) - target.promised_bytes) // 2
        else:
            self.budget = int(budget * _GIB)
        self._kept: list[_KeptText] = []
        self._open: dict[TokenSequence, None] = {}
        self._stored: PrefixIndex[TokenSequence | _KeptText] = (
            PrefixIndex()
        )  # running ones up to the length that the last search saw
        self._reading: PrefixIndex[TokenSequence] = PrefixIndex()  # all tokens of the texts that are being read
        self._followed: WeakKeyDictionary[TokenSequence, _SharedRead] = WeakKeyDictionary()

    @property
    def used(self) -> int:
        """Bytes used by running sequences, their drafts and kept texts."""
        return self._bytes(self._slots(), self._kept)

    def check(self, sequence: TokenSequence) -> None:
        """Raise UserError for a request that could not run even alone."""
        alone = [(sequence, self._max_slots(sequence))]
        needed, drafts = self._bytes(alone), self._drafts(alone)
        if needed > self.budget:
            with_drafts = f", {drafts / _GIB:.2f} of them for drafts" if drafts else ""
            held = "keys, values and recurrent states" if self._target.state_bytes else "keys and values"
            raise UserError(
                f"prompt and answer of {self._capacity(sequence)} tokens need {needed / _GIB:.2f} GiB of"
                f" {held}{with_drafts}, the budget is {self.budget / _GIB:.2f}: allow fewer tokens or a larger budget"
            )

    def has_room(self, sequence: TokenSequence) -> bool:
        """Return whether a waiting sequence fits in with the others and all of them can grow for a while."""
        if not self._open:
            return True
        ahead = [(sequence, self._slots_for(sequence, len(sequence.committed) + _AHEAD))]
        for other, slots in self._slots():
            ahead.append((other, other.kv.session.slots_after(slots + _AHEAD, exact=True)))
        return self._bytes(ahead) <= self.budget

    def should_wait(self, sequence: TokenSequence) -> bool:
        """Return whether another sequence is now reading much of what this one would have to read."""
        if not self._may_reuse(sequence):
            return False
        followed = self._followed.get(sequence)
        if followed is None or not self._is_reading(followed.sequence):
            followed = self._follow(sequence)
        if followed is None:
            return False
        there = max(followed.start, min(followed.shared, followed.sequence.prefilled))
        return followed.shared - there >= _WORTH_WAITING

    def open(self, sequence: TokenSequence) -> None:
        """Open the session of a sequence that fits in, with the prefix of its text that is in memory."""
        self._followed.pop(sequence, None)
        holder, length = self._best_start(sequence)
        if holder is not None and sequence.needs_prompt_feedback and sequence.draft.state is None:
            sequence.draft.source, sequence.draft.prompt_read = holder.draft.state, length
        session, slots = (
            self._target.open(self._capacity(sequence), self._max_pending),
            self._slots_for(sequence, len(sequence.committed)),
        )
        session.source_length = sequence.source_length
        if isinstance(holder, _KeptText) and self._is_replaced(
            holder, length, sequence, session.slots_after(slots, exact=True)
        ):
            self._drop(holder)
            holder.session.truncate(length)
            holder.session.trim()
            holder.session.capacity = session.capacity
            session, holder = holder.session, None
        at_once = min(slots, max(length, _AT_ONCE))
        if not self._reserve(sequence, session, at_once, slots, holder) and session.length:
            session.trim(exact=True)  # a new session would have fitted in
            self._reserve(sequence, session, at_once, slots, holder)
        if holder is not None:
            self._copy(holder, session, length)
        sequence.kv.session = session
        self._open[sequence] = None
        if sequence.unread > 0:
            self._reading.hold(sequence, len(sequence.committed))

    def fit(self, sequence: TokenSequence, rows: int) -> bool:
        """Reserve slots for a sequence's rows in the next pass; return False if another one must be paused first."""
        session, tokens = sequence.kv.session, sequence.prefilled + rows
        if tokens + sequence.draft.needs.session <= session.slots:
            return True
        if (slots := self._slots_for(sequence, tokens)) <= session.slots:
            return True
        promised = self._promised(sequence)
        return self._reserve(sequence, session, max(slots, min(2 * session.slots, promised)), promised)

    def take_snapshot(self, sequence: TokenSequence) -> None:
        """Remember the recurrent states at the end of a prompt and every few thousand tokens, if there is memory left:
        other texts can start from there."""
        session = sequence.kv.session
        if not session.is_recurrent:
            return
        is_far = sequence.prefilled - session.cut_below(sequence.prefilled - 1) >= _SNAPSHOT_TOKENS
        if (is_far or sequence.unread <= 0) and self.used + self._target.state_bytes <= self.budget:
            sequence.kv.commit_pending()
            session.take_snapshot()

    def release(self, sequence: TokenSequence) -> None:
        """Release a sequence's keys and values; they are read again when it is opened the next time."""
        self._stored.drop(sequence)
        self._reading.drop(sequence)
        sequence.kv.release()
        self._open.pop(sequence, None)

    def close(self, sequence: TokenSequence) -> None:
        """Take back a finished sequence's session, and keep it if its content is known."""
        kv = sequence.kv
        if self._max_kept and kv.is_open and not kv.is_broken:
            kv.is_broken = True  # unknown content, if an interrupt comes before the end and this is repeated
            self._keep(sequence)
        sequence.draft.state = None
        self.release(sequence)

    def _keep(self, sequence: TokenSequence) -> None:
        """Keep a finished sequence's text, and drop the oldest ones beyond the limit."""
        session, keep = sequence.kv.session, sequence.kv.keep
        session.keep(keep[: len(sequence.committed) - session.length])  # without what a stop or the limit cut off
        session.trim()
        draft, state = sequence.draft, sequence.draft.state
        held = self._drafts([(sequence, session.length)]) if state is not None else 0
        kept = _KeptText(sequence.text.upto(session.length), session, DraftLink(draft.name, state=state), held)
        self._kept.append(kept)
        self._stored.hold(kept, session.length)
        for oldest in self._kept[: -self._max_kept]:
            self._drop(oldest)

    def _follow(self, sequence: TokenSequence) -> _SharedRead | None:
        """Find the sequence that reads most of what this one begins with."""
        self._followed.pop(sequence, None)
        for other in self._open:
            self._is_reading(other)
        max_length = len(sequence.committed) - 1
        found = [
            (sequence.text.common(other.text, max_length), other)
            for other in self._reading.nearest(sequence.text, max_length)
        ]
        if self._target.state_bytes:  # it can start from the end of a whole prompt, or from a snapshot
            found = [
                (shared if shared == len(other.committed) - 1 else shared // _SNAPSHOT_TOKENS * _SNAPSHOT_TOKENS, other)
                for shared, other in found
            ]
        if not found:
            return None
        shared, other = max(found, key=lambda each: each[0])
        self._followed[sequence] = followed = _SharedRead(other, shared, self._best_start(sequence)[1])
        return followed

    def _is_reading(self, sequence: TokenSequence) -> bool:
        if sequence in self._reading and sequence.unread <= 0:
            self._reading.drop(sequence)
        return sequence in self._reading

    def _best_start(self, sequence: TokenSequence) -> tuple[TokenSequence | _KeptText | None, int]:
        """Return the holder of the longest prefix of a sequence's text, and its length."""
        best: tuple[TokenSequence | _KeptText | None, int] = (None, 0)
        if self._may_reuse(sequence):
            for other in self._open:
                self._stored.hold(other, other.prefilled)
            max_length = len(sequence.committed) - 1
            for holder in self._stored.nearest(sequence.text, max_length):
                held = holder.session.length if isinstance(holder, _KeptText) else holder.prefilled
                length = sequence.text.common(holder.text, min(max_length, held))
                if sequence.needs_prompt_feedback:
                    length = _shared_by_drafts(holder, sequence, length)
                session = holder.session if isinstance(holder, _KeptText) else holder.kv.session
                length = session.cut_below(length, held)
                if length > 0 and (length, isinstance(holder, _KeptText)) > (best[1], isinstance(best[0], _KeptText)):
                    best = (holder, length)
        return best

    def _is_replaced(self, kept: _KeptText, length: int, sequence: TokenSequence, slots: int) -> bool:
        """Return whether a sequence takes over the kept session with its prefix instead of copying it to a new one of
        `slots` slots: because both do not fit, or because little is lost. Little means nothing, only a continuation of
        the sequence's own text, or less than 1/8 of the shared prefix."""
        lost = len(kept.text.tokens) - length
        if not lost or _SHORT * lost <= length or kept.text.tokens[: length + 1] == sequence.committed:
            return True
        return self._bytes([*self._slots(), (sequence, slots)], [kept]) > self.budget

    def _copy(self, holder: TokenSequence | _KeptText, session: Session, length: int) -> None:
        if isinstance(holder, _KeptText):
            self._kept = [*(kept for kept in self._kept if kept is not holder), holder]  # in order of last use
        else:
            holder.kv.commit_pending()
        session.start_from(holder.session if isinstance(holder, _KeptText) else holder.kv.session, length)

    def _may_reuse(self, sequence: TokenSequence) -> bool:
        """Return whether it may start from a copy: not if its log-probabilities need the whole prompt."""
        return self._max_kept > 0 and not sequence.needs_prompt_logprobs

    def _reserve(
        self,
        sequence: TokenSequence,
        session: Session,
        slots: int,
        promised: int,
        spared: TokenSequence | _KeptText | None = None,
    ) -> bool:
        """Reserve slots for a sequence, dropping kept texts except `spared` for all that it is promised; return False
        if the budget does not suffice."""
        others = [pair for pair in self._slots() if pair[0] is not sequence]
        budget = self.budget
        if self._target.state_bytes:
            taken_over = [] if sequence.kv.is_open else [session]  # which `_bytes` does not count yet
            held, own = sum(one.num_snapshots for one in taken_over), session.slots_after(promised, exact=True)
            budget -= self._target.state_bytes * held
            if self._bytes([*others, (sequence, own)]) > budget:
                budget = self.budget
                for one in [*(other.kv.session for other in self._open if other is not spared), *taken_over]:
                    one.drop_snapshots()
        for exact in (False, True):
            needed = [
                *others,
                (sequence, max(session.slots_after(slots, exact), session.slots_after(promised, exact=True))),
            ]
            if self._bytes(needed) <= budget:
                break
        else:
            return False
        self._make_room(needed, budget, spared)
        session.reserve(slots, exact)
        return True

    def _make_room(
        self, needed: Sequence[tuple[TokenSequence, int]], budget: int, spared: TokenSequence | _KeptText | None
    ) -> None:
        """Drop kept texts, least recently used first, until the rest fits in with what these sequences need."""
        for kept in [kept for kept in self._kept if kept is not spared]:
            if self._bytes(needed, self._kept) <= budget:
                return
            self._drop(kept)

    def _slots(self) -> list[tuple[TokenSequence, int]]:
        """Return the slots of each running sequence, including those its prompt will still need."""
        return [
            (sequence, sequence.kv.session.slots_after(self._promised(sequence), exact=True)) for sequence in self._open
        ]

    def _promised(self, sequence: TokenSequence) -> int:
        """Return the slots that a sequence needs for the text it still has to read; 0 if it has read all."""
        return self._slots_for(sequence, len(sequence.committed)) if (sequence.unread > 0) else 0

    def _bytes(self, texts: Sequence[tuple[TokenSequence, int]], kept: Sequence[_KeptText] = ()) -> int:
        """Return the bytes of sequences with these slots, of kept texts, and of the drafts of both."""
        slots = [*(slots for _, slots in texts), *(one.session.slots for one in kept)]
        held = self._target.stored_bytes(slots) + self._drafts(texts) + sum(one.draft_bytes for one in kept)
        if self._target.state_bytes:
            sessions = [*(one.kv.session for one, _ in texts if one.kv.is_open), *(one.session for one in kept)]
            held += self._target.state_bytes * sum(session.num_snapshots for session in sessions)
        return held

    def _slots_for(self, sequence: TokenSequence, tokens: int) -> int:
        """Return the slots for `tokens` tokens of a sequence and for the nodes that its drafter may add to them."""
        return min(tokens + sequence.draft.needs.session, self._max_slots(sequence))

    def _max_slots(self, sequence: TokenSequence) -> int:
        return self._capacity(sequence) + self._max_pending

    def _drop(self, kept: _KeptText) -> None:
        self._stored.drop(kept)
        self._kept.remove(kept)

    def _capacity(self, sequence: TokenSequence) -> int:
        return len(sequence.request.prompt) + sequence.request.max_tokens


def _shared_by_drafts(holder: TokenSequence | _KeptText, sequence: TokenSequence, length: int) -> int:
    """Return how many of the `length` positions that two texts share can be reused if the drafter of `sequence` needs
    the target's output for them: those that its state has read already, or can copy from the state of `holder`.

    The last position is not copied, because the drafter's slot for it depends on the token after it.
    """
    mine, its = sequence.draft, holder.draft
    if mine.state is not None:  # `sequence` was paused
        return min(length, mine.prompt_read)
    return min(length - 1, its.state.held_prefix) if its.state is not None and its.name == mine.name else 0
