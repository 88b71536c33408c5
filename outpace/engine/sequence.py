"""One request on its way through the engine: its state, its tokens, and the record of its rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from outpace.core.drafting import NO_NEEDS, Needs
from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.logits import Scores
from outpace.core.stats import RoundStats
from outpace.core.tree import Role, TokenTree
from outpace.core.types import (
    Adjustments,
    Commit,
    DecoderAction,
    DraftState,
    LogprobsOptions,
    Request,
    Row,
    TokenLogprobs,
    Verdict,
    Verify,
    tree_rows,
)
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext
from outpace.drafters.prediction import Alignment
from outpace.engine.earlier_texts import HashedTokens
from outpace.models.base import Model, Session
from outpace.planning.cost_model import CostModel
from outpace.rules.base import picks_best_scores

if TYPE_CHECKING:
    from outpace.core.constraints import Constraint

StopCheck = Callable[[Sequence[int], int], int | None]
"""Called with the tokens of a round and `num_drafted`, the number of drafted ones among them. Returns how many of them
to keep if a stop string ends the text, else None."""

TARGET, UNKNOWN = "target", "draft"  # sources of tokens: the target itself, and a drafter without a name


class State(Enum):
    """What a sequence waits for."""

    WAITING = "admission: it has no session, because it is new or was paused"
    PREFILLING = "passes that read its text"
    DRAFTING = "its decoder's next request, or drafts"
    VERIFYING = "the target's pass over its tree"
    DONE = "nothing: it has ended"


@dataclass(eq=False)
class KVState:
    """The session that holds a sequence's keys and values while it runs, and what is known of it."""

    session: Session = field(init=False)
    keep: Sequence[int] = ()  # pending nodes of the session that were accepted
    is_broken: bool = False  # a round was interrupted: the content of the session is unknown

    @property
    def is_open(self) -> bool:
        return hasattr(self, "session")

    def commit_pending(self) -> None:
        """Commit the accepted nodes now instead of with the next pass."""
        if self.keep:
            self.session.keep(self.keep)
            self.keep = ()

    def release(self) -> None:
        """Drop the session: a finished sequence may be referenced for long, its keys and values must not be."""
        vars(self).pop("session", None)
        self.keep = ()


@dataclass(eq=False)
class DraftLink:
    """A sequence's side of its drafter, for decoders that draft and verify alternately."""

    name: str | None = None  # of the drafter
    needs: Needs = NO_NEEDS  # of the drafter
    prompt_read: int = 0  # prompt tokens whose target output the drafter has received (if `needs.prompt`)
    state: DraftState | None = None  # kept after the end for the prefix cache (if `needs.prompt`)
    source: DraftState | None = None  # its first `prompt_read` positions are copied when drafting starts
    seconds: float = 0.0  # spent on drafting in this round


class RoundRecord(NamedTuple):
    """What one round verified: a tree, the sources of its nodes, and the path that was accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    path: tuple[int, ...]


@dataclass(eq=False)
class History:
    """The record of a sequence: statistics of each round, records of tokens, and times on the engine's clock."""

    submitted: float = 0.0
    began: float = 0.0  # when it left the queue; 0 before
    reused: int = 0  # prompt tokens whose keys and values were copied
    first_token: float = 0.0  # when the first round ended; 0 before
    ended: float = 0.0  # when the last round ended
    stale: int = 0  # a worker's candidates that arrived after the text had diverged from them
    steps: list[RoundStats] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of the answer's tokens: a drafter's name, or "target"
    drafted: Counter[str] = field(default_factory=Counter)  # verified draft tokens by source
    rounds: list[RoundRecord] = field(default_factory=list)  # if requested
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer's tokens, if requested
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first


class EmittedRows(NamedTuple):
    """Tokens that a verdict emits, with the node that each follows and that node's row."""

    nodes: list[int]
    rows: list[Row]
    tokens: list[int]


