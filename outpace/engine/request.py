"""One request on its way through the engine, and what its verdicts write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor

from outpace.candidates.cache import CandidateCache, Correction
from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.logprobs import token_logprobs
from outpace.core.tree import Role, TokenTree, depths
from outpace.core.types import (
    Ask,
    Commit,
    DraftState,
    LogprobsOptions,
    Request,
    Row,
    Source,
    Step,
    TokenLogprobs,
    Verdict,
)
from outpace.decoders._costs import Costs
from outpace.decoders.base import Coroutine
from outpace.models.base import Model, Session

Watch = Callable[[Sequence[int], int], int | None]
"""Told the tokens of a round and how many of them were drafted; may say after how many of them the text ends."""


@dataclass(eq=False)
class Running:
    """One request on its way. `finish_reason` is None until it is over."""

    request: Request
    decoder: ModuleType
    options: Any
    key: int
    watch: Watch | None = None
    submitted: float = 0.0  # seconds on the engine's clock, as all of its times
    committed: list[int] = field(init=False)  # the prompt, and what was written so far
    steps: list[Step] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer's tokens, where they are asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's, but for its first
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None
    is_broken: bool = False  # a round broke off: what the session holds is unknown
    budget: int = 1
    requests: int = 1  # running at once, this one included
    rows_of_others: int = 0  # of the last pass
    costs: Costs = field(default_factory=Costs, repr=False)  # the engine's
    sources: Sequence[Source] = ()  # of drafts
    candidates: CandidateCache = field(init=False, repr=False)
    session: Session = field(init=False, repr=False)
    first_token: float = 0.0  # when the first round ended, 0 before
    ended: float = 0.0
    prefilled: int = 0
    keep: Sequence[int] = ()
    draft_state: DraftState | None = None
    draft_seconds: float = 0.0
    ask: Ask | None = None
    coroutine: Coroutine | None = None
    correct: Callable[[Correction], None] = field(default=lambda correction: None, repr=False)  # tells the worker

    def __post_init__(self) -> None:
        self.committed = list(self.request.prompt)

    @property
    def tokens(self) -> list[int]:
        """What was written so far."""
        return self.committed[len(self.request.prompt) :]

    @property
    def rows(self) -> int:
        """That the last pass had of this request."""
        return self.steps[-1].verified_rows if self.steps else 1

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""
        return self.committed[-1]

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        prompt = len(self.request.prompt)
        return min(self.request.max_tokens, self.session.capacity - prompt) - (len(self.committed) - prompt)

    def advance(self, answer: Any) -> None:
        """Sends the coroutine its answer and notes what it asks for next."""
        assert self.coroutine is not None
        try:
            self.ask = self.coroutine.send(answer)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends this request; what it wrote stays."""
        self.error, self.finish_reason, self.ask = error, "error", None

    def read(self, rows: Tensor, tokens: Sequence[int]) -> None:
        """A chunk of the prompt is in; `rows` [tokens, vocab] where the request reports on its prompt, else none."""
        start = self.prefilled
        self.prefilled += len(tokens)
        self.keep = range(len(tokens))
        if len(rows) and self.request.logprobs is not None:
            following = self.request.prompt[start + 1 : start + len(tokens) + 1]
            self.prompt_logprobs += token_logprobs(rows, [], following, LogprobsOptions(self.request.logprobs.top))

    def commit(self, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Writes the verdict's tokens, up to the first stop token, the watcher's end, or the last that is allowed."""
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        if verdict.next_token is not None:
            tokens.append(verdict.next_token)
        left, drafted = self.left, len(verdict.path) - 1
        stop = next((place for place, token in enumerate(tokens) if token in self.request.stop_ids), left)
        tokens = tokens[: min(stop + 1, left)]
        end = self.watch(tokens, min(drafted, len(tokens))) if self.watch else None
        if end is not None:
            tokens = tokens[:end]
        self.committed += tokens
        del self.logprobs[len(self.committed) - len(self.request.prompt) :]
        if end is not None or stop < left:
            self.finish_reason = "stop"
        elif len(tokens) == left:
            self.finish_reason = "length"
        return tokens

    def record_logprobs(self, tree: TokenTree, verdict: Verdict, rows: Sequence[Row], logits: Tensor) -> None:
        """Records the verdict's log-probabilities, which are asked for; `commit` cuts them with the tokens."""
        assert self.request.logprobs is not None
        path = [node for node in verdict.path if node < len(rows)]
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        if verdict.next_token is not None:
            tokens.append(verdict.next_token)
        judged = [rows[node] for node in path[: len(tokens)]]
        self.logprobs += token_logprobs(logits[path[: len(tokens)]], judged, tokens, self.request.logprobs)

    def record(self, commit: Commit, rows: int, emitted: int, target_seconds: float, start: float, now: float) -> None:
        """Adds the Step of the round from `start` to `now`; `rows` nodes of the tree were judged, a late one may have
        been accepted beside."""
        tree, verdict, hit = commit
        length = len(verdict.path) - 1
        late = verdict.path[-1] >= rows  # a late node ends the path
        judged = rows - 1 - tree.roles[1:rows].count(Role.PROBE)
        longest = max(*depths(tree.parents[:rows]), length)
        accepted = min(length, emitted)  # not what a stop or the limit cut off
        self.ended = now
        times = (self.draft_seconds, target_seconds, now - start)
        self.steps.append(Step(judged + late, accepted, emitted, longest, hit, rows, *times))
        self.draft_seconds = 0.0
        self.first_token = self.first_token or self.ended


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
    if request.adjustments is not None:
        check_whole("min_tokens", request.adjustments.min_tokens, 0, request.max_tokens)
        for token, _ in request.adjustments.logit_bias:
            check_range("a token of logit_bias", token, 0, last)
        for token in (token for word in request.adjustments.bad_words for token in word):
            check_range("a token of bad_words", token, 0, last)
