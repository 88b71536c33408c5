"""One request on its way through the engine, and what its verdicts write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from outpace.core.alignment import Alignment
from outpace.core.carried import Noise
from outpace.core.constraints import Constraint
from outpace.core.drafting import NO_NEEDS, Needs
from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.logits import Scores
from outpace.core.logprobs import token_logprobs
from outpace.core.stats import RoundStats
from outpace.core.tree import Role, TokenTree, depths
from outpace.core.types import (
    Adjustments,
    Ask,
    Commit,
    DraftState,
    LogprobsOptions,
    PendingObservations,
    Request,
    Row,
    TokenLogprobs,
    Verdict,
    Verify,
    tree_rows,
)
from outpace.decoders.base import Coroutine, RequestContext
from outpace.engine.prefix_index import HashedTokens
from outpace.models.base import Model, Session
from outpace.planning.cost_model import CostModel
from outpace.rules.base import native_noise


@dataclass(eq=False)
class KVState:
    """A request's keys and values: the session that holds them, only while it runs, and what is known of it."""

    session: Session = field(init=False)
    keep: Sequence[int] = ()  # pending nodes of the session that were accepted
    is_broken: bool = False  # a round broke off: what the session holds is unknown

    def settle(self) -> None:
        """Commits the accepted nodes to the session now, where the next pass would do it."""
        if self.keep:
            self.session.keep(self.keep)
            self.keep = ()

    def release(self) -> None:
        """Lets go of them: a request that is over may be held for long, its keys and values may not."""
        del self.session
        self.keep = ()


TARGET, UNKNOWN = "target", "draft"  # who wrote a token: the target itself, or a drafter that does not tell its name


class RoundRecord(NamedTuple):
    """What a round verified: a tree, who planted its nodes, and the path that was accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    path: tuple[int, ...]


@dataclass(eq=False)
class History:
    """What became of a request: a Step a round, records of tokens, and seconds on the engine's clock."""

    submitted: float = 0.0
    began: float = 0.0  # when it left the queue, 0 before
    reused: int = 0  # tokens of the prompt whose keys and values were there
    first_token: float = 0.0  # when the first round ended, 0 before
    ended: float = 0.0  # when the last one did
    stale: int = 0  # candidates of a worker that came after the text had gone another way
    pauses: int = 0  # how often its keys and values were taken away for want of memory
    steps: list[RoundStats] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of the answer's tokens: a drafter's name, or "target"
    drafted: Counter[str] = field(default_factory=Counter)  # tokens that were judged, by who proposed them
    rounds: list[RoundRecord] = field(default_factory=list)  # where they are asked for
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer's tokens, where they are asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's, but for its first


Watch = Callable[[Sequence[int], int], int | None]
"""Told the tokens of a round and how many of them were drafted; may say after how many of them the text ends."""


class Report(NamedTuple):
    """Tokens that a verdict writes, and of each the node behind which it stands with that node's row."""

    nodes: list[int]
    rows: list[Row]
    tokens: list[int]


@dataclass(eq=False)
class Drafted:
    """A request's side of a drafter that works in turn, which the engine knows by `name`."""

    name: str | None = None
    needs: Needs = NO_NEEDS  # the drafter's
    told: int = 0  # tokens of the prompt that a drafter with such needs was told of
    state: DraftState | None = None
    untold: PendingObservations = field(default_factory=PendingObservations)
    seconds: float = 0.0  # of the round under way


