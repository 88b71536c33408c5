"""A draft model with another tokenizer: it reads the text in its own tokens and proposes in the target's.

Universal assisted decoding: Timor et al., 2025, arXiv:2502.05202.

By tokens: its logits are restricted to the tokens that both vocabularies share, so each rule judges it like a draft
with a smaller vocabulary, at any temperature. By text: it writes its own likeliest tokens, and their text is tokenized
for the target; for greedy requests. The target's text is tokenized for the draft again before each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outpace.core.arrays import to_device
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits, host_rows, tensor_of
from outpace.core.options import MethodOptions, one_of, whole
from outpace.core.stats import acceptance_rate
from outpace.core.tree import UNLIMITED, Role, TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, DraftState, Observation, Request, Row, TopK
from outpace.drafters._model_drafter import DrawCounts, PickModels, draw_level, is_drawn
from outpace.drafters._tree_expander import max_session_bytes, tokens_below_root
from outpace.models.base import Model, chain
from outpace.rules.base import top_k_rows

_CHUNK = 256  # tokens per forward
_TAIL = 48  # target tokens that are tokenized again each round; a longer tail is frozen in part
_FORCED = 160  # a tail of this length is frozen even if that changes tokens at the cut
_TIMES = 2  # the draft reads texts of up to this many times the target's tokens, plus a chunk
_SNAPSHOTS = 3  # of a draft with recurrent layers, at the ends of the last rounds' texts
_MAX_FORWARDS = 8  # forwards of one `grow` while no new node results
_ONE = DrawCounts((1,))  # one child is drawn below a node
_ANCHOR = 4  # tokens before the draft's that are decoded with them, since spelling may depend on them
_LIKELY = 0.6  # prior of the acceptance rate of a re-encoded token
BROKEN = "\ufffd"  # replaces bytes that are not a complete character
WAYS = ("tokens", "text")


@dataclass(frozen=True)
class Options(MethodOptions):
    """How the draft's tokens become the target's."""

    by: str = one_of(
        "tokens",
        WAYS,
        "tokens: proposes the tokens that both tokenizers share, at any temperature; text: proposes the draft's text,"
        " tokenized again for the target, for greedy requests",
    )
    width: int = whole(
        4, 1, 64, help="by tokens: those proposed at each place of a chain, which continues after the likeliest"
    )


@dataclass
class TranslatedState(DraftState):
    """The text in the draft's tokens.

    `frozen`: the draft's tokens of the text without its end; `tail`: that end in the target's tokens. The session holds
    `read`, whose last tokens are drafted; `wanted` is what it is to hold. The chain ends at the node with id `leaf`
    (-1: the root).
    """

    session: Any = None
    frozen: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    leaf: int = -1

    def end(self, tree: TokenTree) -> int:
        """Return the node at which the chain ends."""
        return tree.find(self.leaf) or 0


class TranslatedDrafter(Drafter):
    """Keeps a session of the draft model, in its own tokens, for each request.

    Subclasses turn scores into nodes and decide which part of a draft lives on.
    """

    capabilities = Capabilities((DraftSource("translated", runs_model=True),))
    state_type: type[Any]

    def __init__(self, given: BuildContext) -> None:
        self._model: Model = given.draft
        self._target, self._draft = given.tokenizer, given.draft_tokenizer
        self._to_draft: dict[int, int] = {}  # shared tokens
        source = self.capabilities.sources[0]._replace(weight_bytes=self._model.weight_bytes)
        self.capabilities = replace(
            self.capabilities, sources=(source,), models=(self._model,), memory=self._stored_bytes
        )

    def extend(self, state: Any, tree: TokenTree, scores: SparseLogits) -> int:
        """Extend the chain by the draft's logits at its end, one row; return the number of nodes added."""
        raise NotImplementedError

    def learn(self, state: Any, seen: Observation) -> None:
        """Update estimates by what came true."""
        raise NotImplementedError

    def lives(self, state: Any, seen: Observation, text: Sequence[int]) -> bool:
        """Whether the chain continues after the committed text (`text`, in the draft's tokens), or is dropped."""
        raise NotImplementedError

    def open(self, request: Request) -> Any:
        frozen = self._draft.encode(self._target.decode(request.prompt, skip_special=False))
        longest = len(frozen) + 4 * request.max_tokens + _CHUNK
        session = self._model.open(min(longest, self._model.max_positions), _CHUNK)
        return self.state_type(request, session=session, frozen=frozen, wanted=list(frozen))

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """Extend each chain by one place, with one forward for all, and another one for those whose place gave no new
        node."""
        pairs = [pair for pair in zip(states, trees, strict=True) if _can_read(*pair) and not self._reads_on(pair[0])]
        for _ in range(_MAX_FORWARDS):
            pairs = [pair for pair in pairs if _can_read(*pair)]
            if not pairs:
                break
            some = [state for state, _ in pairs]
            self._catch_up(some)
            parts = [chain(s.session, s.wanted[len(s.read) :], [len(s.wanted) - len(s.read) - 1]) for s in some]
            scores = self._model.score_sparse(parts)
            waiting = []
            for row, (state, tree) in enumerate(pairs):
                _commit(state)
                if not self.extend(state, tree, scores.part(slice(row, row + 1))):
                    waiting.append((state, tree))
            pairs = waiting

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
        common = state.session.cut_below(common)
        state.session.truncate(common)
        state.session.drop_snapshots(_SNAPSHOTS - 1)
        state.session.take_snapshot()
        del state.read[common:]

    def _stored_bytes(self, lengths: Sequence[int]) -> int:
        sessions = max_session_bytes(self._model, [_max_tokens(length + 1) for length in lengths])
        return sessions + _SNAPSHOTS * self._model.state_bytes * len(lengths)

    def pause(self, state: Any) -> None:
        state.session.truncate(0)
        state.session.trim()
        state.read = []

    def _reads_on(self, state: TranslatedState) -> bool:
        """While others wait, read a part of a text that lacks more than may be read in this growth; return whether
        there was such a part."""
        if len(state.wanted) - len(state.read) <= min(state.max_read, _CHUNK) or state.max_read == UNLIMITED:
            return False
        first, count = len(state.read), min(state.max_read, _CHUNK)
        self._model.score_sparse([chain(state.session, state.wanted[first : first + count])])
        _commit(state)
        return True

    def _catch_up(self, states: Sequence[TranslatedState]) -> None:
        """Read the tokens that the sessions lack, except the last chunk."""
        while lagging := [state for state in states if len(state.wanted) - len(state.read) > _CHUNK]:
            self._model.score_sparse([chain(s.session, s.wanted[len(s.read) : len(s.read) + _CHUNK]) for s in lagging])
            for state in lagging:
                _commit(state)

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """Tokenize a piece of the target's text for the draft; token by token if it contains incomplete characters."""
        text = self._target.decode(tokens, skip_special=False)
        if BROKEN not in text or len(tokens) < 2:
            own = self._to_draft.get(tokens[0]) if len(tokens) == 1 else None
            ids: list[int] = self._draft.continuation(text) if own is None else [own]
            return ids
        return [own for token in tokens for own in self._cut([token])]

    def _freeze(self, state: TranslatedState) -> None:
        """Freeze the older half of a long tail if that does not change its tokens."""
        while len(state.tail) > _TAIL:
            half = len(state.tail) // 2
            older, newer = self._cut(state.tail[:half]), self._cut(state.tail[half:])
            if older + newer != self._cut(state.tail) and len(state.tail) < _FORCED:
                return
            state.frozen += older
            del state.tail[:half]


