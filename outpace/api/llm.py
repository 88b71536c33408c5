"""The library: load a model, stream or generate text, chat. Text in, text out; streams are the primitive.

An LLM and its streams may be used from several threads: whoever waits for text steps the engine for all.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from outpace.api.fair_lock import Turns
from outpace.api.params import Asking, asking_of, check_choices
from outpace.api.stream import Answer, Piece, StopStrings
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.stats import Figures, fold
from outpace.core.types import Request, Rule, TokenLogprobs
from outpace.engine.build import PLANNED, Parts, build_engine, check_rule, choose_method, default_drafter, find_rule
from outpace.engine.engine import EngineOptions
from outpace.engine.profile import Profile, subject
from outpace.engine.request import Running
from outpace.models.load import Loaded

PLANNED_NODES = 32  # that a planner may verify at most, unless it is told
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]  # text, messages for the chat template, or token ids


@dataclass(frozen=True)
class Result:
    """One whole answer. Seconds; tokens a second count from the first round's end to the last's.

    `logprobs` has a record for each of `tokens`, `prompt_logprobs` one for each of the prompt's but its first, where
    they were asked for. `choice` tells the answers to one prompt apart.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    method: str
    seed: int
    seconds: float
    time_to_first_token: float
    tokens_per_second: float
    figures: Figures
    choice: int = 0
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Stream:
    """Iterates over the Pieces of one answer; `result` is there when it is over. Closing it early aborts the rest."""

    def __init__(self, llm: LLM, run: Running, answer: Answer, method: str, echo: str) -> None:
        self._llm, self._run, self._answer, self._method = llm, run, answer, method
        self._texts: list[str] = []
        self._sent = 0  # tokens whose text was handed out
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
        self._llm.engine.abort(self._run)  # nobody reads on

    def close(self) -> None:
        """Ends the answer where it is, also for a thread that is reading it."""
        self._llm.drop(self._run)
        with suppress(ValueError):  # raised while another thread reads: that comes to the end by itself
            self._pieces.close()

    @property
    def result(self) -> Result:
        """What was written; the stream is read to its end first."""
        for _ in self._pieces:
            pass
        run = self._run
        history = run.history
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
            figures=fold(history.steps),
            choice=run.request.choice,
            prompt_tokens=len(run.request.prompt),
            logprobs=tuple(history.logprobs[: self._sent]),
            prompt_logprobs=tuple(history.prompt_logprobs),
        )

    def _iterate(self, echo: str) -> Generator[Piece, None, None]:
        run, pieces, end = self._run, self._answer.pieces, self._llm.drop
        try:
            if echo:
                pieces.appendleft(Piece(echo, (), False))
            while True:
                if not pieces:
                    self._llm.drive(run, pieces)
                if not pieces:
                    break
                yield self._piece(pieces.popleft())
            if run.error is not None:
                raise run.error
            self._answer.finish()
            while pieces:
                yield self._piece(pieces.popleft())
        except GeneratorExit:  # it may be garbage, collected in any thread, under any lock: no place to take a turn
            end = self._llm.engine.abort
            raise
        finally:
            end(run)

    def _piece(self, piece: Piece) -> Piece:
        self._texts.append(piece.text)
        records = self._run.history.logprobs[self._sent : self._sent + len(piece.tokens)]
        self._sent += len(piece.tokens)
        return replace(piece, logprobs=tuple(records))


