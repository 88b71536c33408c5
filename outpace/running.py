"""One request on its way through the engine, and what its verdicts write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from outpace.candidates.cache import CandidateCache, Correction
from outpace.core.errors import UserError, check_whole
from outpace.core.tree import Role, TokenTree, depths
from outpace.core.types import Ask, DraftState, Request, Step, Verdict
from outpace.decoders.base import Coroutine
from outpace.models.base import Model, Session


@dataclass(eq=False)
class Running:
    """One request on its way. `tokens` is what was written so far; `finish_reason` is None until it is over."""

    request: Request
    decoder: ModuleType
    options: Any
    key: int
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None
    budget: int = 1
    candidates: CandidateCache = field(init=False, repr=False)
    session: Session = field(init=False, repr=False)
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0  # when the first round ended, 0 before
    ended: float = 0.0
    prefilled: int = 0
    keep: Sequence[int] = ()
    draft_state: DraftState | None = None
    draft_seconds: float = 0.0
    ask: Ask | None = None
    coroutine: Coroutine | None = None
    correct: Callable[[Correction], None] = field(default=lambda correction: None, repr=False)  # tells the worker

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return min(self.request.max_tokens, self.session.capacity - len(self.request.prompt)) - len(self.tokens)

    @property
    def length(self) -> int:
        """Committed tokens: prompt and answer."""
        return len(self.request.prompt) + len(self.tokens)

    def commit(self, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Writes the verdict's tokens, up to the first stop token or the last that is allowed."""
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        if verdict.next_token is not None:
            tokens.append(verdict.next_token)
        stop = next((place for place, token in enumerate(tokens) if token in self.request.stop_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        left = self.left
        self.tokens += tokens[:left]
        if stop is not None and stop < left:
            self.finish_reason = "stop"
        elif len(tokens) >= left:
            self.finish_reason = "length"
        return tokens[:left]

    def record(self, tree: TokenTree, verdict: Verdict, rows: int, emitted: int, **times: Any) -> None:
        """Adds the round's Step; `rows` nodes of the tree were judged, a late one may have been accepted beside."""
        late = sum(node >= rows for node in verdict.path)
        judged = sum(role is not Role.PROBE for role in tree.roles[1:rows])
        longest = max(*depths(tree.parents[:rows]), len(verdict.path) - 1)
        accepted = min(len(verdict.path) - 1, emitted)  # not what a stop or the limit cut off
        self.steps.append(Step(judged + late, accepted, emitted, longest, verified_rows=rows, **times))
        self.ended = time.perf_counter()
        self.first_token = self.first_token or self.ended


def check_request(request: Request, target: Model) -> None:
    """UserError for a request that can never run on this target."""
    if not request.prompt:
        raise UserError("the prompt has no tokens, at least one is needed")
    most = target.max_positions
    if len(request.prompt) >= most:
        raise UserError(f"the prompt has {len(request.prompt)} tokens, the target's context holds {most}")
    check_whole("max_tokens", request.max_tokens, 1)
    bad = next((token for token in request.prompt if not 0 <= token < target.vocab_size), None)
    if bad is not None:
        raise UserError(f"the prompt has token {bad}, allowed are 0 to {target.vocab_size - 1}")
