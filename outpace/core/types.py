"""The values that pass between the layers, and the contracts of a rule and of a drafter. Start reading here.

One request lives like this. The engine opens a `Request` and a decoder, a coroutine that yields `Draft`, `Verify`,
`Await` and `Commit`. Draft: a `Drafter` grows a `TokenTree` below the last committed token. Verify: the target scores
the tree's nodes in one pass, and the request's `Rule` reduces each `Row` of logits to a small value. Commit: the rule's
`walk` turns these values into a `Verdict`, whose tokens are appended to the text; the drafter receives an `Observation`
of it, and the next round begins with a tree that holds the new root alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, final

from outpace.core.distribution import RandomSource
from outpace.core.drafting import NO_NEEDS, UNRESTRICTED, DraftDirectives, Needs, TargetFeedback, join_feedback
from outpace.core.errors import check_range, check_whole
from outpace.core.logits import TopK as TopK
from outpace.core.noise import row_key
from outpace.core.options import MethodOptions
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.stats import RoundPlan
from outpace.core.tree import UNLIMITED, Siblings, TokenTree

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from outpace.core.constraints import BannedText, Constraint


class Pick(Enum):
    """How a rule picks one token per row, where the kernels can do the same."""

    BEST_SCORE = "best score"  # the argmax of the adjusted logits; of equal ones the lowest id
    RACE = "race"  # the argmax of log p plus the noise of the row's position


class Ranks(Enum):
    """How a rule ranks a drafter's tokens, where the kernels can do the same."""

    LOG_Q = "log q"
    RACE = "log q plus the noise of the row's position"
    SCORES = "the given scores"


@dataclass(frozen=True)
class RuleTraits:
    """What the engine, the drafters and the kernels need to know about a rule.

    lossless: answers have the target's own distribution. same_text: the text depends on the request and the target
    alone, however it is drafted. siblings: how drafters must make the children of a node. several_draws: a node may
    have several drawn children. unscaled_q: the rule also reads q at temperature 1 and without filters. q_at_leaves: it
    reads q after every verified node, the last ones included. greedy, sampled: it accepts requests of temperature 0,
    of other temperatures. pick, ranks: see `Pick` and `Ranks`; None for other rules. takes_arrays: `reduce` accepts
    float32 numpy arrays as well as tensors. hidden_layers: its rows carry the hidden states after these layers.
    """

    lossless: bool
    siblings: Siblings
    same_text: bool = False
    several_draws: bool = False
    unscaled_q: bool = False
    q_at_leaves: bool = False
    greedy: bool = False
    sampled: bool = True
    pick: Pick | None = None
    ranks: Ranks | None = Ranks.LOG_Q
    takes_arrays: bool = False
    hidden_layers: tuple[int, ...] = ()

    def picks_before_masking(self, sampling: Sampling) -> bool:
        """Whether the best token among all, where a constraint allows it, is also the best among the allowed ones.

        A row then needs the constraint's mask only if its pick is refused. Filters depend on the other tokens.
        """
        return self.pick is Pick.BEST_SCORE or (self.pick is Pick.RACE and not sampling.filters)