class LLM(AbstractContextManager["LLM"]):
    """A target with everything that makes it write faster. Close it, or use it with `with`."""

    def __init__(
        self,
        target: Loaded,
        draft: Loaded | None = None,
        *,
        method: str = "auto",
        drafter: str | None = None,
        rule: str = "auto",
        worker: str = "thread",
        draft_threads: int = 1,
        nodes: int | None = None,
        batch: int = 16,
        kv_memory: float | None = None,
        reuse: bool = True,
        profile: bool = True,
        **options: Any,
    ) -> None:
        """`nodes`: tree nodes verified a pass (None: 32 where they are planned, else 8); `batch`, `kv_memory`, `reuse`
        as in `EngineOptions`; `profile`: what was learnt about this pair on this machine before is known from the start
        by method "auto", and what is learnt is kept; `options` are those of the method and the drafter, by name."""
        self.target, self.draft, self.tokenizer = target, draft, target.tokenizer
        self._profile = Profile(subject(target, draft)) if method == "auto" and profile else None
        tuned = self._profile.method if self._profile else None
        self.method = choose_method(target, draft, rule, tuned) if method == "auto" else method
        self.rule = rule
        self._turns = Turns()
        self._rules: dict[bool, Rule] = {}  # one instance serves all requests, so that their rows go together
        self._decoder = registry.find("decoders", self.method)
        self._plain = registry.find("decoders", "autoregressive")
        self._options = registry.build_options(self._decoder, options)  # a wrong value is said before a thread starts
        nodes = nodes if nodes is not None else PLANNED_NODES if self.method == PLANNED else EngineOptions.nodes
        settings = EngineOptions(nodes=nodes, batch=batch, kv_memory=kv_memory, reuse=reuse)
        drafter = drafter or default_drafter(self.method, draft is not None) if self._decoder.NEEDS else drafter
        check_rule(rule, self._decoder, drafter)
        parts = Parts(self.method, drafter, worker, draft_threads)
        self.engine = build_engine(target, draft, parts, settings, options)
        if self._profile:
            self._profile.begin(self.engine)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all answers, the drafter's worker and the process that renders chat templates."""
        with self._turns.turn():
            if self._profile:
                self._profile.keep(self.engine)
            self.engine.close()
        self.tokenizer.close()

    def stream(
        self, prompt: Prompt, asking: Asking | None = None, *, choice: int = 0, plain: bool = False, **options: Any
    ) -> Stream:
        """Starts an answer to text, chat messages or token ids; `options` by name are those of `Asking`.

        `choice` tells several sampled answers to one prompt apart. `plain`: without speculation; the text is the same.
        """
        asking = self._asking(asking, options)
        tokens = self._tokens(prompt)
        stop_ids = frozenset() if asking.ignore_eos else self.tokenizer.stop_ids
        request = Request(
            tuple(tokens),
            self._rule(asking),
            asking.max_tokens,
            asking.sampling,
            asking.seed,
            choice,
            stop_ids,
            asking.adjustments(self.tokenizer),
            asking.logprobs_options,
        )
        stops = StopStrings(asking.stop, asking.include_stop)
        answer = Answer(self.tokenizer.stream(), stops, self.tokenizer.stop_ids)
        decoder = self._plain if plain else self._decoder
        with self._turns.turn():
            run = self.engine.submit(request, decoder, decoder.Options() if plain else self._options, answer.watch)
        echo = (prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)) if asking.echo else ""
        return Stream(self, run, answer, "autoregressive" if plain else self.method, echo)

    def generate(
        self,
        prompts: Sequence[Prompt],
        asking: Asking | None = None,
        *,
        n: int = 1,
        plain: bool = False,
        **options: Any,
    ) -> list[Result]:
        """`n` answers to each prompt, batched, one prompt's after the other's; options as for `stream`."""
        if isinstance(prompts, str):
            raise UserError("prompts is one text, it must be a list of them")
        asking = self._asking(asking, options)
        check_choices(n, asking)
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams += [self.stream(prompt, asking=asking, choice=choice, plain=plain) for choice in range(n)]
            return [stream.result for stream in streams]
        finally:
            for stream in streams:  # those that an error left behind
                stream.close()

    def chat(self, messages: Sequence[Mapping[str, Any]], asking: Asking | None = None, **options: Any) -> Result:
        """The answer to a conversation; options as for `stream`."""
        return self.stream(messages, asking, **options).result

    def drive(self, run: Running, pieces: Sequence[Piece]) -> None:
        """Steps the engine, in turn with other threads, until this request has pieces or is over."""
        while True:
            with self._turns.turn():
                if pieces or run.finish_reason is not None:
                    return
                self.engine.step()

    def drop(self, run: Running) -> None:
        """Ends a request; what it holds goes at once, or with the next step of the thread that has the turn."""
        self.engine.abort(run)
        with self._turns.try_turn() as is_mine:
            if is_mine:
                self.engine.sweep()

    def _asking(self, asking: Asking | None, options: Mapping[str, Any]) -> Asking:
        if asking is not None and options:
            raise UserError(f"give an Asking or options by name, not both: {', '.join(options)}")
        return asking or asking_of(options)

    def _rule(self, asking: Asking) -> Rule:
        is_greedy = asking.sampling.is_greedy
        if is_greedy not in self._rules:
            self._rules[is_greedy] = find_rule(self.rule, asking.sampling)
        return self._rules[is_greedy]

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if all(isinstance(message, Mapping) for message in prompt):
            return self.tokenizer.chat(prompt)
        raise UserError(f"the prompt is {prompt!r}, it must be text, chat messages or token ids")
