"""One answer: streamed in pieces, and as a whole."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace

from outpace.api.shared_engine import SharedEngine
from outpace.api.text import Piece, TextAssembler
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import TokenSequence


@dataclass(frozen=True)
class Result:
    """One complete answer.

    `finish_reason`: "stop" (a stop token or stop string), "length" (`max_tokens`, or the context is full) or "abort"
    (closed early, or reading it was interrupted). `tokens`: the generated ids, including the stop token. `seconds`:
    from the call to the last token; `time_to_first_token`: from the call to the end of the first round;
    `tokens_per_second` is measured between the two.
    `figures`: counts of drafted and accepted tokens. `choice`: number of the answer among several to one prompt.
    `logprobs` has one record per token, `prompt_logprobs` one per prompt token but the first, if requested.
    `lossless` is False if the rule trades the target's distribution for speed. `rounds`: the statistics of each round,
    with the planner's expectations.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    method: str
    seed: int
    seconds: float
    time_to_first_token: float
    tokens_per_second: float
    figures: RunStats
    choice: int = 0
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    lossless: bool = True
    rounds: tuple[RoundStats, ...] = ()


class Stream:
    """An iterator over the Pieces of one answer. `finish()` reads to the end, `close()` ends the answer early."""

    def __init__(
        self, engine: SharedEngine, run: TokenSequence, text: TextAssembler, method: str, echo: str, owner: object
    ) -> None:
        """`echo` is the first piece; `owner` must live as long as the stream, so a reference is kept."""
        self._engine, self._run, self._text, self._method, self._owner = engine, run, text, method, owner
        self._texts: list[str] = []
        self._sent = 0  # tokens in the pieces that were handed out
        self._is_whole = False  # only the whole answer is wanted, so pieces need not be waited for
        self._is_read = False  # all pieces were handed out
        self._pieces = self._iterate(echo)

    def __iter__(self) -> Generator[Piece, None, None]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def choice(self) -> int:
        """The number of this answer among several to one prompt."""
        return self._run.request.choice

    def __del__(self) -> None:
        if "_run" in vars(self):  # not if Ctrl-C came in `__init__`
            self._engine.abort(self._run)  # it can no longer be read

    def abort(self) -> None:
        """End the answer after the current round and return at once; safe in signal handlers and in any thread. The
        pieces written until then are still handed out."""
        self._engine.abort(self._run)

    def close(self) -> None:
        """End the answer here, also for another thread that is reading it."""
        self._engine.drop(self._run)
        with suppress(ValueError):  # another thread is reading: it reaches the end by itself
            self._pieces.close()

    def finish(self) -> Result:
        """Read the answer to its end and return all of it; a second call returns at once. After `close()`: what was
        written until then."""
        self._is_whole = True
        for _ in self._pieces:
            pass
        run, history = self._run, self._run.history
        decoding = history.ended - history.first_token
        later = self._sent - (history.steps[0].emitted if history.steps else 0)
        return Result(
            text="".join(self._texts),
            tokens=tuple(run.tokens[: self._sent]),
            finish_reason=(run.finish_reason if self._is_read else None) or "abort",
            method=self._method,
            seed=run.request.seed,
            seconds=max(history.ended - history.submitted, 0.0),
            time_to_first_token=max(history.first_token - history.submitted, 0.0),
            tokens_per_second=max(later, 0) / decoding if decoding > 0 else 0.0,
            figures=summarize(history.steps),
            choice=run.request.choice,
            prompt_tokens=len(run.request.prompt),
            lossless=run.request.rule.traits.lossless,
            logprobs=tuple(history.logprobs[: self._sent]),
            prompt_logprobs=tuple(history.prompt_logprobs),
            rounds=tuple(history.steps),
        )

    def _iterate(self, echo: str) -> Generator[Piece, None, None]:
        run, text, end = self._run, self._text, self._engine.drop
        try:
            if echo:
                text.pieces.appendleft(Piece(echo, (), False))
            while True:
                if not text.has_news:
                    self._engine.drive(run, None if self._is_whole else text)
                if not text.has_news:
                    break
                yield self._piece(text.pieces.popleft())
            if run.error is not None:
                raise run.error
            text.finish()
            while text.has_news:
                yield self._piece(text.pieces.popleft())
            self._is_read = True
        except GeneratorExit:  # perhaps garbage, collected in any thread and under any lock: do not take the lock
            end = self._engine.abort
            raise
        finally:
            end(run)

    def _piece(self, piece: Piece) -> Piece:
        self._texts.append(piece.text)
        records = self._run.history.logprobs[self._sent : self._sent + len(piece.tokens)]
        self._sent += len(piece.tokens)
        return replace(piece, logprobs=tuple(records)) if records else piece
