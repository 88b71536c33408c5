"""A draft model with other tokens than the target's reads the text in its own, and offers the tokens that both have.

Universal assisted decoding, token-level intersection: Timor et al., 2025, arXiv:2502.05202.

Its scores are cut to the shared tokens, so each rule judges it like a draft with a smaller vocabulary: the text stays
exact at any temperature. It grows a chain; what the target wrote is cut into its tokens again before each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from outpace.core.errors import UserError, check_whole
from outpace.core.needs import Given
from outpace.core.scores import Held
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Offer, Request, Row, Source
from outpace.drafters._chance import Choices
from outpace.drafters._drawn import Draws, draw_layer, is_drawn
from outpace.models.base import Model, chain
from outpace.models.text.shared import shared_tokens
from outpace.rules.base import best_rows

_CHUNK = 256  # tokens a forward
_ONE = Draws((1,))  # child that is drawn below a node
_TAIL = 48  # target tokens that are cut anew; from so many on, the older ones stay as they are
_BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
_FORCED = 160  # from so many on, even where the cut changes the tokens around it


@dataclass(frozen=True)
class Options:
    """`width`: tokens offered at each place of the chain, which goes on behind the likeliest."""

    width: int = 4

    def __post_init__(self) -> None:
        check_whole("width", self.width, 1, 64)


@dataclass
class TranslatedState(DraftState):
    """`frozen`: the draft's tokens of the text but for its end, `tail`: that end in the target's. The session holds
    `read`, of which the last ones are the chain down to the node with id `leaf`."""

    session: Any = None
    frozen: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # the draft's tokens of text and chain
    leaf: int = -1  # -1: the root
    offers: dict[int, Offer] = field(default_factory=dict)  # by node id


class _Pair(NamedTuple):
    """Both tokenizers and the ids that they share: the target's, rising, and the draft's beside them."""

    target: Any
    draft: Any
    target_ids: np.ndarray
    draft_ids: np.ndarray


class Translated(Drafter):
    """Keeps a session of the draft model in its own tokens for each request."""

    name = "translated"

    def __init__(self, model: Model, pair: _Pair, vocab_size: int, options: Options) -> None:
        self._model, self._pair, self._vocab, self._options = model, pair, vocab_size, options
        self._columns = torch.from_numpy(pair.draft_ids).to(model.device)
        self._to_draft = dict(zip(pair.target_ids.tolist(), pair.draft_ids.tolist(), strict=True))
        self._choices = Choices()

    def weight_bytes(self, source: Source) -> int | None:
        """Those of the draft model."""
        return self._model.weight_bytes

    def open(self, request: Request) -> TranslatedState:
        frozen = self._pair.draft.encode(self._pair.target.decode(request.prompt, skip_special=False))
        longest = len(frozen) + 4 * request.max_tokens + _CHUNK
        session = self._model.open(min(longest, self._model.max_positions), _CHUNK)
        return TranslatedState(request, list(request.prompt), session=session, frozen=frozen, wanted=list(frozen))

    def grow(self, states: Sequence[TranslatedState], trees: Sequence[TokenTree]) -> list[int]:
        """One more place of each chain, by one forward for all; nodes added to each tree."""
        added = [0] * len(trees)
        able = [n for n, s in enumerate(states) if len(s.read) < len(s.wanted) <= s.session.capacity]
        if not able:
            return added
        self._catch_up([states[n] for n in able])
        parts = [
            chain(s.session, s.wanted[len(s.read) :], [len(s.wanted) - len(s.read) - 1])
            for s in map(states.__getitem__, able)
        ]
        scores = self._model.score(parts)
        held = Held(scores[:, self._columns], self._pair.target_ids, self._vocab)
        for row, n in enumerate(able):
            _commit(states[n])
            added[n] = self._extend(states[n], trees[n], held.part(slice(row, row + 1)))
        return added

    def observe(self, state: TranslatedState, seen: Observation) -> None:
        self._choices.learn(state.request, state.offers, seen)
        state.tokens += seen.tokens
        state.tail += seen.tokens
        common = len(state.frozen)
        self._freeze(state)
        text = state.frozen + self._cut(state.tail)
        lives = state.leaf in seen.tree.ids and state.wanted[: len(text)] == text
        if not lives:
            state.leaf, state.wanted = -1, text
        while common < min(len(state.read), len(state.wanted) - 1) and state.read[common] == state.wanted[common]:
            common += 1
        common = max(min(common, len(state.read), len(state.wanted) - 1), 0)
        state.session.truncate(common)
        del state.read[common:]
        state.offers = {node: state.offers[node] for node in seen.tree.ids if node in state.offers}

    def close(self, state: TranslatedState) -> None:
        state.session = None

    def _extend(self, state: TranslatedState, tree: TokenTree, held: Held) -> int:
        """Hangs children below the chain's end, and makes the likeliest its end; nodes added."""
        node = tree.ids.index(state.leaf) if state.leaf in tree.ids else 0
        row, before = Row(state.request, state.tokens, _below_root(tree, node), tree.ids[node]), len(tree)
        if is_drawn(state.request):
            draw_layer(tree, [node], held.wide(), [row], _ONE)
            best = tree.children(node)[0] if tree.children(node) else None
        else:
            best = self._pick(state, tree, node, best_rows(held, [row], self._options.width)[0])
        if best is not None:
            state.leaf = tree.ids[best]
            state.wanted.append(self._to_draft[tree.tokens[best]])
        return len(tree) - before

    def _pick(self, state: TranslatedState, tree: TokenTree, node: int, offer: Offer) -> int | None:
        """Adds what is offered below a node; the likeliest child, None where nothing is."""
        tokens, values = offer
        if not tokens:
            return None
        state.offers[tree.ids[node]] = offer
        chances = self._choices.of(state.request).log_chances(values)
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            tree.add(node, token, tree.scores[node] + chance, Role.SECONDARY if rank else Role.PRIMARY)
        return tree.child(node, tokens[0])

    def _catch_up(self, states: Sequence[TranslatedState]) -> None:
        """Feeds what the sessions lack, but for the last chunk."""
        while behind := [state for state in states if len(state.wanted) - len(state.read) > _CHUNK]:
            self._model.score([chain(s.session, s.wanted[len(s.read) : len(s.read) + _CHUNK]) for s in behind])
            for state in behind:
                _commit(state)

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens of a piece of text in the target's; token by token where that is no whole text."""
        text = self._pair.target.decode(tokens, skip_special=False)
        if _BROKEN not in text or len(tokens) < 2:
            own = self._to_draft.get(tokens[0]) if len(tokens) == 1 else None
            ids: list[int] = self._pair.draft.continuation(text) if own is None else [own]
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


