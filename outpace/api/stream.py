"""One answer as it comes, and as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace

from outpace.api.shared_engine import SharedEngine
from outpace.api.text import Piece, TextAssembler
from outpace.core.stats import RunStats, summarize
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import TokenSequence


@dataclass(frozen=True)
class Result:
    """One whole answer.

    `finish_reason`: "stop" (a stop token or stop string), "length" (`max_tokens`, or the context is full) or "abort"
    (closed early). `tokens`: the ids that were written, the stop token included. `seconds`: from the call to the last
    token; `time_to_first_token`: to the end of the first round; `tokens_per_second` is counted between the two.
    `figures`: what was drafted and accepted. `choice` tells the answers to one prompt apart. `logprobs` has a record
    for each of `tokens`, `prompt_logprobs` one for each of the prompt's but its first, where they were asked for.
    `lossless` is False where the rule gave up the target's distribution for speed.
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


class Stream:
    """Iterates over the Pieces of one answer. `finish()` reads on to its end, `close()` ends it where it is."""

    def __init__(
        self, engine: SharedEngine, run: TokenSequence, text: TextAssembler, method: str, echo: str, owner: object
    ) -> None:
        """`echo` is handed out before the answer; `owner` must live as long as the stream."""
        self._engine, self._run, self._text, self._method, self._owner = engine, run, text, method, owner
        self._texts: list[str] = []
        self._sent = 0  # tokens whose text was handed out
        self._is_whole = False  # nobody looks at it before its end
        self._pieces = self._iterate(echo)

    def __iter__(self) -> Generator[Piece, None, None]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def choice(self) -> int:
        """Which of several answers to one prompt this is."""
        return self._run.request.choice

    def __del__(self) -> None:
        self._engine.abort(self._run)  # nobody reads on

    def abort(self) -> None:
        """Ends the answer after the round that is under way, and returns at once. For a handler of signals, and for any
        thread; what was written until then is still handed out."""
        self._engine.abort(self._run)

    def close(self) -> None:
        """Ends the answer where it is, also for a thread that is reading it."""
        self._engine.drop(self._run)
        with suppress(ValueError):  # raised while another thread reads: that comes to the end by itself
            self._pieces.close()

    def finish(self) -> Result:
        """Reads the answer to its end, as long as that takes, and gives the whole of it; again at once when called
        again. After `close()`: what was written until then."""
        self._is_whole = True
        for _ in self._pieces:
            pass
        run, history = self._run, self._run.history
        decoding = history.ended - history.first_token
        later = self._sent - (history.steps[0].emitted if history.steps else 0)
        return Result(
            text="".join(self._texts),
            tokens=tuple(run.tokens[: self._sent]),
            finish_reason=run.finish_reason or "abort",
            method=self._method,
            seed=run.request.seed,
            seconds=max(history.ended - history.submitted, 0.0),
            time_to_first_token=max(history.first_token - history.submitted, 0.0),
            tokens_per_second=max(later, 0) / decoding if decoding > 0 else 0.0,
            figures=summarize(history.steps),
            choice=run.request.choice,
            prompt_tokens=len(run.request.prompt),
            lossless=run.request.rule.lossless,
            logprobs=tuple(history.logprobs[: self._sent]),
            prompt_logprobs=tuple(history.prompt_logprobs),
        )

    @property
    def result(self) -> Result:
        """Deprecated: call `finish()`, which says that it reads the answer to its end."""
        warnings.warn("Stream.result is deprecated, call Stream.finish()", DeprecationWarning, stacklevel=2)
        return self.finish()

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
        except GeneratorExit:  # it may be garbage, collected in any thread, under any lock: no place to take a turn
            end = self._engine.abort
            raise
        finally:
            end(run)

    def _piece(self, piece: Piece) -> Piece:
        self._texts.append(piece.text)
        records = self._run.history.logprobs[self._sent : self._sent + len(piece.tokens)]
        self._sent += len(piece.tokens)
        return replace(piece, logprobs=tuple(records)) if records else piece
