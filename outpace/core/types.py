"""What the floors hand to one another: requests, what coroutines ask for, verdicts, steps, and the drafter's verb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outpace.core.carried import Carries
from outpace.core.carried import CarryOut as CarryOut
from outpace.core.constraints import BannedText, Constraint
from outpace.core.distribution import RandomSource, TokenDistribution
from outpace.core.drafting import NO_NEEDS, Needs, TakesOrders, TargetFeedback
from outpace.core.errors import check_range, check_whole
from outpace.core.logits import SparseLogits
from outpace.core.logits import TopK as TopK
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import Siblings, TokenTree

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Rule:
    """Judges a tree by the target's scores. `reduce` runs where the scores are, `walk` on the host with integers."""

    lossless: bool  # the distribution of the answers is the target's own
    keyed: bool = False  # the text follows from the request and the target alone, however it is drafted
    siblings: Siblings  # how a drafter that can choose is to make a node's children
    fan: bool = False  # a node may have several drawn children
    raw: bool = False  # it compares q at temperature 1 and without filters too
    leaf_q: bool = False  # it wants q after every node that is verified, the last ones too
    chance: RandomSource = RandomSource()  # decides what the rule, and a drafter that draws for it, leave to chance
    judges_greedy, judges_sampled = False, True  # requests of temperature 0, all others
    needs: Needs = NO_NEEDS  # its rows then carry hidden states

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[Any]:
        """Scores [rows, vocab] to one small value a row: mostly the token that the target writes there."""
        raise NotImplementedError

    def picks_among_all(self, sampling: Sampling) -> bool:
        """Whether the walk follows one picked token a row, and the pick among the tokens that a constraint allows is
        the pick among all wherever that is allowed: a row then needs a mask only where its pick is refused."""
        return False

    def walk(self, tree: TokenTree, picks: Sequence[Any]) -> Verdict:
        """The verdict on a tree whose first len(picks) nodes have a row."""
        raise NotImplementedError

    def proposal(self, q: TokenDistribution, row: Row) -> TokenDistribution:
        """What the node's children are drawn from, where q is the draft's own."""
        return q

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """A drafter's scores [rows, vocab] on the scale by which this rule's target will choose, highest first."""
        raise NotImplementedError

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK] | None:
        """The best `count` tokens of each row of a drafter's scores on the host [rows, held], faster than by `rank`;
        an empty offer, or None for all rows, where `rank` has to say."""
        return None


@dataclass(frozen=True)
class Adjustments:
    """What moves single tokens' logits before temperature; see `core.adjust` for the order and the formulas."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: BannedText | None = None  # strings that the answer must not contain
    min_tokens: int = 0  # no stop token before so many tokens
    allowed: tuple[int, ...] | None = None  # no token but these; None: all

    def __post_init__(self) -> None:
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_whole("min_tokens", self.min_tokens, 0)
        for token, bias in self.logit_bias:
            check_range(f"logit_bias of token {token}", bias, -100.0, 100.0)


@dataclass(frozen=True)
class LogprobsOptions:
    """Asks for log-probabilities: of the written tokens and the `top` best beside them, as the model gave them or
    `processed` (after adjustments, temperature and filters); `prompt`: of the prompt's tokens too."""

    top: int = 0
    processed: bool = False
    prompt: bool = False

    def __post_init__(self) -> None:
        check_whole("logprobs", self.top, 0, 1024)


class TokenLogprobs(NamedTuple):
    """Natural logarithms: of the token that was written, and of the best tokens there, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    """One answer to write. With the target, it alone decides the text: method, drafter and batch do not."""

    prompt: tuple[int, ...]
    rule: Rule
    max_tokens: int = 128
    sampling: Sampling = GREEDY
    seed: int = 0
    choice: int = 0  # tells the answers of one prompt apart
    stop_ids: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    logprobs: LogprobsOptions | None = None
    constraint: Constraint | None = None  # of this request alone
    nodes: int | None = None  # that its trees may have at most, of those that the engine allows
    rounds: bool = False  # what each round verified is kept for whoever asks
    prediction: tuple[int, ...] = ()  # what the caller expects to be written: drafted from, and nothing else
    recalled: tuple[int, ...] = ()  # what followed this prompt in an earlier text: drafted from as a prediction is
    cache_salt: str | None = None  # keys and values are reused among requests of one key only


class Row(NamedTuple):
    """Whose score row this is. `committed` is the prompt and what is written of the answer, `path` the drafted tokens
    from there down to the row's node, `node_id` that node's id. Read at once: `committed` grows when the round ends."""

    request: Request
    committed: Sequence[int]
    path: tuple[int, ...] = ()
    node_id: int = 0
    is_open: bool = False
    hidden: Tensor | None = None  # after the layers that its rule needs [layers, width]

    @property
    def position(self) -> int:
        """Where the token that the row decides stands in the text."""
        return len(self.committed) + len(self.path)


def tree_rows(request: Request, committed: Sequence[int], tree: TokenTree) -> list[Row]:
    """One row for every node of a tree whose root is the last committed token."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [Row(request, committed, path, node_id) for path, node_id in zip(paths, tree.ids, strict=True)]


class Verdict(NamedTuple):
    """What a rule accepted: nodes from the root down, and the target's own token after the last of them.
    `next_token` is None where the path ends on a late child, which has no score row yet. `relaxed`: of the accepted
    tokens, those that the exact rule would have rejected with the same random numbers."""

    path: list[int]
    next_token: int | None
    relaxed: int = 0


