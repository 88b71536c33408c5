"""A draft model with another tokenizer: it reads the text in its own tokens and proposes in the target's.

Universal assisted decoding: Timor et al., 2025, arXiv:2502.05202.

By tokens: its scores are cut to the tokens that both have, so each rule judges it like a draft with a smaller
vocabulary, and it drafts alike at any temperature. By text: it writes its own likeliest tokens, whatever they are, and
their text is cut into the target's tokens; for greedy requests. What the target wrote is cut into the draft's tokens
again before each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.core.arrays import uploaded
from outpace.core.errors import UserError, check_whole, unknown
from outpace.core.logits import Held, host_rows, tensor_of
from outpace.core.needs import Given
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Observation, Offer, Request, Row
from outpace.drafters._calibration import AcceptanceRate, PickModels
from outpace.drafters._sampled import DrawCounts, draw_layer, is_drawn
from outpace.drafters._translating import BROKEN, TranslatedState, Translating
from outpace.models.text.shared import shared_tokens
from outpace.rules.base import best_rows

_ONE = DrawCounts((1,))  # child that is drawn below a node
_ANCHOR = 4  # tokens before the draft's: how they are spelled may depend on what stands before
_LIKELY = 0.6  # that a re-encoded token is what the target writes, until it is known
WAYS = ("tokens", "text")


@dataclass(frozen=True)
class Options:
    """`by`: tokens: proposes the tokens that both tokenizers have, at any temperature; text: proposes the draft's text,
    tokenized again for the target, for greedy requests; `width`: with tokens, the tokens proposed at each place of
    the chain, which continues after the likeliest."""

    by: str = "tokens"
    width: int = 4

    def __post_init__(self) -> None:
        check_whole("width", self.width, 1, 64)
        if self.by not in WAYS:
            raise unknown("by", self.by, WAYS)


@dataclass
class ByTokensState(TranslatedState):
    """The chain ends at the node with id `leaf`."""

    leaf: int = -1  # -1: the root
    offers: dict[int, Offer] = field(default_factory=dict)  # by node id


class ByTokens(Translating):
    """Offers the tokens that both have."""

    def __init__(self, given: Given, options: Options) -> None:
        """UserError where the tokenizers have no token in common."""
        super().__init__(given.draft, given.tokenizer, given.draft_tokenizer)
        pairs = shared_tokens(given.tokenizer, given.draft_tokenizer)
        self._vocab = given.target.vocab_size if given.target is not None else given.tokenizer.size
        pairs = pairs[(pairs[:, 0] < self._vocab) & (pairs[:, 1] < given.draft.vocab_size)]
        if not len(pairs):
            advice = "it cannot draft for it by tokens; it may by text (--by text)"
            raise UserError(f"the draft's tokenizer has no token in common with the target's: {advice}")
        self._pairs = pairs  # [shared tokens, (the target's, the draft's)], rising by the first
        self._to_draft = dict(pairs.tolist())
        self._ids: np.ndarray | None = None  # of them those that the draft's output layer has, the target's ids
        self._columns = np.empty(0, np.int64)  # where the draft's scores have them
        self._choices, self._width = PickModels(), options.width

    def open(self, request: Request) -> ByTokensState:
        state: ByTokensState = self.begin(request, ByTokensState)
        return state

    def extend(self, state: ByTokensState, tree: TokenTree, scores: Held) -> int:
        """Hangs children below the chain's end, and makes the likeliest its end."""
        held = self._of_target(scores)
        if not held.values.shape[1]:
            return 0
        node = tree.ids.index(state.leaf) if state.leaf in tree.ids else 0
        row, before = Row(state.request, state.tokens, _below_root(tree, node), tree.ids[node]), len(tree)
        if is_drawn(state.request):
            draw_layer(tree, [node], held, [row], _ONE)
            best = tree.children(node)[0] if tree.children(node) else None
        else:
            best = self._pick(state, tree, node, best_rows(held, [row], self._width)[0])
        if best is not None:
            state.leaf = tree.ids[best]
            state.wanted.append(self._to_draft[tree.tokens[best]])
        return len(tree) - before

    def _of_target(self, scores: Held) -> Held:
        """The scores of the tokens that both have. On the host without torch, whose threads cost more than a row."""
        if self._ids is None:
            self._ids, self._columns = _shared(self._pairs, scores.ids)
        host = host_rows(scores.values)
        if host is not None:
            return Held(host[:, self._columns], self._ids, self._vocab)
        values = tensor_of(scores.values)
        return Held(values[:, uploaded(self._columns, np.int64, values.device)], self._ids, self._vocab)

    def learn(self, state: ByTokensState, seen: Observation) -> None:
        self._choices.learn(state.request, state.offers, seen)
        state.offers = {node: state.offers[node] for node in seen.tree.ids if node in state.offers}

    def lives(self, state: ByTokensState, seen: Observation, text: Sequence[int]) -> bool:
        """Where its end stands in the tree that lives on, and the text is cut as it was."""
        lives = state.leaf in seen.tree.ids and state.wanted[: len(text)] == list(text)
        state.leaf = state.leaf if lives else -1
        return lives

    def _pick(self, state: ByTokensState, tree: TokenTree, node: int, offer: Offer) -> int | None:
        """Adds what is offered below a node; the likeliest child, None where nothing is."""
        tokens, values = offer
        if not tokens:
            return None
        state.offers[tree.ids[node]] = offer
        chances = self._choices.of(state.request).log_chances(values)
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            tree.add(node, token, tree.scores[node] + chance, Role.SECONDARY if rank else Role.PRIMARY)
        return tree.child(node, tokens[0])


