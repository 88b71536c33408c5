"""The library: load a model, stream or generate text, chat. Text in, text out; streams are the primitive.

An LLM and its streams may be used from several threads: whoever waits for text steps the engine for all.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

from outpace.api.asked import given_params, params_of_each
from outpace.api.pair import load_pair
from outpace.api.params import SamplingParams
from outpace.api.prompts import Prompt, messages_of, prompts_of, tokens_of
from outpace.api.shared_engine import SharedEngine
from outpace.api.stream import Result, Stream
from outpace.api.text import StopStrings, TextAssembler
from outpace.core import arrays, registry
from outpace.core.errors import UserError, check_whole
from outpace.core.types import Request, Rule
from outpace.engine.build import (
    PLANNED,
    Parts,
    build_engine,
    check_names,
    check_prediction,
    check_rule,
    choose_method,
    default_drafter,
    default_rule,
    find_rule,
    may_draft,
    needs_same_tokens,
    with_grammar,
)
from outpace.engine.options import BURST, EngineOptions
from outpace.engine.warmup import time_rounds
from outpace.grammar.compiler import Grammars
from outpace.models.load import Progress, silent
from outpace.models.options import LoadOptions
from outpace.planning.profile import Profile, subject

ALIKE = 0.8  # of a misspelt name and the one that was meant


def parse_kwargs(target: Any, more: dict[str, Any], own: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """The target and the fields of `LoadOptions`, both taken out of `more`: what is left there are options of methods.
    UserError for a name that no method has, but is like one of these fields or a parameter of `own`."""
    if "model" in more and target is not None:
        raise UserError("model is another name for target, give one of them")
    target = more.pop("model", target)
    loading = [field.name for field in fields(LoadOptions)]
    changes = {name: more.pop(name) for name in loading if name in more}
    allowed = [*loading, "model", *inspect.signature(own).parameters]
    sampling = [field.name for field in fields(SamplingParams)]
    for name in more:
        if name in sampling and not registry.owners(name):
            raise UserError(f"{name} is an argument of `generate` and of `SamplingParams`, not of LLM")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=ALIKE)
        if near and not registry.owners(name):
            raise UserError(f"LLM has no argument {name!r}; did you mean {near[0]!r}?")
    return target, changes


@dataclass(frozen=True)
class PreparedRequest:
    """What the engine is handed (`request`, `decoder`, its `options`, `text.watch`, and the name of its `drafter`), and
    what makes text of its tokens. `echo` stands before the answer."""

    request: Request
    decoder: ModuleType
    options: Any
    text: TextAssembler
    method: str
    echo: str
    drafter: str | None = None


PLANNED_NODES = 32  # that a planner may verify at most, unless it is told


class LLM(AbstractContextManager["LLM"]):
    """A target model, with what makes it write faster. Close it, or use it with `with`; else a ResourceWarning comes.

    Models:
        target: a hub id, a folder of safetensors, a .gguf file, or a causal LM of transformers that is loaded already,
            with its `tokenizer`; None: the shipped model. `model` is another name for it.
        draft: a smaller model with the same tokens, as above; "auto": the small sibling that is known for the target;
            some of the target's own layers, "layers:0,1,28,29"; a list of drafts, of which each round has the best;
            "none"; or None: none, but for the shipped target, unless the method or the drafter needs no model.
        options: how the models are loaded, or the fields of `LoadOptions` by name: device, dtype, exact, runtime,
            trust_remote_code, device_map, inflate, graphs, kv_dtype. Device map and inflation are the target's alone.
        draft_device, draft_dtype: the draft's own; else it is loaded as the target is.
        progress: called with a stage's name and the fraction of it that is done.

    Method (the text does not depend on it, but for rules that say so):
        method: "auto" plans every round; the others are those that `outpace methods` lists.
        drafter: what proposes tokens, several on one tree joined by "+", as in "model+ngram"; several from which each
            answer chooses its own separated by commas, as in "model,ngram", the first for those that choose none.
        rule: how proposals are judged; "auto": greedy at temperature 0, else gumbel.
        worker: where CARD's drafter runs, "thread", "process" or "inline"; None: in a thread, where the method has a
            worker. `draft_threads`: CPU threads that it takes.
        nodes: tree nodes that one pass verifies at most; None: 32 where they are planned, else 8.
        profile: "auto" begins with what was learnt about this pair on this machine before, and keeps what it learns.
            Where nothing is known it times some rounds while it loads, for 0.2 s at most.

    Serving:
        batch: requests that are answered at once; the others wait.
        kv_memory: GiB for keys and values, drafts' too; None: half of what is free. Where they end, answers pause.
        reuse: a prompt that begins like an earlier text starts from its keys and values (prefix cache), and what stood
            there behind all of it is drafted (drafter prediction).

    All else by name are options of the method, the drafter and the rule.
    """

    _is_closed = True  # until it has an engine

    def __init__(
        self,
        target: Any = None,
        draft: Any = None,
        options: LoadOptions | None = None,
        *,
        tokenizer: Any = None,
        draft_device: str | None = None,
        draft_dtype: str | None = None,
        progress: Progress = silent,
        method: str = "auto",
        drafter: str | None = None,
        rule: str = "auto",
        worker: str | None = None,
        draft_threads: int = 1,
        nodes: int | None = None,
        batch: int = 16,
        kv_memory: float | None = None,
        reuse: bool = True,
        profile: bool = True,
        **more: Any,
    ) -> None:
        parts = Parts(method, drafter, rule, worker, arrays.to_python(draft_threads))
        check_names(parts)
        target, changes = parse_kwargs(target, more, LLM.__init__)
        self.target, self.draft = load_pair(
            target,
            draft,
            replace(options or LoadOptions(), **changes),
            draft_device=draft_device,
            draft_dtype=draft_dtype,
            tokenizer=tokenizer,
            progress=progress,
            may_draft=may_draft(method, drafter),
            same_tokens=needs_same_tokens(drafter),
        )
        self.tokenizer = self.target.tokenizer
        self.grammars = Grammars(self.tokenizer)
        self._profile = Profile(subject(self.target, self.draft)) if method == "auto" and profile else None
        sizes = {"nodes": nodes, "batch": batch, "kv_memory": kv_memory, "reuse": reuse, "burst": BURST}
        self._build(parts, {name: arrays.to_python(value) for name, value in sizes.items()}, more)

    def _build(self, parts: Parts, sizes: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """The engine; a wrong option is told before a thread starts."""
        options = {name: arrays.to_python(value) for name, value in more.items()}
        tuned = self._profile.method if self._profile else None
        is_open = parts.method == "auto"
        self.method = choose_method(self.target, self.draft, parts.rule, tuned) if is_open else parts.method
        self._rules: dict[tuple[bool, bool], Rule] = {}  # shared by all requests, so that their rows go together
        self._decoder = registry.find("decoders", self.method)
        self._plain = registry.find("decoders", "autoregressive")
        self._options = registry.build_options(self._decoder, options)
        self.rule, self._rule_options = default_rule(self._decoder, parts.rule), options
        nodes = PLANNED_NODES if self.method == PLANNED else getattr(self._decoder, "NODES", EngineOptions.nodes)
        settings = EngineOptions(**{**sizes, "nodes": nodes if sizes["nodes"] is None else sizes["nodes"]})
        drafter = parts.drafter
        if self._decoder.NEEDS:
            drafter = drafter or default_drafter(self.method, self.draft is not None)
        check_rule(self.rule, self._decoder, drafter)
        self._structured = with_grammar(parts.drafter is None, self.rule, drafter, self._decoder)
        parts = replace(parts, method=self.method, drafter=drafter, rule=self.rule, structured=self._structured)
        self._drafter = drafter
        self.engine = build_engine(self.target, self.draft, parts, settings, options)
        self._is_closed = False
        self._shared = SharedEngine(self.engine)
        is_known = self._profile is not None and self._profile.begin(self.engine)
        if self.method == PLANNED and not is_known:
            time_rounds(self.engine, self.tokenizer.encode("The") or [0])  # any word

    def __repr__(self) -> str:
        return "<closed LLM>" if self._is_closed else f"<LLM of {self.target.name} by {self.method}>"

    def compile(self, params: SamplingParams) -> None:
        """Compiles what the answer has to be, before it is asked for; UserError for what cannot be enforced."""
        if params.structure:
            self.grammars.compile(params.structure)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all answers, the drafter's worker and the process that renders chat templates."""
        with self._shared.lock.hold():
            if self._profile:
                self._profile.keep(self.engine)
            self.engine.close()
            self._is_closed = True
        self.tokenizer.close()

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Tells a worker to end that would outlive all who know it; waits for nothing, because garbage is collected in
        any thread and under any lock."""
        if self._is_closed:
            return
        warn(f"unclosed LLM of {self.target.name}", ResourceWarning, stacklevel=2, source=self)
        if self.engine.worker:
            self.engine.worker.stop()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        choice: int = 0,
        plain: bool = False,
        drafter: str | None = None,
        **options: Any,
    ) -> Stream:
        """Starts an answer to text, chat messages or token ids; `options` by name are those of `SamplingParams`.

        A text is continued as it stands, without the model's chat template; messages go through the template.
        `choice` tells several sampled answers to one prompt apart. `plain`: without speculation; the text is the same.
        `drafter`: one of those that the LLM was made with, by name.
        """
        return self._stream(prompt, given_params(sampling_params, options), choice, plain, drafter)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        plain: bool = False,
        drafter: str | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answers a prompt or several, batched: `n` results for each prompt, one prompt's after the other's.

        `prompts`: one prompt (a text, a list of messages, a list of token ids) or a list of such; a list of whole
        numbers is one prompt. A text is continued as it stands, without the chat template, unlike the prompt of the
        command `outpace generate`: for an answer to a question give a list of messages, or use `chat`.
        `sampling_params`: for all, or one for each prompt. The rest as for `stream`.
        """
        asked = prompts_of(prompts)
        each = params_of_each(sampling_params, options, len(asked))
        streams: list[Stream] = []
        try:
            for prompt, params in zip(asked, each, strict=True):
                params = params if n is None else replace(params, n=n)
                streams += [self._start(prompt, params, choice, plain, drafter) for choice in range(params.n)]
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
        drafter: str | None = None,
        **options: Any,
    ) -> Result:
        """The answer to a conversation, through the model's chat template; a text is one message of the user's, as the
        prompt of the command `outpace generate` is. Options as for `stream`."""
        params = given_params(sampling_params, options)
        return self._stream(messages_of(messages), params, choice, plain, drafter).finish()

    def _stream(self, prompt: Prompt, params: SamplingParams, choice: int, plain: bool, drafter: str | None) -> Stream:
        if params.n > 1:
            raise UserError(f"n is {params.n}, this gives one answer: use generate, or ask for each choice")
        choice = arrays.to_python(choice)
        check_whole("choice", choice, 0)
        return self._start(prompt, params, choice, plain, drafter)

    def _start(self, prompt: Prompt, params: SamplingParams, choice: int, plain: bool, drafter: str | None) -> Stream:
        asked = self.prepare(prompt, params, choice, plain, drafter)
        run = self._shared.submit(asked.request, asked.decoder, asked.options, asked.text.watch, asked.drafter)
        return Stream(self._shared, run, asked.text, asked.method, asked.echo, owner=self)

    def prepare(
        self, prompt: Prompt, params: SamplingParams, choice: int = 0, plain: bool = False, drafter: str | None = None
    ) -> PreparedRequest:
        """An answer that is not begun, for whoever steps the engine without streams; any thread may call it."""
        tokens = tokens_of(prompt, self.tokenizer)
        if params.prediction and not plain:
            check_prediction(drafter or self._drafter)
        for token in params.stop_token_ids:
            check_whole("a token of stop_token_ids", token, 0, self.target.model.vocab_size - 1)
        structure = params.structure
        drafter = drafter or (self._structured if structure and not plain else None)
        own_ends = frozenset() if params.ignore_eos else self.tokenizer.stop_ids
        request = Request(
            prompt=tuple(tokens),
            rule=self._rule(params, plain),
            max_tokens=params.max_tokens,
            sampling=params.sampling,
            seed=params.seed,
            choice=choice,
            stop_ids=own_ends.union(params.stop_token_ids),
            adjustments=params.adjustments(self.tokenizer),
            logprobs=params.logprobs_options,
            prediction=params.predicted(self.tokenizer),
            constraint=self.grammars.constraint(structure, len(tokens)) if structure else None,
        )
        include_stop = params.include_stop_str_in_output
        hidden = self.tokenizer.stop_ids.union(() if include_stop else params.stop_token_ids)
        stops = StopStrings(params.stop, include_stop)
        text = TextAssembler(self.tokenizer.stream(params.skip_special_tokens), stops, hidden, params.min_tokens)
        decoder = self._plain if plain else self._decoder
        echo = (prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)) if params.echo else ""
        options, method = (decoder.Options(), "autoregressive") if plain else (self._options, self.method)
        return PreparedRequest(request, decoder, options, text, method, echo, drafter)

    def _rule(self, params: SamplingParams, plain: bool) -> Rule:
        key = params.sampling.is_greedy, plain
        if key not in self._rules:
            rule = find_rule(self.rule, params.sampling, self._rule_options)
            alone = find_rule("auto", params.sampling) if plain and rule.leaf_q else rule  # it would want a draft's q
            self._rules.setdefault(key, alone)
        return self._rules[key]


def load(target: Any = None, draft: Any = None, options: LoadOptions | None = None, **more: Any) -> LLM:
    """Loads a target (None: the shipped model) and a draft for it: the same as `LLM` with these arguments."""
    return LLM(target, draft, options, **more)