class Source(NamedTuple):
    """Where proposals come from: a drafter by its file's name, and whether it runs a model for them. Costs and trust
    are kept by source. `is_fitted`: its chances follow what came true in this request already."""

    name: str
    runs_model: bool
    is_fitted: bool = False


class Draft(NamedTuple):
    """Asks for the tree to grow, by one source or by all (None); it is sent the number of nodes added (0: no more)."""

    tree: TokenTree
    source: Source | None = None


class Verify(NamedTuple):
    """A coroutine asks for the target's judgement of the tree as it stands; it is sent the rule's reduced rows."""

    tree: TokenTree
    more: int = 0  # passes that may follow one over a root alone: each adds what was picked at the last node, below it


class Await(NamedTuple):
    """Lets the worker add `layers` since the last correction, and grow the tree to `depth` below its root, within its
    patience. Before Verify a coroutine asks for itself alone; after Verify all requests wait."""

    layers: int = 0
    depth: int = 0


class Commit(NamedTuple):
    """A coroutine hands in its verdict; it is sent a tree that holds the new root alone."""

    tree: TokenTree
    verdict: Verdict
    hit: str | None = None  # CARD: where the next token stood (primary, secondary, late) or "miss"


Ask = Draft | Verify | Await | Commit | CarryOut


class Observation(NamedTuple):
    """What a drafter is told after a verdict: `tokens` were committed, `path` are the ids of the nodes that they follow
    (so `tokens[i]` is what the target wrote after `path[i]`), `tree` lives on below the last token, its root. `seen`:
    of all nodes that were judged, what the drafter needs."""

    path: Sequence[int]
    tokens: Sequence[int]
    tree: TokenTree
    seen: TargetFeedback | None = None


@dataclass
class DraftState:
    """A drafter's own memory of one request. `tokens` are the committed ones, the tree's root last. `base` is the
    target's session where the drafter needs it, which has all but the root: pending nodes may be added to it.
    `has_other_requests`: other requests wait while this one's drafter works."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    base: Any = None
    has_other_requests: bool = False


class Drafter(TakesOrders, Carries):
    """Whatever proposes. Its one verb is `grow`; who calls it, and when, is the difference between the methods."""

    name = "drafter"  # its file's
    runs_model = True  # False: what it proposes costs next to nothing
    is_fitted = False  # see `Source`
    needs: Needs = NO_NEEDS  # the same for all its requests

    @property
    def sources(self) -> tuple[Source, ...]:
        """What `grow_by` may be asked for: itself, or its parts."""
        return (Source(self.name, self.runs_model, self.is_fitted),)

    def sources_for(self, request: Request) -> Sequence[Source]:
        """Those of them that can have something for this request: no other needs to be asked."""
        return self.sources

    def weight_bytes(self, source: Source) -> int | None:
        """Bytes of weights that a step of a source reads; None where it does not tell."""
        return None

    def reads_at_most(self, source: Source) -> int | None:
        """Tokens of a text that a source reads before its first step; None: all."""
        return None

    def open(self, request: Request) -> Any:
        """A DraftState for this request, with the prompt as committed tokens."""
        raise NotImplementedError

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> list[int]:
        """Adds the next bit to every tree in one go; the number of nodes added to each."""
        raise NotImplementedError

    def grow_by(self, source: Source | None, states: Sequence[Any], trees: Sequence[TokenTree]) -> list[int]:
        """As `grow`, by one of the sources alone; None: by all."""
        return self.grow(states, trees) if source is None or source in self.sources else [0] * len(trees)

    def observe(self, state: Any, seen: Observation) -> None:
        """The target has judged, perhaps several times since this drafter was asked last: follow it."""
        raise NotImplementedError

    def read(self, state: Any, seen: TargetFeedback) -> None:
        """A chunk of the prompt was read, where `needs.prompt`; of its last token, the first root, `observe` tells."""
        raise NotImplementedError

    def likelihood(self, state: Any, tokens: Sequence[int]) -> list[float] | None:
        """log q of these tokens one after the other, as it would draft them next; None where it does not tell."""
        return None

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """The most bytes of keys and values that it holds for requests whose texts have so many tokens each; not what
        it has in the target's sessions."""
        return 0

    def pause(self, state: Any) -> None:
        """The request waits for memory: keys and values that are held for it are given back, and read again when it is
        drafted for the next time. The target's session is taken back by whoever lent it."""

    def close(self, state: Any) -> None:
        """The request is over."""

    def end(self) -> None:
        """The engine is closed: what is to be kept between runs is written."""

    def state_dict(self) -> Any:
        """What a profile keeps of it, as JSON has it; None for nothing."""
        return None

    def load_state_dict(self, kept: Any) -> None:
        """Begins from what `state_dict` gave."""


class PendingObservations:
    """What the target walked and wrote since a drafter was told last. It is told when it is asked next, of all rounds
    together: whoever is not asked costs nothing."""

    def __init__(self) -> None:
        self._path: list[int] = []
        self._tokens: list[int] = []
        self._last: Observation | None = None

    def add(self, seen: Observation) -> None:
        """One more round is over."""
        self._path += seen.path
        self._tokens += seen.tokens
        self._last = seen

    def take(self) -> Observation | None:
        """All these rounds as one; None where there are none."""
        last = self._last
        if last is None:
            return None
        together = Observation(self._path, self._tokens, last.tree, last.seen)
        self._path, self._tokens, self._last = [], [], None
        return together