@dataclass(eq=False)
class TokenSequence:
    """One request on its way. `finish_reason` is None until it is over.
    `place` is all that its decoder sees; `coroutine` is None until it runs and when it is over.
    """

    request: Request
    decoder: ModuleType
    options: Any
    key: int
    costs: CostModel = field(repr=False)
    watch: Watch | None = None
    committed: list[int] = field(init=False)  # the prompt, and what was written so far
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None
    place: RequestContext = field(init=False, repr=False)
    history: History = field(default_factory=History, repr=False)
    draft: Drafted = field(default_factory=Drafted, repr=False)
    text: HashedTokens = field(init=False, repr=False)  # what is committed, as it is compared with others
    storage: KVState = field(default_factory=KVState, repr=False)
    ask: Ask | None = None
    coroutine: Coroutine | None = None
    root: TokenTree | None = None  # the next round's tree, which the coroutine is sent when that begins
    is_due: bool = False  # the coroutine waits for its next round, or for its first
    alignment: Alignment = field(init=False, repr=False)  # with what the caller predicted
    noise: Noise | None = field(init=False, repr=False)  # by which adjusted scores are picked; None: by others
    picks_by_score: bool = field(init=False, repr=False)  # each row's best token is picked

    def __post_init__(self) -> None:
        self.alignment = Alignment(self.request.prediction)
        self.noise = native_noise(self.request)
        self.picks_by_score = self.noise == Noise() and self.request.adjustments is None
        self.committed = list(self.request.prompt)
        self.place = RequestContext(self.request, self.committed, self.costs)
        self.text = HashedTokens(self.committed, self.request.cache_salt)
        self.text.hashes(len(self.committed))

    @property
    def tokens(self) -> list[int]:
        """What was written so far."""
        return self.committed[len(self.request.prompt) :]

    @property
    def rows(self) -> int:
        """That the last pass had of this request."""
        return self.history.steps[-1].verified_rows if self.history.steps else 1

    @property
    def prefilled(self) -> int:
        """Tokens whose keys and values are there, those of accepted nodes included."""
        return self.storage.session.length + len(self.storage.keep)

    @property
    def unread(self) -> int:
        """Tokens that are not read yet: of the prompt, or, after a pause, of all that is written. The last one is the
        next tree's root."""
        return len(self.committed) - 1 - self.storage.session.length - len(self.storage.keep)

    @property
    def must_read(self) -> bool:
        """Whether all of its prompt goes through a pass, what is known of it too."""
        return self.reports_prompt or self.tells_prompt

    @property
    def tells_prompt(self) -> bool:
        """Whether its drafter is still to be told of the prompt."""
        return self.draft.needs.prompt and self.draft.told < len(self.request.prompt) - 1

    @property
    def is_bare(self) -> bool:
        """Whether nothing but picked tokens is asked of a pass."""
        needs = self.draft.needs
        return self.request.logprobs is None and not (needs.top or needs.layers)

    def may_go_on(self) -> bool:
        """The same of a round, so that several may be one."""
        return self.is_bare and not (self.request.rounds or self.request.prediction)

    def lend(self) -> None:
        """Lets the drafter use the target's session: what was accepted is committed first, the rest dropped."""
        if self.draft.state is not None:
            self.storage.settle()
            self.draft.state.base = self.storage.session

    @property
    def is_prefilling(self) -> bool:
        return len(self.committed) - 1 > self.storage.session.length + len(self.storage.keep)

    @property
    def reports_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        asked = self.request.logprobs is not None and self.request.logprobs.prompt
        return asked and len(self.history.prompt_logprobs) < len(self.request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        prompt = len(self.request.prompt)
        return min(self.request.max_tokens, self.storage.session.capacity - prompt) - (len(self.committed) - prompt)

    def begin_round(self) -> None:
        """Wakes a coroutine whose last round is over: by now what that cost is known, and who else runs."""
        if self.is_due:
            self.is_due, root, self.root = False, self.root, None
            self.advance(root)

    def advance(self, answer: Any) -> None:
        """Sends the coroutine its answer and notes what it asks for next."""
        assert self.coroutine is not None
        try:
            self.ask = self.coroutine.send(answer)
        except Exception as error:
            self.fail(error)
        if isinstance(self.ask, Verify):
            self.place.asks_for(len(self.ask.tree))

    def fail(self, error: Exception) -> None:
        """Ends this request, unless it is over; what it wrote stays."""
        self.ask = None
        if self.finish_reason is None:
            self.error, self.finish_reason = error, "error"

    def read(self, rows: Scores, tokens: Sequence[int]) -> None:
        """A chunk of the text is in; `rows` [tokens, vocab] where the request reports on its prompt, else none."""
        start = self.storage.session.length
        self.storage.keep = range(len(tokens))
        if len(rows) and self.request.logprobs is not None and self.reports_prompt:
            following = self.request.prompt[start + 1 : start + len(tokens) + 1]
            self.history.prompt_logprobs += token_logprobs(
                rows, [], following, LogprobsOptions(self.request.logprobs.top)
            )

    def commit(self, tree: TokenTree, verdict: Verdict, drafted: int) -> list[int]:
        """Writes the verdict's tokens, `drafted` of them drafts, up to a stop token, the watcher's end, the limit."""
        tokens, left, is_over = _tokens_of(tree, verdict), (stop := self.left), False
        for place, token in enumerate(tokens):
            if token in self.request.stop_ids:
                stop = place
                break
        tokens = tokens[: min(stop + 1, left)]
        if self.request.constraint is not None:
            tokens, is_over = self._constrained(tokens, self.request.constraint)
        end = self.watch(tokens, min(drafted, len(tokens))) if self.watch else None
        if end is not None:
            tokens = tokens[:end]
        self.committed += tokens
        del self.history.logprobs[len(self.committed) - len(self.request.prompt) :]
        if end is not None or stop < left or is_over:
            self.finish_reason = "stop"
        elif len(tokens) == left:
            self.finish_reason = "length"
        return tokens

    def _constrained(self, tokens: list[int], constraint: Constraint) -> tuple[list[int], bool]:
        """The tokens up to where the request's constraint says that the text is complete, and whether it is; UserError
        for a token that it refuses: nothing else that was asked for left one to write."""
        count = constraint.allowed(self.committed, tokens)
        is_over = constraint.is_over(self.committed, tokens[:count])
        if count < len(tokens) and not is_over:
            raise UserError(
                f"no token may follow the first {len(self.tokens) + count}: what the grammar allows there, the other"
                " options (bad_words, logit_bias, min_tokens) or the model's own scores forbid"
            )
        return tokens[:count], is_over

    def report(self, count: int) -> Report:
        """What its verdict, on a tree of which so many nodes were judged, writes and by which rows; `commit` cuts the
        log-probabilities with the tokens."""
        assert isinstance(self.ask, Commit)
        tree, verdict, _ = self.ask
        rows, tokens = tree_rows(self.request, self.committed, tree), _tokens_of(tree, verdict)
        nodes = [node for node in verdict.path if node < count][: len(tokens)]
        return Report(nodes, [rows[node] for node in nodes], tokens)

    def note_step(
        self, commit: Commit, rows: int, emitted: int, target_seconds: float, start: float, now: float
    ) -> None:
        """Adds the Step of the round from `start` to `now`; `rows` nodes of the tree were judged, a late one may have
        been accepted beside."""
        tree, verdict, hit = commit
        path, sources, history = verdict.path, tree.sources, self.history
        length = longest = len(path) - 1
        accepted = min(length, emitted)  # not what a stop or the limit cut off
        drafted = 0
        if len(tree) > 1:
            deep, roles = depths(tree.parents), tree.roles
            judged = range(1, rows) if path[-1] < rows else (*range(1, rows), path[-1])  # a late node ends the path
            for node in judged:
                if roles[node] is not Role.PROBE:
                    drafted, longest = drafted + 1, max(longest, deep[node])
                    history.drafted[sources[node] or UNKNOWN] += 1  # a Counter's own way takes longer for so few
            for node in path[1 : accepted + 1]:
                history.sources.append(sources[node] or UNKNOWN)
        history.sources += [TARGET] * (emitted - accepted)
        times = (self.draft.seconds, target_seconds, now - start)
        self.draft.seconds = 0.0
        predicted = self._predicted(tree, rows, path, accepted, emitted) if self.request.prediction else (0, 0)
        relaxed = min(verdict.relaxed, accepted)
        history.steps.append(RoundStats(drafted, accepted, emitted, longest, hit, rows, *times, *predicted, relaxed))
        history.ended, history.first_token = now, history.first_token or now
        if self.request.rounds:
            walked = tuple(node for node in path[: accepted + 1] if node < rows)
            planted = tuple(tree.tokens[:rows]), tuple(tree.parents[:rows]), tuple(sources[:rows])
            history.rounds.append(RoundRecord(*planted, walked))

    def note_plain(self, emitted: int, passes: int, target_seconds: float, start: float, now: float) -> None:
        """Adds the Steps of so many plain rounds in one: each has its share of the time, and wrote one token."""
        history = self.history
        times = (self.draft.seconds / passes, target_seconds / passes, (now - start) / passes)
        self.draft.seconds = 0.0
        history.sources += [TARGET] * emitted
        history.steps += [RoundStats(0, 0, 1, 0, None, 1, *times)] * emitted
        history.ended = now

    def _predicted(
        self, tree: TokenTree, rows: int, path: Sequence[int], accepted: int, emitted: int
    ) -> tuple[int, int]:
        """Of the tokens that the caller predicted to stand here: how many were judged, how many accepted. Follows what
        was written."""
        nodes = self.alignment.nodes(tree)
        written = nodes.intersection(path[1 : accepted + 1])
        self.alignment.follow(self.committed[len(self.committed) - emitted :])
        return len({node for node in nodes if node < rows} | written), len(written)


def _tokens_of(tree: TokenTree, verdict: Verdict) -> list[int]:
    """What a verdict writes."""
    tokens = [tree.tokens[node] for node in verdict.path[1:]] if len(verdict.path) > 1 else []
    if verdict.next_token is not None:
        tokens.append(verdict.next_token)
    return tokens


def isolate(run: TokenSequence, call: Callable[..., None], *arguments: Any) -> None:
    """A fault in a request's rule, its options or who watches it ends this request alone."""
    try:
        call(*arguments)
    except Exception as error:
        run.storage.is_broken = True
        run.fail(error)


def check_rule_needs(request: Request, needs: Needs) -> None:
    """UserError for a rule whose hidden states an engine's passes do not show."""
    missing = [layer for layer in request.rule.traits.hidden_layers if layer not in needs.layers]
    if missing:
        name = type(request.rule).__name__
        raise UserError(
            f"the rule {name} needs hidden states after layers {missing}, which this engine does not show: give them"
            " to the engine as its needs"
        )


def check_request(request: Request, target: Model) -> None:
    """UserError for a request that can never run on this target."""
    if not request.prompt:
        raise UserError("the prompt has no tokens, at least one is needed")
    most = target.max_positions
    if len(request.prompt) >= most:
        raise UserError(f"the prompt has {len(request.prompt)} tokens, the target's context holds {most}")
    check_whole("max_tokens", request.max_tokens, 1)
    check_whole("seed", request.seed, 0, 2**63 - 1)
    last = target.vocab_size - 1
    bad = next((token for token in request.prompt if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prompt has token {bad}, allowed are 0 to {last}")
    if len(request.prediction) > most:
        raise UserError(f"the prediction has {len(request.prediction)} tokens, the target's context holds {most}")
    bad = next((token for token in request.prediction if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prediction has token {bad}, allowed are 0 to {last}")
    if request.adjustments is not None:
        check_whole("min_tokens", request.adjustments.min_tokens, 0, request.max_tokens)
        for token, _ in request.adjustments.logit_bias:
            check_whole("a token of logit_bias", token, 0, last)
        _check_allowed(request, request.adjustments, last)


def _check_allowed(request: Request, adjustments: Adjustments, last: int) -> None:
    """The tokens that alone may be written: they are there, and something is left where an answer may not end yet."""
    for token in adjustments.allowed or ():
        check_range("a token of allowed_token_ids", token, 0, last)
    if adjustments.allowed is not None and adjustments.min_tokens and request.stop_ids.issuperset(adjustments.allowed):
        raise UserError("allowed_token_ids has stop tokens alone, which min_tokens forbids: allow others")