@dataclass(eq=False)
class TokenSequence:
    """One request with its tokens. `context` is what its decoder sees; `coroutine` is None until it first runs and
    after it has ended."""

    request: Request
    decoder: Decoder
    options: Any
    key: int
    costs: CostModel = field(repr=False)
    watch: StopCheck | None = None
    source_length: int = 0  # first tokens of the prompt, which the target's encoder reads
    committed: list[int] = field(init=False)  # the prompt and the tokens written so far
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None until it has ended
    error: Exception | None = None
    context: RequestContext = field(init=False, repr=False)
    history: History = field(default_factory=History, repr=False)
    draft: DraftLink = field(default_factory=DraftLink, repr=False)
    text: HashedTokens = field(init=False, repr=False)  # the committed tokens, for comparison with other texts
    kv: KVState = field(default_factory=KVState, repr=False)
    action: DecoderAction | None = None  # what the coroutine yielded; None: it waits for the next round's `root`
    coroutine: DecoderGenerator | None = None
    root: TokenTree | None = None  # the tree of the next round
    alignment: Alignment = field(init=False, repr=False)  # with the caller's prediction
    picks_by_score: bool = field(init=False, repr=False)  # each row picks its best token

    def __post_init__(self) -> None:
        self.alignment = Alignment(self.request.prediction)
        self.picks_by_score = picks_best_scores(self.request)
        self.committed = list(self.request.prompt)
        self.context = RequestContext(request=self.request, committed=self.committed, costs=self.costs)
        source = tuple(self.committed[: self.source_length])  # keys of the decoder depend on all of it
        self.text = HashedTokens(self.committed, (self.request.cache_salt, source))
        self.text.hashes(len(self.committed))

    @property
    def state(self) -> State:
        """What it waits for, derived from what it has."""
        if self.finish_reason is not None:
            return State.DONE
        if not self.kv.is_open:
            return State.WAITING
        if self.unread > 0:
            return State.PREFILLING
        return State.VERIFYING if isinstance(self.action, Verify) else State.DRAFTING

    @property
    def tokens(self) -> list[int]:
        return self.committed[len(self.request.prompt) :]

    @property
    def last_rows(self) -> int:
        """Number of its rows in its last pass."""
        return self.history.steps[-1].verified_rows if self.history.steps else 1

    @property
    def prefilled(self) -> int:
        """Number of tokens whose keys and values are there, including accepted nodes."""
        return self.kv.session.length + len(self.kv.keep)

    @property
    def unread(self) -> int:
        """Number of tokens to read: of the prompt or, after a pause, of everything written. The last token is not
        counted, it is the next tree's root."""
        return len(self.committed) - 1 - self.kv.session.length - len(self.kv.keep)

    @property
    def tokens_left(self) -> int:
        return self.request.max_tokens - (len(self.committed) - len(self.request.prompt))

    @property
    def needs_prompt_feedback(self) -> bool:
        """Whether its drafter still needs the target's output for prompt tokens."""
        return self.draft.needs.prompt and self.draft.prompt_read < len(self.request.prompt) - 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        wanted = self.request.logprobs is not None and self.request.logprobs.prompt
        return wanted and len(self.history.prompt_logprobs) < len(self.request.prompt) - 1

    def attach_target_session(self) -> None:
        """Let the drafter use the target's session, after committing the accepted nodes and dropping all others."""
        if self.draft.state is not None:
            self.kv.commit_pending()
            self.draft.state.target_session = self.kv.session

    def resume(self) -> None:
        """Start the next round of the coroutine if the last round is over. Called after the costs of that round and the
        number of running requests are known."""
        if self.action is None and self.finish_reason is None and self.kv.is_open and self.unread <= 0:
            root, self.root = self.root, None
            self.advance(root)

    def advance(self, answer: Any) -> None:
        """Send the coroutine an answer and store what it yields."""
        assert self.coroutine is not None
        try:
            self.action = self.coroutine.send(answer)
        except Exception as error:
            self.fail(error)
        if isinstance(self.action, Verify):
            self.context.set_rows(len(self.action.tree))

    def end_round(self, root: TokenTree) -> None:
        """Let the coroutine wait for the next round, which begins with this tree."""
        self.root, self.action = root, None

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended before; the tokens written stay."""
        self.action = None
        if self.finish_reason is None:
            self.error, self.finish_reason = error, "error"

    def add_chunk(self, rows: Scores, tokens: Sequence[int]) -> None:
        """Note that a chunk of the text was read. `rows` [tokens, vocab] are needed for log-probabilities only."""
        start = self.kv.session.length
        self.kv.keep = range(len(tokens))
        if len(rows) and self.request.logprobs is not None and self.needs_prompt_logprobs:
            from outpace.core.logprobs import token_logprobs

            following = self.request.prompt[start + 1 : start + len(tokens) + 1]
            self.history.prompt_logprobs += token_logprobs(
                rows, [], following, LogprobsOptions(self.request.logprobs.top)
            )

    def commit(self, tree: TokenTree, verdict: Verdict, drafted: int) -> list[int]:
        """Append the verdict's tokens, the first `drafted` of them drafts, up to a stop token, the end that `watch`
        chooses, or the limit. Return the tokens appended."""
        tokens, left, is_complete = _tokens_of(tree, verdict), self.tokens_left, False
        stop = self.request.until_stop(tokens[:left])
        tokens = tokens[: left if stop is None else stop]
        if self.request.constraint is not None:
            tokens, is_complete = self._constrained(tokens, self.request.constraint)
        end = self.watch(tokens, min(drafted, len(tokens))) if self.watch else None
        if end is not None:
            tokens = tokens[:end]
        self.committed += tokens
        if self.history.logprobs:
            del self.history.logprobs[len(self.committed) - len(self.request.prompt) :]
        adjustments, is_full = self.request.adjustments, len(tokens) == left
        is_cut = is_full and adjustments is not None and adjustments.last is not None  # its last token is no choice
        if end is not None or is_complete or (stop is not None and not is_cut):
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = "length"
        return tokens

    def _constrained(self, tokens: list[int], constraint: Constraint) -> tuple[list[int], bool]:
        """Return the tokens up to where the constraint is satisfied, and whether it is. UserError for a token that it
        forbids: the other options left none that it allows."""
        count = constraint.allowed(self.committed, tokens)
        is_complete = constraint.is_over(self.committed, tokens[:count])
        if count < len(tokens) and not is_complete:
            raise UserError(
                f"no token may follow the first {len(self.tokens) + count}: the grammar allows only tokens there that"
                " other options (bad_words, logit_bias, min_tokens) or scores of -inf exclude"
            )
        return tokens[:count], is_complete

    def emitted_rows(self, num_rows: int) -> EmittedRows:
        """Return what its verdict emits, on a tree whose first `num_rows` nodes were verified; `commit` cuts the
        log-probabilities with the tokens."""
        assert isinstance(self.action, Commit)
        tree, verdict = self.action.tree, self.action.verdict
        rows, tokens = tree_rows(self.request, self.committed, tree), _tokens_of(tree, verdict)
        nodes = [node for node in verdict.path if node < num_rows][: len(tokens)]
        return EmittedRows(nodes, [rows[node] for node in nodes], tokens)

    def record_round(
        self, commit: Commit, rows: int, emitted: int, target_seconds: float, experts: float, start: float, now: float
    ) -> None:
        """Add the statistics of the round from `start` to `now`, which verified the first `rows` nodes of the tree; a
        late node may have been accepted after them. `experts`: `Model.distinct_experts` after the pass."""
        tree, verdict, hit, plan = commit
        path, sources, history = verdict.path, [*tree.sources], self.history
        length = longest = len(path) - 1
        accepted = min(length, emitted)  # a stop or the limit may have cut off some
        drafted = 0
        if len(tree) > 1:
            deep, roles = [*tree.depths], [*tree.roles]
            judged = range(1, rows) if path[-1] < rows else (*range(1, rows), path[-1])  # a late node ends the path
            for node in judged:
                if roles[node] != Role.PROBE:
                    drafted, longest = drafted + 1, max(longest, deep[node])
                    history.drafted[sources[node] or UNKNOWN] += 1  # Counter.update is slower for few items
            for node in path[1 : accepted + 1]:
                history.sources.append(sources[node] or UNKNOWN)
        history.sources += [TARGET] * (emitted - accepted)
        times = (self.draft.seconds, target_seconds, now - start)
        self.draft.seconds = 0.0
        predicted = self._predicted(tree, rows, path, accepted, emitted) if self.request.prediction else (0, 0)
        relaxed = min(verdict.relaxed, accepted)
        figures = drafted, accepted, emitted, longest, hit, rows, *times, *predicted, relaxed
        history.steps.append(RoundStats(*figures, plan, experts))
        history.ended, history.first_token = now, history.first_token or now
        if self.request.rounds:
            walked = tuple(node for node in path[: accepted + 1] if node < rows)
            nodes = tuple(tree.tokens[:rows]), tuple(tree.parents[:rows]), tuple(sources[:rows])
            history.rounds.append(RoundRecord(*nodes, walked))

    def _predicted(
        self, tree: TokenTree, rows: int, path: Sequence[int], accepted: int, emitted: int
    ) -> tuple[int, int]:
        """Return how many tokens of the caller's prediction were verified and how many accepted, and align the
        prediction with the emitted tokens."""
        nodes = self.alignment.nodes(tree)
        written = nodes.intersection(path[1 : accepted + 1])
        self.alignment.follow(self.committed[len(self.committed) - emitted :])
        return len({node for node in nodes if node < rows} | written), len(written)


def _tokens_of(tree: TokenTree, verdict: Verdict) -> list[int]:
    tokens = [*map(tree.tokens.__getitem__, verdict.path[1:])] if len(verdict.path) > 1 else []
    if verdict.next_token is not None:
        tokens.append(verdict.next_token)
    return tokens


def run_guarded(sequence: TokenSequence, call: Callable[..., None], *arguments: Any) -> None:
    """Call a function; an exception in a request's rule, options or `watch` ends this request alone."""
    try:
        call(*arguments)
    except Exception as error:
        sequence.kv.is_broken = True
        sequence.fail(error)