def _max_tokens(length: int) -> int:
    """Return the most draft tokens that are read of a text of this many target tokens."""
    return _TIMES * length + _CHUNK


def _can_read(state: TranslatedState, tree: TokenTree) -> bool:
    """Whether there is something to read that the session may hold, and the chain may become longer."""
    max_tokens = min(_max_tokens(len(state.tokens)), state.session.capacity)
    return len(state.read) < len(state.wanted) <= max_tokens and tree.depth(state.end(tree)) < tree.max_depth


def _commit(state: TranslatedState) -> None:
    """Mark what was scored as read."""
    count = state.session.pending
    state.session.keep(range(count))
    state.read += state.wanted[len(state.read) : len(state.read) + count]


@dataclass
class ByTokensState(TranslatedState):
    """`offers`: proposals below a tree node, by id."""

    offers: dict[int, TopK] = field(default_factory=dict)


class ByTokens(TranslatedDrafter):
    """Proposes the tokens that both vocabularies share."""

    state_type = ByTokensState

    def __init__(self, given: BuildContext, options: Options) -> None:
        """UserError if the tokenizers share no token."""
        super().__init__(given)
        pairs = shared_tokens(given.tokenizer, given.draft_tokenizer)
        self._vocab = given.target.vocab_size if given.target is not None else given.tokenizer.size
        pairs = pairs[(pairs[:, 0] < self._vocab) & (pairs[:, 1] < given.draft.vocab_size)]
        if not len(pairs):
            advice = "it cannot draft for it by tokens; it may by text (--by text)"
            raise UserError(f"the draft's tokenizer has no token in common with the target's: {advice}")
        self._pairs = pairs  # [shared tokens, (target id, draft id)], sorted by target id
        self._to_draft = dict(pairs.tolist())
        self._ids: np.ndarray | None = None  # target ids of the shared tokens that the draft's output layer has
        self._columns = np.empty(0, np.int64)  # their columns in the draft's logits
        self._pick_models, self._width = PickModels(), options.width

    def extend(self, state: ByTokensState, tree: TokenTree, scores: SparseLogits) -> int:
        """Add children below the chain's end; the likeliest becomes its end."""
        held = self._of_target(scores)
        if not held.values.shape[1]:
            return 0
        node = state.end(tree)
        row, before = Row(state.request, state.tokens, tokens_below_root(tree, node), tree.ids[node]), len(tree)
        if is_drawn(state.request):
            draw_level(tree, [node], held, [row], _ONE)
            best = tree.children(node)[0] if tree.children(node) else None
        else:
            best = self._pick(state, tree, node, top_k_rows(held, [row], self._width)[0])
        if best is not None:
            state.leaf = tree.ids[best]
            state.wanted.append(self._to_draft[tree.tokens[best]])
        return len(tree) - before

    def _of_target(self, scores: SparseLogits) -> SparseLogits:
        """Return the logits of shared tokens; on the host without torch, whose threads cost more than a row."""
        if self._ids is None:
            pairs = self._pairs if scores.ids is None else self._pairs[np.isin(self._pairs[:, 1], scores.ids)]
            self._ids, self._columns = pairs[:, 0].copy(), pairs[:, 1].copy()
            if scores.ids is not None:
                self._columns = np.searchsorted(scores.ids, self._columns)
        host = host_rows(scores.values)
        if host is not None:
            return SparseLogits(host[:, self._columns], self._ids, self._vocab)
        values = tensor_of(scores.values)
        return SparseLogits(values[:, to_device(self._columns, np.int64, values.device)], self._ids, self._vocab)

    def learn(self, state: ByTokensState, seen: Observation) -> None:
        self._pick_models.learn(state.request, state.offers, seen)
        state.offers = {node: state.offers[node] for node in seen.tree.ids if node in state.offers}

    def lives(self, state: ByTokensState, seen: Observation, text: Sequence[int]) -> bool:
        """Continue if the chain's end is in the new tree and the text was tokenized as before."""
        lives = state.leaf in seen.tree.ids and state.wanted[: len(text)] == list(text)
        state.leaf = state.leaf if lives else -1
        return lives

    def _pick(self, state: ByTokensState, tree: TokenTree, node: int, offer: TopK) -> int | None:
        """Add the proposals below a node; return the likeliest child, None without proposals."""
        tokens, values = offer
        if not tokens:
            return None
        state.offers[tree.ids[node]] = offer
        chances = self._pick_models.for_request(state.request).log_chances(values)
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            tree.add(node, token, tree.scores[node] + chance, Role.SECONDARY if rank else Role.PRIMARY)
        return tree.child(node, tokens[0])


