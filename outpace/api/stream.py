"""One answer: streamed in pieces, and as a whole."""

from __future__ import annotations

import reprlib
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace

from outpace.api.shared_engine import SharedEngine
from outpace.api.text import Piece, TextAssembler
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import TokenSequence

SHOWN_TEXT = 500  # characters of an answer that print() shows


@dataclass(frozen=True, repr=False)
class Result:
    """One complete answer.

    `finish_reason`: "stop" (a stop token or stop string), "length" (`max_tokens`, or the context is full) or "abort"
    (closed early, or reading it was interrupted). `tokens`: the generated ids, including the stop token. `seconds`:
    from the call to the last token; `time_to_first_token`: from the call to the end of the first round;
    `tokens_per_second` is measured between the two.
    `figures`: counts of drafted and accepted tokens. `choice`: number of the answer among several to one prompt.
    `logprobs` has one record per token, `prompt_logprobs` one per prompt token but the first, if requested.
    `reasoning`: the thought before the answer, if a conversation was answered and the model's chat template shows that
    it thinks; `text` is then the answer without it. With `skip_special_tokens` False, `text` is all that was written.
    `lossless` is False if the rule trades the target's distribution for speed. `rounds`: the statistics of each round,
    with the planner's expectations. `prompt`: the prompt, if it was a text.
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
    prompt: str | None = None
    reasoning: str = ""

    @property
    def outputs(self) -> tuple[Result]:
        """This answer alone, as in vLLM, where a result has several outputs: here each answer is a result."""
        return (self,)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """vLLM's name of `tokens`."""
        return self.tokens

    def __str__(self) -> str:
        text = self.text if len(self.text) <= SHOWN_TEXT else f"{self.text[:SHOWN_TEXT]}..."
        length = f"mean accepted length {self.figures.mean_accepted_length:.2f}, " if self.figures.drafted else ""
        return (
            f"text: {text!r}\n"
            f"tokens: {len(self.tokens)} ({self.finish_reason}), {self.tokens_per_second:.1f} a second, the first after"
            f" {self.time_to_first_token:.2f} s\n"
            f"method: {self.method}{'' if self.lossless else ' (lossy)'}, {length}seed {self.seed}"
        )

    def __repr__(self) -> str:
        return f"Result({reprlib.repr(self.text)}, {self.finish_reason!r}, {len(self.tokens)} tokens)"


class Stream:
    """An iterator over the Pieces of one answer. `finish()` reads to the end, `close()` ends the answer early."""

    def __init__(
        self,
        engine: SharedEngine,
        run: TokenSequence,
        text: TextAssembler,
        method: str,
        echo: str,
        owner: object,
        prompt: str | None = None,
    ) -> None:
        """`echo` is the first piece; `owner` must live as long as the stream, so a reference is kept."""
        self._prompt = prompt
        self._engine, self._run, self._text, self._method, self._owner = engine, run, text, method, owner
        self._texts: list[str] = []
        self._thoughts: list[str] = []
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
            prompt=self._prompt,
            reasoning="".join(self._thoughts),
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
        self._thoughts.append(piece.reasoning)
        records = self._run.history.logprobs[self._sent : self._sent + len(piece.tokens)]
        self._sent += len(piece.tokens)
        return replace(piece, logprobs=tuple(records)) if records else piece