def check_rule_needs(request: Request, needs: Needs) -> None:
    """Raise UserError for a rule that needs hidden states which the engine does not compute."""
    missing = [layer for layer in request.rule.traits.hidden_layers if layer not in needs.layers]
    if missing:
        name = type(request.rule).__name__
        raise UserError(
            f"the rule {name} needs hidden states after layers {missing}, which this engine does not compute: pass"
            " them to the engine as its needs"
        )


def check_request(request: Request, target: Model) -> None:
    """Raise UserError for a request that can never run on this target."""
    if not request.prompt:
        raise UserError("the prompt has no tokens, at least one is needed")
    source, max_positions = target.source_length(len(request.prompt)), target.max_positions
    if target.decoder_start and not 1 <= source <= target.max_source:
        raise UserError(f"the source has {source} tokens, the target's encoder takes 1 to {target.max_source}")
    if len(request.prompt) - source >= max_positions:
        raise UserError(f"the prompt has {len(request.prompt)} tokens, the target's context holds {max_positions}")
    if target.decoder_start and request.logprobs is not None and request.logprobs.prompt:
        raise UserError("the target is an encoder-decoder model, which gives no log-probabilities of prompt tokens")
    check_whole("max_tokens", request.max_tokens, 1)
    check_whole("seed", request.seed, 0, 2**63 - 1)
    last = target.vocab_size - 1
    bad = next((token for token in request.prompt if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prompt has token {bad}, allowed are 0 to {last}")
    if len(request.prediction) > max_positions:
        raise UserError(
            f"the prediction has {len(request.prediction)} tokens, the target's context holds {max_positions}"
        )
    bad = next((token for token in request.prediction if not 0 <= token <= last), None)
    if bad is not None:
        raise UserError(f"the prediction has token {bad}, allowed are 0 to {last}")
    if request.adjustments is not None:
        check_whole("min_tokens", request.adjustments.min_tokens, 0, request.max_tokens)
        for token, _ in request.adjustments.logit_bias:
            check_whole("a token of logit_bias", token, 0, last)
        _check_allowed(request, request.adjustments, last)


def _check_allowed(request: Request, adjustments: Adjustments, last: int) -> None:
    """Check `allowed_token_ids`: all are in the vocabulary, and not all of them are stop tokens while `min_tokens`
    forbids these."""
    for token in adjustments.allowed or ():
        check_range("a token of allowed_token_ids", token, 0, last)
    if adjustments.allowed is not None and adjustments.min_tokens and request.stop_ids.issuperset(adjustments.allowed):
        raise UserError("allowed_token_ids has stop tokens alone, which min_tokens forbids: allow others")
