"""What a draft model with other tokens than the target's needs of a text: a session in its own tokens, cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.logits import Held
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request, Source
from outpace.drafters._grower import most_bytes
from outpace.models.base import Model, chain

_CHUNK = 256  # tokens a forward
_TAIL = 48  # target tokens that are cut anew; from so many on, the older ones stay as they are
_FORCED = 160  # from so many on, even where the cut changes the tokens around it
_TIMES = 2  # as many tokens of its own, and a chunk more, may the draft need for a text; longer ones it does not read
_MOST = 8  # forwards of one growth, where nothing new came of the ones before
BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet


@dataclass
class TranslatedState(DraftState):
    """`frozen`: the draft's tokens of the text but for its end, `tail`: that end in the target's. The session holds
    `read`, of which the last ones are drafted; `wanted` is what it is to hold."""

    session: Any = None
    frozen: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)


class Translating(Drafter):
    """Keeps a session of the draft model in its own tokens for each request. How scores become nodes, and what of a
    draft lives on, is said in a class for each way."""

    name = "translated"

    def __init__(self, model: Model, target: Any, draft: Any) -> None:
        """`target` and `draft` are the tokenizers."""
        self._model, self._target, self._draft = model, target, draft
        self._to_draft: dict[int, int] = {}  # tokens that both have

    def weight_bytes(self, source: Source) -> int | None:
        """Those of the draft model."""
        return self._model.weight_bytes

    def open(self, request: Request) -> Any:
        raise NotImplementedError

    def extend(self, state: Any, tree: TokenTree, scores: Held) -> int:
        """Goes on behind the chain's end by the draft's scores there, one row; nodes added."""
        raise NotImplementedError

    def learn(self, state: Any, seen: Observation) -> None:
        """What came true."""
        raise NotImplementedError

    def lives(self, state: Any, seen: Observation, text: Sequence[int]) -> bool:
        """Whether the chain goes on behind what was written, which is `text` in the draft's tokens; else it is over."""
        raise NotImplementedError

    def begin(self, request: Request, kind: type[Any]) -> Any:
        """A state of this kind, with the prompt in the draft's tokens."""
        frozen = self._draft.encode(self._target.decode(request.prompt, skip_special=False))
        longest = len(frozen) + 4 * request.max_tokens + _CHUNK
        session = self._model.open(min(longest, self._model.max_positions), _CHUNK)
        return kind(request, list(request.prompt), session=session, frozen=frozen, wanted=list(frozen))

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> list[int]:
        """One more place of each chain, by one forward for all; nodes added to each tree. Another forward for those
        whose place gave no new node."""
        added, asked = [0] * len(trees), list(range(len(trees)))
        for _ in range(_MOST):
            asked = [n for n in asked if len(states[n].read) < len(states[n].wanted) <= _room(states[n])]
            if not asked:
                break
            self._catch_up([states[n] for n in asked])
            some = [states[n] for n in asked]
            parts = [chain(s.session, s.wanted[len(s.read) :], [len(s.wanted) - len(s.read) - 1]) for s in some]
            scores = self._model.score_held(parts)
            for row, n in enumerate(asked):
                _commit(states[n])
                added[n] = self.extend(states[n], trees[n], scores.part(slice(row, row + 1)))
            asked = [n for n in asked if not added[n]]
        return added

    def observe(self, state: Any, seen: Observation) -> None:
        self.learn(state, seen)
        state.tokens += seen.tokens
        state.tail += seen.tokens
        common = len(state.frozen)
        self._freeze(state)
        text = state.frozen + self._cut(state.tail)
        if not self.lives(state, seen, text):
            state.wanted = text
        while common < min(len(state.read), len(state.wanted) - 1) and state.read[common] == state.wanted[common]:
            common += 1
        common = max(min(common, len(state.read), len(state.wanted) - 1), 0)
        state.session.truncate(common)
        del state.read[common:]

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        return most_bytes(self._model, [_most(length + 1) for length in lengths])

    def pause(self, state: Any) -> None:
        state.session.truncate(0)
        state.session.trim()
        state.read = []

    def close(self, state: Any) -> None:
        state.session = None

    def _catch_up(self, states: Sequence[TranslatedState]) -> None:
        """Feeds what the sessions lack, but for the last chunk."""
        while behind := [state for state in states if len(state.wanted) - len(state.read) > _CHUNK]:
            self._model.score_held([chain(s.session, s.wanted[len(s.read) : len(s.read) + _CHUNK]) for s in behind])
            for state in behind:
                _commit(state)

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens of a piece of text in the target's; token by token where that is no whole text."""
        text = self._target.decode(tokens, skip_special=False)
        if BROKEN not in text or len(tokens) < 2:
            own = self._to_draft.get(tokens[0]) if len(tokens) == 1 else None
            ids: list[int] = self._draft.continuation(text) if own is None else [own]
            return ids
        return [own for token in tokens for own in self._cut([token])]

    def _freeze(self, state: TranslatedState) -> None:
        """Lets the older half of a long tail stay as it is cut, where that changes nothing."""
        while len(state.tail) > _TAIL:
            half = len(state.tail) // 2
            older, newer = self._cut(state.tail[:half]), self._cut(state.tail[half:])
            if older + newer != self._cut(state.tail) and len(state.tail) < _FORCED:
                return
            state.frozen += older
            del state.tail[:half]


def _most(length: int) -> int:
    """Tokens of the draft's that are read of a text of so many of the target's."""
    return _TIMES * length + _CHUNK


def _room(state: TranslatedState) -> int:
    """Tokens that the session may hold at this place of the text."""
    return min(_most(len(state.tokens)), state.session.capacity)


def _commit(state: TranslatedState) -> None:
    """What was scored is read."""
    count = state.session.pending
    state.session.keep(range(count))
    state.read += state.wanted[len(state.read) : len(state.read) + count]