@dataclass
class ByTextState(TranslatedState):
    """`own`: the draft's tokens after the text; `proposed`: the tokens proposed below each node, by id."""

    own: list[int] = field(default_factory=list)
    proposed: dict[int, set[int]] = field(default_factory=dict)


class ByText(TranslatedDrafter):
    """Proposes the text of the draft's likeliest tokens, in the target's tokens."""

    state_type = ByTextState

    def __init__(self, given: BuildContext) -> None:
        super().__init__(given)
        self._rate = acceptance_rate(_LIKELY)

    def extend(self, state: ByTextState, tree: TokenTree, scores: SparseLogits) -> int:
        """Take one more of the draft's tokens; its text may change how the last target token is split."""
        place = int(scores.values[0].argmax())
        token = place if scores.ids is None else int(scores.ids[place])
        if token in self._draft.special_ids:
            return 0  # it would end the answer
        state.own.append(token)
        state.wanted.append(token)
        node, before = 0, len(tree)
        for one in self._target.continuation(self._spelled(state))[: tree.max_depth]:
            state.proposed.setdefault(tree.ids[node], set()).add(one)
            child = tree.child(node, one)
            if child is None:
                child = tree.add(node, one, tree.scores[node] + math.log(self._rate.value))
                assert child is not None
            node = child
        state.leaf = tree.ids[node]
        return len(tree) - before

    def learn(self, state: ByTextState, seen: Observation) -> None:
        for node, written in zip(seen.node_ids, seen.tokens, strict=False):
            if node in state.proposed:
                self._rate.learn(written in state.proposed[node])
        state.proposed = {}

    def lives(self, state: ByTextState, seen: Observation, text: Sequence[int]) -> bool:
        """Return False: it drafts from the start, and tokens in common with the text need not be read again."""
        state.own, state.leaf = [], -1
        return False

    def _spelled(self, state: ByTextState) -> str:
        """Return the text of the draft's own tokens, without an incomplete character at its end."""
        anchor = state.wanted[: len(state.wanted) - len(state.own)][-_ANCHOR:]
        known = self._draft.decode(anchor, skip_special=False)
        text: str = self._draft.decode([*anchor, *state.own], skip_special=False)
        return text[len(known) :].rstrip(BROKEN) if text.startswith(known) else ""


def shared_tokens(target: Any, draft: Any) -> np.ndarray:
    """Return pairs of ids with equal bytes, (target's, draft's), sorted by the target's; special tokens are not text.

    The arguments are tokenizers. int64 [tokens, 2]
    """
    by_text = {text: token for token, text in _texts(draft)}  # of equal ones the last: words come after single bytes
    pairs = [(token, by_text[text]) for token, text in _texts(target) if text in by_text]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _texts(tokenizer: Any) -> list[tuple[int, bytes]]:
    special = tokenizer.special_ids
    return sorted((token, text) for token, text in tokenizer.bytes_by_id().items() if token not in special)


def build(options: Options, *, given: BuildContext) -> TranslatedDrafter:
    """Build the drafter; UserError without a draft model, or if the tokenizers share no token."""
    if given.draft is None:
        raise UserError("drafter translated needs a draft model, name one with --draft (or draft=...)")
    if given.tokenizer is None or given.draft_tokenizer is None:
        raise UserError("drafter translated needs both models' tokenizers; it does not run in worker process")
    return ByText(given) if options.by == "text" else ByTokens(given, options)