class Rule:
    """Verifies a tree by the target's logits: `reduce` runs where the logits are, `walk` on the host with integers.

    A subclass is a rule: the name of its file is the name of the rule, and the docstring of that file is its help. A
    subclass of another rule loses the traits that describe a method which it overrides.
    """

    traits: RuleTraits
    cost: ClassVar[str] = ""  # what it computes for each pass, for the table of methods
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    random_source: RandomSource = RandomSource()  # shared with drafters that draw for the rule

    def __init__(self, options: Any = None) -> None:
        self.options: Any = self.Options() if options is None else options

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls).keys()
        if hasattr(super(cls, cls), "traits") and own & {"reduce", "walk"}:
            cls.traits = replace(cls.traits, pick=None)
        if hasattr(super(cls, cls), "traits") and "reduce" in own:
            cls.traits = replace(cls.traits, takes_arrays=False)
        if hasattr(cls, "traits") and "rank" in own:
            cls.traits = replace(cls.traits, ranks=None)

    def check_target(self, target: Any) -> None:
        """Raise UserError if this rule cannot verify drafts of the loaded target, a `models.runtimes.Loaded`."""

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[Any]:
        """Reduce logits [rows, vocab] to one small value per row, usually the token that the target writes there."""
        raise NotImplementedError

    def walk(self, tree: TokenTree, picks: Sequence[Any]) -> Verdict:
        """Return the verdict on a tree whose first len(picks) nodes have a reduced row; by default each is the token
        that the target writes there, which is exact for picked siblings only."""
        return Verdict(*tree.follow([*picks]))

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Map a drafter's logits [rows, vocab] to the scale on which this rule's target will choose, higher first."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adjustments:
    """Changes to single tokens' logits before temperature; `core.adjust` has the order and the formulas."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: BannedText | None = None  # strings that the answer must not contain
    min_tokens: int = 0  # stop tokens are forbidden before this many tokens
    allowed: tuple[int, ...] | None = None  # all other tokens are forbidden; None: no restriction
    last: int | None = None  # the only token allowed at the last position of `max_tokens`
    no_repeat_ngram: int = 0  # no n-gram of this length is written twice; 0: no restriction
    source: int = 0  # first tokens of the prompt, which neither this nor the repetition penalty counts

    def __post_init__(self) -> None:
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_whole("min_tokens", self.min_tokens, 0)
        for token, bias in self.logit_bias:
            check_range(f"logit_bias of token {token}", bias, -100.0, 100.0)


@dataclass(frozen=True)
class LogprobsOptions:
    """Requests log-probabilities of the written tokens and of the `top` most likely ones at each position.

    `processed`: after adjustments, temperature and filters instead of before; `prompt`: for the prompt's tokens too.
    """

    top: int = 0
    processed: bool = False
    prompt: bool = False

    def __post_init__(self) -> None:
        check_whole("logprobs", self.top, 0, 1024)


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one position: of the written token, and of the most likely ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    """One answer to write. The request and the target alone decide the text's distribution, not how it is drafted."""

    prompt: tuple[int, ...]
    rule: Rule
    max_tokens: int = 128
    sampling: Sampling = GREEDY
    seed: int = 0
    choice: int = 0  # distinguishes several answers to one prompt
    stop_ids: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    logprobs: LogprobsOptions | None = None
    constraint: Constraint | None = None  # belongs to this request alone
    nodes: int | None = None  # limit on the tree's nodes, within the engine's own
    rounds: bool = False  # keep a record of what each round verified
    prediction: tuple[int, ...] = ()  # the caller's guess of the answer, used for drafting only
    recalled: tuple[int, ...] = ()  # what followed this prompt in an earlier answer, used like `prediction`
    cache_salt: str | None = None  # keys and values are shared only among requests of equal `cache_salt`
    client: int | None = None  # on a server: number of the client that drafts this request itself

    def until_stop(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first stop token, included; None if there is no stop token."""
        if self.stop_ids.isdisjoint(tokens):
            return None
        return 1 + next(index for index, token in enumerate(tokens) if token in self.stop_ids)


class Row(NamedTuple):
    """Identifies one row of logits: the request, and the text after which the row predicts the next token.

    `committed` is the prompt and the answer so far; `path` are the drafted tokens from there to the row's node, and
    `node_id` is that node's id. `committed` is the live list, which grows when the round ends: use a row at once.
    """

    request: Request
    committed: Sequence[int]
    path: tuple[int, ...] = ()
    node_id: int = 0
    skips_mask: bool = False  # do not mask this row by the request's constraint
    hidden: Tensor | np.ndarray | None = None  # [traits.hidden_layers, width]

    @property
    def position(self) -> int:
        """Return the position in the text of the token that this row predicts."""
        return len(self.committed) + len(self.path)

    @property
    def noise_key(self) -> int:
        """Return the key of the noise of that position."""
        return row_key(self.request.seed, self.request.choice, self.position)


def tree_rows(request: Request, committed: Sequence[int], tree: TokenTree) -> list[Row]:
    """Return one row for each node of a tree whose root is the last committed token."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [Row(request, committed, path, node_id) for path, node_id in zip(paths, tree.ids, strict=True)]


class Verdict(NamedTuple):
    """The result of verifying a tree: the accepted nodes, from the root (node 0) down, and the token after them.

    `next_token` is the recovery or bonus token; None if the path ends on a node that had no row yet. `relaxed` counts
    the accepted tokens that the exact rule would have rejected with the same random numbers.
    """

    path: list[int]
    next_token: int | None
    relaxed: int = 0


class DraftSource(NamedTuple):
    """One origin of proposals, to which costs and acceptance are attributed.

    `name` is a drafter's file name. `runs_model`: its proposals cost a forward of a model; others cost next to nothing.
    `is_calibrated`: its scores are already calibrated on what was accepted in this request. `width`: the most nodes of
    a request that its model expands in one forward. `weight_bytes`: bytes of weights that one step reads. `reads`: most
    trailing tokens of the text that it reads before its first step. None: unknown, and all. `by_length`:
    whether its acceptance depends on the length of the text, as for heads that were trained on short texts.
    """

    name: str
    runs_model: bool = False
    is_calibrated: bool = False
    width: int = 1
    weight_bytes: int | None = None
    reads: int | None = None
    by_length: bool = False


WORKER = DraftSource("", True, width=16)
"""The drafter that a worker runs in parallel with the target; its candidates carry no name. The width is that of an
assumed draft step, because the worker may be another process."""


class Draft(NamedTuple):
    """Yielded by a decoder to grow the tree, by one source or all (None). It receives the number of nodes added.

    `width`: the most nodes that a draft model expands in this forward; 0: its own width.
    """

    tree: TokenTree
    source: DraftSource | None = None
    width: int = 0


class Verify(NamedTuple):
    """Yielded by a decoder to verify the tree as it is now. It receives the rule's reduced rows."""

    tree: TokenTree


class Await(NamedTuple):
    """Yielded by a decoder to let the worker add `levels` since the last correction and reach `depth`, up to a limit.

    Before Verify it waits for this request; after Verify all requests wait together.
    """

    levels: int = 0
    depth: int = 0


class Commit(NamedTuple):
    """Yielded by a decoder to append the verdict's tokens. It receives a tree that holds the new root alone."""

    tree: TokenTree
    verdict: Verdict
    hit: str | None = None  # CARD: where the next token was found (primary, secondary, late), or "miss"
    plan: RoundPlan | None = None


DecoderAction = Draft | Verify | Await | Commit


class Observation(NamedTuple):
    """What the target did since the drafter's last observation.

    `tokens[i]` was committed after the node with id `node_ids[i]`; `tree` now has the last of them as its root. `seen`
    is the target's output at the verified nodes, as far as the drafter's `needs` request it. With `needs.prompt`, there
    is one observation for each chunk of the prompt too; it has no tokens, and the ids in `seen` are positions.
    """

    node_ids: Sequence[int]
    tokens: Sequence[int]
    tree: TokenTree
    seen: TargetFeedback | None = None


_MAX_OUTPUTS = 16  # outputs kept until a drafter must observe them


class PendingObservations:
    """Collects the rounds that a drafter has not observed yet; it observes them together before it drafts again, which
    may be many rounds later under a planner."""

    def __init__(self) -> None:
        self._node_ids: list[int] = []
        self._tokens: list[int] = []
        self._outputs: list[TargetFeedback] = []
        self._last: Observation | None = None

    def __bool__(self) -> bool:
        return self._last is not None

    def add(self, seen: Observation) -> None:
        self._node_ids += seen.node_ids
        self._tokens += seen.tokens
        self._last = seen
        if seen.seen is not None:
            self._outputs.append(seen.seen)

    @property
    def is_due(self) -> bool:
        """Whether the drafter must observe now, not when it drafts next: the last output has several nodes or top
        tokens, or `_MAX_OUTPUTS` outputs are kept."""
        if not self._outputs:
            return False
        last = self._outputs[-1]
        return last.top is not None or len(last.ids) > 1 or len(self._outputs) >= _MAX_OUTPUTS

    def take(self) -> Observation | None:
        """Return all collected rounds as one observation and forget them; None if there are none."""
        if self._last is None:
            return None
        output = join_feedback(self._outputs) if self._outputs else None
        joined = Observation(self._node_ids, self._tokens, self._last.tree, output)
        self._node_ids, self._tokens, self._outputs, self._last = [], [], [], None
        return joined


class SavedState(Protocol):
    """The state of a drafter that a profile keeps between runs."""

    def state_dict(self) -> Any:
        """Return the state as a value that JSON can represent."""

    def load_state_dict(self, kept: Any) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Capabilities:
    """What the engine needs to know about a drafter.

    sources: the origins of its proposals, usually one. needs: what it must see of the target's passes. q_at_leaves: it
    gives rules its q after every node, leaves included. cost: describes the cost of a round in the table of methods.
    models: the models that it runs. memory: returns an upper bound of its own KV bytes for requests whose texts have
    these lengths. learnt: its state in a profile. save: writes the files that it keeps between runs; called when the
    engine closes.
    """

    sources: tuple[DraftSource, ...]
    needs: Needs = NO_NEEDS
    q_at_leaves: bool = False
    cost: str = ""
    models: tuple[Any, ...] = ()
    memory: Callable[[Sequence[int]], int] = lambda lengths: 0
    learnt: SavedState | None = None
    save: Callable[[], None] = lambda: None

    @property
    def runs_model(self) -> bool:
        return any(source.runs_model for source in self.sources)

    def limit_threads(self, max_threads: int) -> None:
        """Let its models use at most `max_threads` CPU threads for what this thread runs."""
        for model in self.models:
            model.limit_threads(max_threads)


@dataclass
class DraftState:
    """A drafter's state for one request, from `open` to `close`.

    `tokens` are the committed tokens, the tree's root last. `sources`: those of the drafter that may have proposals for
    this request; None: all.

    Set before each growth: `source`, which of the sources grows the tree (None: all); `directives`, how and where to
    draft, which a drafter may ignore; `max_read`, how many tokens of texts a model should read in this growth at most,
    because other requests wait; `target_session`, for drafters with `needs.session`: it holds all tokens but the root,
    and the drafter may add pending nodes to it.

    `pending`: the rounds that the drafter has not observed yet.
    """

    request: Request
    tokens: list[int] = field(init=False)
    sources: tuple[DraftSource, ...] | None = field(default=None, kw_only=True)
    source: DraftSource | None = field(default=None, init=False)
    directives: DraftDirectives = field(default=UNRESTRICTED, init=False)
    max_read: int = field(default=UNLIMITED, init=False)
    target_session: Any = field(default=None, init=False)
    pending: PendingObservations = field(default_factory=PendingObservations, init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def unread(self) -> int:
        """Number of committed tokens that a model has not read."""
        return 0

    @property
    def held_prefix(self) -> int:
        """Number of positions, from the beginning of the text, that `copy_prefix` can copy from this state."""
        return 0


class Drafter:
    """Proposes tokens: it adds nodes to the token trees of all requests.

    A drafter must define `capabilities` and `grow`; everything else has a default. Decoding methods differ in when, and
    in which thread, they call `grow`.
    """

    capabilities: Capabilities  # an instance may replace its class's, but not the names of the sources

    @property
    @final
    def name(self) -> str:
        """The names of its sources."""
        return "+".join([source.name for source in self.capabilities.sources])

    @final
    def catch_up(self, state: Any) -> None:
        if (seen := state.pending.take()) is not None:
            self.observe(state, seen)

    def open(self, request: Request) -> Any:
        """Return a new DraftState for a request."""
        return DraftState(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """Add the next nodes to every tree in one batch; none where there is nothing to add until the next
        observation.

        Call `tree.add(parent, token, score)`; the score of a node is the log of the estimated probability that the
        target accepts the path to it, so it is at most its parent's.
        """
        raise NotImplementedError

    def observe(self, state: Any, seen: Observation) -> None:
        """Update the state after one or more rounds of the target: append `seen.tokens` to `state.tokens`, and forget
        what is not below the root of `seen.tree`, which is the tree of the next `grow`."""
        state.tokens += seen.tokens

    def copy_prefix(self, state: Any, other: Any, length: int) -> None:
        """Copy the first `length` positions of `other`, the state of a text with the same first `length` + 1 tokens.

        Called right after `open`, for drafters with `needs.prompt`: the target's keys and values of these positions
        come from the prefix cache, so the target's output for them is not observed again.
        """

    def pause(self, state: Any) -> None:
        """Free the keys and values of a request that waits for memory; they are computed again when it drafts next."""

    def close(self, state: Any) -> None:
        """End a request."""