def _commit(state: TranslatedState) -> None:
    """What was scored is read."""
    count = state.session.pending
    state.session.keep(range(count))
    state.read += state.wanted[len(state.read) : len(state.read) + count]


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    path = [tree.tokens[one] for one in tree.ancestry(node)]
    return tuple(path[-2::-1])


def build(options: Options, *, given: Given) -> Translated:
    """The drafter for the draft model; UserError without one, or where the tokenizers have no token in common."""
    if given.draft is None:
        raise UserError("drafter translated needs a draft model, name one with --draft (or draft=...)")
    if given.tokenizer is None or given.draft_tokenizer is None:
        raise UserError("drafter translated needs both models' tokenizers; it does not run in worker process")
    pairs = shared_tokens(given.tokenizer, given.draft_tokenizer)
    rows = given.target.vocab_size if given.target is not None else given.tokenizer.size
    pairs = pairs[(pairs[:, 0] < rows) & (pairs[:, 1] < given.draft.vocab_size)]
    if not len(pairs):
        raise UserError("the draft's tokenizer has no token in common with the target's: it cannot draft for it")
    pair = _Pair(given.tokenizer, given.draft_tokenizer, pairs[:, 0].copy(), pairs[:, 1].copy())
    return Translated(given.draft, pair, rows, options)