@dataclass
class ByTextState(TranslatedState):
    """`own`: the draft's tokens behind the text; `planted`: the tokens that were offered below each node, by its id."""

    own: list[int] = field(default_factory=list)
    planted: dict[int, set[int]] = field(default_factory=dict)


class ByText(Translating):
    """Offers the text of the draft's likeliest tokens, in the target's."""

    def __init__(self, given: Given) -> None:
        super().__init__(given.draft, given.tokenizer, given.draft_tokenizer)
        self._rate = AcceptanceRate(_LIKELY)

    def open(self, request: Request) -> ByTextState:
        state: ByTextState = self.begin(request, ByTextState)
        return state

    def extend(self, state: ByTextState, tree: TokenTree, scores: Held) -> int:
        """One more token of the draft's; its text may end the last of the target's tokens in another way."""
        place = int(scores.values[0].argmax())
        token = place if scores.ids is None else int(scores.ids[place])
        if token in self._draft.special_ids:
            return 0  # it would end the answer here
        state.own.append(token)
        state.wanted.append(token)
        node, before = 0, len(tree)
        for one in self._target.continuation(self._spelled(state)):
            state.planted.setdefault(tree.ids[node], set()).add(one)
            child = tree.child(node, one)
            if child is None:
                child = tree.add(node, one, tree.scores[node] + math.log(self._rate.value))
                assert child is not None
            node = child
        return len(tree) - before

    def learn(self, state: ByTextState, seen: Observation) -> None:
        for node, written in zip(seen.path, seen.tokens, strict=False):
            if node in state.planted:
                self._rate.learn(written in state.planted[node])
        state.planted = {}

    def lives(self, state: ByTextState, seen: Observation, text: Sequence[int]) -> bool:
        """Never: it is drafted anew, and what it has in common with the text need not be read again."""
        state.own = []
        return False

    def _spelled(self, state: ByTextState) -> str:
        """The text of the draft's own tokens, without a character that is not whole yet."""
        anchor = state.wanted[: len(state.wanted) - len(state.own)][-_ANCHOR:]
        known = self._draft.decode(anchor, skip_special=False)
        text: str = self._draft.decode([*anchor, *state.own], skip_special=False)
        return text[len(known) :].rstrip(BROKEN) if text.startswith(known) else ""


def _shared(pairs: np.ndarray, held: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Of pairs of tokens those whose second is held (rising; None: all are): the first ones, and the second ones'
    places."""
    if held is None:
        return pairs[:, 0].copy(), pairs[:, 1].copy()
    pairs = pairs[np.isin(pairs[:, 1], held)]
    return pairs[:, 0].copy(), np.searchsorted(held, pairs[:, 1])


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    path = [tree.tokens[one] for one in tree.ancestry(node)]
    return tuple(path[-2::-1])


def build(options: Options, *, given: Given) -> Translating:
    """The drafter for the draft model; UserError without one, or where the tokenizers have no token in common."""
    if given.draft is None:
        raise UserError("drafter translated needs a draft model, name one with --draft (or draft=...)")
    if given.tokenizer is None or given.draft_tokenizer is None:
        raise UserError("drafter translated needs both models' tokenizers; it does not run in worker process")
    return ByText(given) if options.by == "text" else ByTokens(given, options)
