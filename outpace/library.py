"""The library: load a model, stream or generate text, chat. Text in, text out; streams are the primitive."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from outpace.assemble import (
    Loaded,
    Parts,
    Progress,
    build_engine,
    find_rule,
    load_draft,
    load_model,
    silent,
)
from outpace.core import registry
from outpace.core.errors import UserError, check_whole
from outpace.core.sampling import Sampling
from outpace.core.stats import Figures, fold
from outpace.core.types import Request, Rule
from outpace.engine import EngineOptions
from outpace.running import Running

Prompt = str | Sequence[Mapping[str, str]]  # plain text, or messages for the model's chat template


@dataclass(frozen=True)
class Piece:
    """A bit of text as it comes. `is_draft`: it was drafted and accepted, not written by the target itself."""

    text: str
    tokens: tuple[int, ...]
    is_draft: bool


@dataclass(frozen=True)
class Result:
    """One whole answer. Seconds; tokens a second count from the first round's end to the last's."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    method: str
    seed: int
    seconds: float
    time_to_first_token: float
    tokens_per_second: float
    figures: Figures


class Stream:
    """Iterates over the Pieces of one answer; `result` is there when it is over. Closing it early aborts the rest."""

    def __init__(self, llm: LLM, run: Running, method: str) -> None:
        self._llm, self._run, self._method = llm, run, method
        self._pieces = self._iterate()
        self._texts: list[str] = []
        self._sent = 0  # tokens whose text was handed out

    def __iter__(self) -> Generator[Piece, None, None]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer where it is."""
        self._pieces.close()
        self._llm.engine.abort(self._run)

    @property
    def result(self) -> Result:
        """What was written; the stream is read to its end first."""
        for _ in self._pieces:
            pass
        run = self._run
        decoding = run.ended - run.first_token
        later = self._sent - (run.steps[0].emitted if run.steps else 0)
        return Result(
            text="".join(self._texts),
            tokens=tuple(run.tokens[: self._sent]),
            finish_reason=run.finish_reason or "abort",
            method=self._method,
            seed=run.request.seed,
            seconds=max(run.ended - run.submitted, 0.0),
            time_to_first_token=max(run.first_token - run.submitted, 0.0),
            tokens_per_second=max(later, 0) / decoding if decoding > 0 else 0.0,
            figures=fold(run.steps),
        )

    def _iterate(self) -> Generator[Piece, None, None]:
        run, text = self._run, self._llm.tokenizer.stream()
        rounds = 0
        try:
            while True:
                while run.finish_reason is None and rounds == len(run.steps):
                    self._llm.engine.step()
                if rounds == len(run.steps):
                    if run.error is not None:
                        raise run.error
                    break
                step = run.steps[rounds]
                rounds += 1
                new = run.tokens[self._sent : self._sent + step.emitted]
                for tokens, is_draft in ((new[: step.accepted], True), (new[step.accepted :], False)):
                    if tokens:
                        yield self._piece(
                            text.push([t for t in tokens if t not in run.request.stop_ids]), tokens, is_draft
                        )
            if rest := text.finish():
                yield self._piece(rest, [], False)
        finally:
            self._llm.engine.abort(run)

    def _piece(self, text: str, tokens: Sequence[int], is_draft: bool) -> Piece:
        self._texts.append(text)
        self._sent += len(tokens)
        return Piece(text, tuple(tokens), is_draft)


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
        nodes: int = 8,
        batch: int = 16,
        **options: Any,
    ) -> None:
        """`nodes`: tree nodes verified a pass; `options` are those of the method and the drafter, by name."""
        self.target, self.draft, self.tokenizer = target, draft, target.tokenizer
        self.method = ("card" if draft else "speculative") if method == "auto" else method
        self.rule = rule
        self._rules: dict[bool, Rule] = {}  # one instance serves all requests, so that their rows go together
        self._decoder = registry.find("decoders", self.method)
        self._plain = registry.find("decoders", "autoregressive")
        self._options = registry.build_options(self._decoder, options)  # a wrong value is said before a thread starts
        settings = EngineOptions(nodes=nodes, batch=batch)
        parts = Parts(self.method, drafter, worker, draft_threads)
        self.engine = build_engine(target, draft, parts, settings, options)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all answers and the drafter's worker."""
        self.engine.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        plain: bool = False,
    ) -> Stream:
        """Starts an answer to text, or to chat messages. `plain`: without speculation; the text is the same."""
        sampling = Sampling(temperature, top_k, top_p, min_p)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.chat(prompt)
        check_whole("seed", seed, 0, 2**63 - 1)
        if sampling.is_greedy not in self._rules:
            self._rules[sampling.is_greedy] = find_rule(self.rule, sampling)
        rule = self._rules[sampling.is_greedy]
        request = Request(tuple(tokens), rule, max_tokens, sampling, seed, choice, self.tokenizer.stop_ids)
        decoder = self._plain if plain else self._decoder
        run = self.engine.submit(request, decoder, decoder.Options() if plain else self._options)
        return Stream(self, run, "autoregressive" if plain else self.method)

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Answers to all prompts, batched; options as for `stream`."""
        if isinstance(prompts, str):
            raise UserError("prompts is one text, it must be a list of them")
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(self.stream(prompt, **options))
            return [stream.result for stream in streams]
        finally:
            for stream in streams:  # those that an error left behind
                stream.close()

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Result:
        """The answer to a conversation; options as for `stream`."""
        return self.stream(messages, **options).result


def load(
    target: str | None = None,
    draft: str | None = None,
    *,
    device: str = "cpu",
    draft_device: str | None = None,
    dtype: str = "float32",
    exact: bool | None = None,
    progress: Progress = silent,
    **options: Any,
) -> LLM:
    """Loads a target (None: the shipped model) and a draft for it; `options` as for `LLM`.

    A model is a hub id, a folder of safetensors, or a .gguf file; a draft may also be some of the target's own layers,
    as in "layers:0,1,28,29".
    """
    loaded = load_model(target, device=device, dtype=dtype, exact=exact, progress=progress)
    small = None
    if draft is not None:
        small = load_draft(draft, loaded, device=draft_device or device, dtype=dtype, exact=exact, progress=progress)
    return LLM(loaded, small, **options)
