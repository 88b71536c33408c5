"""The library: load a model, stream or generate text, chat. Text in, text out; streams are the primitive.

An LLM and its streams may be used from several threads: whoever waits for text steps the engine for all.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from outpace.api._deprecated import renamed
from outpace.api.params import SamplingParams, params_of
from outpace.api.prompts import Prompt, messages_of, prompts_of, tokens_of
from outpace.api.shared_engine import SharedEngine
from outpace.api.stream import Result, Stream
from outpace.api.text import StopStrings, TextAssembler
from outpace.core import numbers, registry
from outpace.core.errors import UserError, check_whole
from outpace.core.types import Request, Rule
from outpace.engine.build import PLANNED, Parts, build_engine, check_rule, choose_method, default_drafter, find_rule
from outpace.engine.engine import EngineOptions
from outpace.engine.profile import Profile, subject
from outpace.models.load import Loaded

PLANNED_NODES = 32  # that a planner may verify at most, unless it is told


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
        by method "auto", and what is learnt is kept; `options`: those of the method, the drafter and the rule."""
        self.target, self.draft, self.tokenizer = target, draft, target.tokenizer
        self._profile = Profile(subject(target, draft)) if method == "auto" and profile else None
        tuned = self._profile.method if self._profile else None
        self.method = choose_method(target, draft, rule, tuned) if method == "auto" else method
        self.rule = rule
        self._rule_options = options
        self._rules: dict[bool, Rule] = {}  # one instance serves all requests, so that their rows go together
        self._decoder = registry.find("decoders", self.method)
        self._plain = registry.find("decoders", "autoregressive")
        options = {name: numbers.plain(value) for name, value in options.items()}
        self._options = registry.build_options(self._decoder, options)  # a wrong value is said before a thread starts
        nodes = nodes if nodes is not None else PLANNED_NODES if self.method == PLANNED else EngineOptions.nodes
        nodes, batch, kv_memory, draft_threads = map(numbers.plain, (nodes, batch, kv_memory, draft_threads))
        settings = EngineOptions(nodes=nodes, batch=batch, kv_memory=kv_memory, reuse=reuse)
        drafter = drafter or default_drafter(self.method, draft is not None) if self._decoder.NEEDS else drafter
        check_rule(rule, self._decoder, drafter)
        parts = Parts(self.method, drafter, rule, worker, draft_threads)
        self.engine = build_engine(target, draft, parts, settings, options)
        self._shared = SharedEngine(self.engine)
        if self._profile:
            self._profile.begin(self.engine)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all answers, the drafter's worker and the process that renders chat templates."""
        with self._shared.lock.hold():
            if self._profile:
                self._profile.keep(self.engine)
            self.engine.close()
        self.tokenizer.close()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        choice: int = 0,
        plain: bool = False,
        **options: Any,
    ) -> Stream:
        """Starts an answer to text, chat messages or token ids; `options` by name are those of `SamplingParams`.

        `choice` tells several sampled answers to one prompt apart. `plain`: without speculation; the text is the same.
        """
        return self._stream(prompt, _params(sampling_params, options), choice, plain)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        plain: bool = False,
        **options: Any,
    ) -> list[Result]:
        """Answers a prompt or several, batched: `n` results for each prompt, one prompt's after the other's.

        `prompts`: one prompt (a text, a list of messages, a list of token ids) or a list of such; a list of whole
        numbers is one prompt. `sampling_params`: for all, or one for each prompt. The rest as for `stream`.
        """
        asked = prompts_of(prompts)
        each = _params_of_each(sampling_params, options, len(asked))
        streams: list[Stream] = []
        try:
            for prompt, params in zip(asked, each, strict=True):
                params = params if n is None else replace(params, n=n)
                streams += [self._start(prompt, params, choice, plain) for choice in range(params.n)]
            return [stream.finish() for stream in streams]
        finally:
            for stream in streams:  # those that an error left behind
                stream.close()

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        choice: int = 0,
        plain: bool = False,
        **options: Any,
    ) -> Result:
        """The answer to a conversation, through the model's chat template; a text is one message of the user's. Options
        as for `stream`."""
        params = _params(sampling_params, options)
        return self._stream(messages_of(messages), params, choice, plain).finish()

    def _stream(self, prompt: Prompt, params: SamplingParams, choice: int, plain: bool) -> Stream:
        if params.n > 1:
            raise UserError(f"n is {params.n}, this gives one answer: use generate, or ask for each choice")
        choice = numbers.plain(choice)
        check_whole("choice", choice, 0)
        return self._start(prompt, params, choice, plain)

    def _start(self, prompt: Prompt, params: SamplingParams, choice: int, plain: bool) -> Stream:
        tokens = tokens_of(prompt, self.tokenizer)
        for token in params.stop_token_ids:
            check_whole("a token of stop_token_ids", token, 0, self.target.model.vocab_size - 1)
        own_ends = frozenset() if params.ignore_eos else self.tokenizer.stop_ids
        request = Request(
            prompt=tuple(tokens),
            rule=self._rule(params),
            max_tokens=params.max_tokens,
            sampling=params.sampling,
            seed=params.seed,
            choice=choice,
            stop_ids=own_ends.union(params.stop_token_ids),
            adjustments=params.adjustments(self.tokenizer),
            logprobs=params.logprobs_options,
        )
        include_stop = params.include_stop_str_in_output
        hidden = self.tokenizer.stop_ids.union(() if include_stop else params.stop_token_ids)
        stops = StopStrings(params.stop, include_stop)
        text = TextAssembler(self.tokenizer.stream(), stops, hidden, params.min_tokens)
        decoder = self._plain if plain else self._decoder
        run = self._shared.submit(request, decoder, decoder.Options() if plain else self._options, text.watch)
        echo = (prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)) if params.echo else ""
        return Stream(self._shared, run, text, "autoregressive" if plain else self.method, echo, owner=self)

    def _rule(self, params: SamplingParams) -> Rule:
        is_greedy = params.sampling.is_greedy
        if is_greedy not in self._rules:
            self._rules[is_greedy] = find_rule(self.rule, params.sampling, self._rule_options)
        return self._rules[is_greedy]


def _params(given: Any, options: Mapping[str, Any], stacklevel: int = 5) -> SamplingParams:
    """From the record, or from options by name; called by what the user calls."""
    options = renamed(options, stacklevel)
    if given is None:
        given = options.pop("sampling_params", None)  # by its old name
    if given is not None and options:
        raise UserError(f"give SamplingParams or options by name, not both: {', '.join(options)}")
    params = params_of(options) if given is None else given
    if not isinstance(params, SamplingParams):
        said = reprlib.repr(params)
        raise UserError(f"sampling_params is {said}, it must be SamplingParams; or give options by name")
    return params


def _params_of_each(given: Any, options: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """Those of each prompt, which may share one record."""
    if not isinstance(given, (list, tuple)):
        return [_params(given, options, 6)] * count
    if len(given) != count:
        raise UserError(f"there are {len(given)} sampling_params for {count} prompts, give one for all or one for each")
    return [_params(params, options) for params in given]
