"""The Python API: load a model, stream or generate text, chat. Streams are the primitive; the rest is built on them.

An LLM and its streams may be used from several threads: each thread that waits for text steps the engine for all.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from outpace.api.pair import load_pair
from outpace.api.params import SamplingParams, read_params, read_params_each
from outpace.api.prompts import ChatPrompt, Prompt, infill_prompt, messages_of, prompts_of, tokens_of
from outpace.api.shared_engine import SharedEngine
from outpace.api.stream import Result, Stream
from outpace.api.text import TextAssembler, assembler_of, thought_before
from outpace.core import arrays, registry
from outpace.core.errors import UserError, check_whole
from outpace.core.types import Request, Rule
from outpace.decoders.base import Decoder
from outpace.engine.build import AUTO, BuildOptions, build_engine, check_prediction, check_rule, find_rule
from outpace.engine.warmup import warm_up
from outpace.grammar.compiler import Grammars
from outpace.models.load import Progress, silent
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded
from outpace.planning.profile import Profile, subject
from outpace.tools.call_grammar import after_thought, thought_rules
from outpace.tools.reasoning import Thought

_SIMILARITY = 0.8  # of a misspelt name to the one that is suggested


@dataclass(frozen=True)
class PreparedRequest:
    """The arguments of `Engine.submit` for one request, and the `TextAssembler` for its tokens, whose `watch` is one of
    these arguments. `method` is the decoder's name; `echo` is shown before the answer."""

    request: Request
    decoder: type[Decoder]
    options: Any
    text: TextAssembler
    method: str
    echo: str
    drafter: str | None = None


class LLM(AbstractContextManager["LLM"]):
    """A target model together with everything that makes it write faster. Close it, or use it with `with`; an unclosed
    LLM gives a ResourceWarning.

    Models:
        target: a Hub id, a folder with safetensors, a .gguf file, or a causal LM of transformers that is already
            loaded, with its `tokenizer`; None: the shipped model. `model` is another name for it.
        draft: a smaller model with the same vocabulary, given like the target; "auto": the known small sibling of the
            target; "mtp": the MTP layer in the target's files; some of the target's layers, "layers:0-24,26-29"; a
            trained head for the target (which it may name); a list of drafts, and each round uses the best; "none"; or
            None: no draft, except for the shipped target if the method and the drafter can use one.
        options: how the models are loaded, or the fields of `LoadOptions` by name: device, dtype, exact, runtime,
            trust_remote_code, device_map, inflate, graphs, kv_dtype. The draft ignores device_map and inflate.
        draft_device, draft_dtype: for the draft; by default it is loaded like the target.
        progress: a function that is called with the name of a stage and the fraction of it that is done.

    Method (the text does not depend on it, except for rules that say so):
        method: `outpace methods` lists them. "auto" is the first of these that applies: 1. "speculative", for a
            rule whose text depends on the drafts; 2. the method that `outpace tune` found fastest for the pair; 3.
            "planned", if the draft has a GPU of its own; 4. the planner, which drafts in each round as much as pays.
        drafter: what proposes tokens. Several that share one tree are joined by "+", as in "model+ngram"; several from
            which each request chooses one are separated by commas, as in "model,ngram", the first being the default.
        rule: how proposals are verified; "auto": greedy at temperature 0, otherwise gumbel.
        worker: where CARD's drafter runs, "thread", "process", "polled" or "inline"; None: polled in the target's own
            thread if the target is on a GPU and the draft on the CPU, else a thread. "grpc://HOST:PORT" ("grpcs://"
            with TLS): on another machine, by `outpace draft-worker`; the method is then card unless one is named.
        draft_threads: CPU threads of the worker; None: one for a target on a CPU, else all cores but one.
        nodes: maximum number of tree nodes verified in one target pass; None: 32 for auto, card and planned, otherwise
            8, or as many as the draft length needs.
        profile: method "auto" starts from what earlier runs learnt about this pair on this machine, and saves what it
            learns. If nothing is known, loading times some rounds, for at most 0.2 s.

    Serving:
        batch: maximum number of requests that run at once; the others wait.
        kv_memory: GiB for the KV caches of target and draft; None: half of the free memory. When it is used up,
            requests are paused.
        rules: names of rules that a request may choose instead of `rule`, with their options and hidden states; others
            can be chosen if they need neither.
        reuse: a prompt that shares a prefix with an earlier text starts from its KV cache (prefix cache), and the
            continuation of that text is proposed (drafter `prediction`).

    All other keyword arguments are options of the method, the drafter and the rule.
    """

    _is_closed = True  # until the engine exists

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
        draft_threads: int | None = None,
        nodes: int | None = None,
        batch: int = 16,
        kv_memory: float | None = None,
        reuse: bool = True,
        rules: Sequence[str] = (),
        profile: bool = True,
        **more: Any,
    ) -> None:
        sizes = {"draft_threads": draft_threads, "nodes": nodes, "batch": batch, "kv_memory": kv_memory, "reuse": reuse}
        numbers: dict[str, Any] = {name: arrays.to_python(value) for name, value in sizes.items()}
        build = BuildOptions(
            method,
            drafter,
            rule,
            worker,
            draft_device=draft_device,
            draft_dtype=draft_dtype,
            rules=tuple(rules),
            **numbers,
        )
        if build.is_remote:
            if draft is not None and not isinstance(draft, Loaded):
                raise UserError(f"the draft model is at {worker}: name {draft!r} there, not here")
            draft = None  # bench passes a loaded draft to all methods
        target, loading, part_options = _split_kwargs(target, more)
        options = replace(options or LoadOptions(), **loading)
        self.target, self.draft = load_pair(target, draft, options, build, tokenizer=tokenizer, progress=progress)
        self.tokenizer = self.target.tokenizer
        self.grammars = Grammars(self.tokenizer)
        learns = method == "auto" and profile and not build.is_remote
        self._profile = Profile(subject(self.target, self.draft)) if learns else None
        build = replace(build, part_options={name: arrays.to_python(value) for name, value in part_options.items()})
        build = build.resolve(self.target, self.draft, self._profile.method if self._profile else None)
        self.build_options, self.method, self.rule = build, build.method, build.rule
        # One instance for all requests, so that they share batches.
        self._rules: dict[tuple[str, bool, bool], Rule] = {}
        self._decoder = registry.find("decoders", self.method)
        self._plain = registry.find("decoders", "autoregressive")
        self._options = registry.build_options(self._decoder, build.part_options)
        self.engine = build_engine(self.target, self.draft, build)
        try:
            if self.engine.worker:
                self.engine.worker.start()
            self._shared = SharedEngine(self.engine)
            if self.target.model.is_asynchronous:
                self.engine.capture_passes()
            drafters = self.engine.drafting.drafters.values()
            is_known = self._profile is not None and self._profile.load(self.engine.costs, drafters)
            if self.method == AUTO and not is_known:
                warm_up(self.engine, self.tokenizer.encode("The") or [0])  # any word
            self._is_closed = False
        except BaseException:
            self.engine.close()
            raise

    def __repr__(self) -> str:
        return "<closed LLM>" if self._is_closed else f"<LLM of {self.target.name} by {self.method}>"

    @property
    def notices(self) -> list[str]:
        """Sentences about the target and the draft for their users, such as which fields of a file were ignored."""
        loaded = [one for one in (self.target, self.draft) if one is not None]
        return [f"{one.name}: {one.notice}" for one in loaded if one.notice]

    def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of these parameters in advance; UserError if it cannot be enforced."""
        if params.structure:
            self.grammars.compile(params.structure)

    def __reduce__(self) -> NoReturn:
        """Raise UserError: `pickle`, `copy` and new processes of `multiprocessing` call this."""
        why = "its threads, locks and mapped weights belong to this process"
        raise UserError(f"an LLM cannot be pickled or copied, {why}: pass the model's name, and load it there")

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all answers and the drafter's worker. Call it again if it was interrupted."""
        with ExitStack() as stack:
            stack.enter_context(self._shared.lock.hold())
            stack.callback(self.engine.close)
            if self._profile:
                self._profile.save(self.engine.costs, self.engine.drafting.drafters.values())
        self._is_closed = True

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Warn, and tell a worker to end that would outlive it; wait for nothing, because the garbage collector
        runs in any thread and under any lock."""
        if self._is_closed:
            return
        warn(f"unclosed LLM of {self.target.name}", ResourceWarning, stacklevel=2, source=self)
        if self.engine.worker:
            self.engine.worker.stop()

    def stream(
        self,
        prompt: Prompt | ChatPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        choice: int = 0,
        plain: bool = False,
        drafter: str | None = None,
        rule: str | None = None,
        **options: Any,
    ) -> Stream:
        """Start an answer to a text, chat messages or token ids; `options` are those of `SamplingParams` by name.

        A text is continued as it is, without the model's chat template; messages go through the template. `choice`:
        number of the answer, for several sampled answers to one prompt. `plain`: decode without speculation; the text
        is the same. `drafter`: name of one of the drafters that the LLM was created with. `rule`: name of a rule, see
        `rules` of the LLM.
        """
        params, choice = read_params(sampling_params, options), arrays.to_python(choice)
        if params.n > 1:
            raise UserError(f"n is {params.n}, this gives one answer: use generate, or ask for each choice")
        check_whole("choice", choice, 0)
        return self._start(prompt, params, choice, plain, drafter, rule)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int | None = None,
        plain: bool = False,
        drafter: str | None = None,
        rule: str | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answer one or several prompts in a batch; return `n` results for each prompt, in the order of the prompts.

        `prompts`: one prompt (a text, a list of messages, a list of token ids) or a list of prompts; a list of whole
        numbers is one prompt. A text is continued as it is, without the chat template, unlike the prompt of the command
        `outpace generate`: for an answer to a question, pass a list of messages or use `chat`. `sampling_params`: one
        object for all prompts, or a list with one per prompt. The other arguments are those of `stream`.
        """
        all_prompts = prompts_of(prompts)
        each = read_params_each(sampling_params, options, len(all_prompts))
        streams: list[Stream] = []
        try:
            for prompt, params in zip(all_prompts, each, strict=True):
                params = params if n is None else replace(params, n=n)
                for choice in range(params.n):
                    streams.append(self._start(prompt, params, choice, plain, drafter, rule))
            return [stream.finish() for stream in streams]
        finally:
            for stream in streams:  # after an error, some are still open
                stream.close()

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Result:
        """Answer a conversation, rendered by the model's chat template; a text is one message of the user, like the
        prompt of the command `outpace generate`.

        `continue_final_message`: the answer continues the last message, which is the assistant's and not repeated in
        the result. `add_generation_prompt`: the prompt ends with the template's start of an answer. The other options
        are those of `stream`.
        """
        rendering = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self.stream(ChatPrompt(messages_of(messages), rendering), sampling_params, **options).finish()

    def infill(
        self,
        prefix: str,
        suffix: str,
        sampling_params: SamplingParams | None = None,
        *,
        files: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> Result:
        """Write the text between a prefix and a suffix, with a model that has fill-in-the-middle tokens.

        `files` are names and texts of other files of a repository. The other options are those of `stream`.
        """
        prompt = infill_prompt(self.tokenizer, prefix, suffix, files)
        return self.stream(prompt, sampling_params, **options).finish()

    def _start(
        self,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
        choice: int,
        plain: bool,
        drafter: str | None,
        rule: str | None,
    ) -> Stream:
        new = self.prepare(prompt, params, choice, plain, drafter, rule)
        run = self._shared.create(new.request, new.decoder, new.options, new.text.watch, new.drafter)
        text = prompt if isinstance(prompt, str) else None
        stream = Stream(self._shared, run, new.text, new.method, new.echo, self, text)
        try:
            self._shared.enqueue(run)
            return stream
        except BaseException:
            stream.abort()
            raise

    def prepare(
        self,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
        choice: int = 0,
        plain: bool = False,
        drafter: str | None = None,
        rule: str | None = None,
        method: str | None = None,
    ) -> PreparedRequest:
        """Prepare a request without submitting it, for callers that step the engine themselves; thread-safe.

        `method`: name of the decoder; None: the LLM's own.
        """
        tokens = tokens_of(prompt, self.tokenizer)
        if params.prediction and not plain:
            check_prediction(drafter or self.build_options.drafter)
        for token in params.stop_token_ids:
            check_whole("a token of stop_token_ids", token, 0, self.target.model.vocab_size - 1)
        structure, thought = params.structure, thought_before(prompt, tokens, params, self.tokenizer)
        if structure and thought is not Thought.NONE:
            structure = after_thought(structure, thought_rules(self.tokenizer, thought.is_open))
        drafter = drafter or (self.build_options.structured_drafter if structure and not plain else None)
        own_ends = frozenset() if params.ignore_eos else self.tokenizer.stop_ids
        request = Request(
            prompt=tuple(tokens),
            rule=self._rule(params, plain, rule or self.rule),
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
        text = assembler_of(params, self.tokenizer, thought)
        echo = (prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)) if params.echo else ""
        decoder, options, method = self._choose_decoder(request.rule, rule, plain, drafter, method)
        return PreparedRequest(request, decoder, options, text, method, echo, drafter)

    def _choose_decoder(
        self, rule: Rule, name: str | None, plain: bool, drafter: str | None, method: str | None
    ) -> tuple[type[Decoder], Any, str]:
        """Return a request's decoder, its options and its name. UserError if the decoder does not fit the rule `name`
        that the request chose."""
        if plain:
            return self._plain, self._plain.Options(), "autoregressive"
        if method is None and name is not None and self.method == AUTO and not rule.traits.same_text:
            method = "speculative"  # as `choose_method` does
        decoder = self._decoder if method in (None, self.method) else registry.find("decoders", method)
        if name is not None:
            check_rule(name, decoder, drafter or self.build_options.drafter)
        if decoder is self._decoder:
            return decoder, self._options, self.method
        return decoder, decoder.Options(), str(method)

    def _rule(self, params: SamplingParams, plain: bool, name: str) -> Rule:
        key = name, params.sampling.is_greedy, plain
        if key not in self._rules:
            rule = find_rule(name, params.sampling, self.build_options.part_options)
            rule.check_target(self.target)
            if plain and rule.traits.q_at_leaves:  # it needs a draft's q, which plain decoding does not have
                rule = find_rule("auto", params.sampling)
            self._rules.setdefault(key, rule)
        return self._rules[key]


def _split_kwargs(target: Any, more: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Split LLM's extra keyword arguments: the target (under its other name), fields of `LoadOptions`, and options of
    methods, drafters and rules. UserError for a name that no method has and that resembles a known one."""
    if "model" in more:
        if target is not None:
            raise UserError("model is another name for target, give one of them")
        target = more.pop("model")
    loading = {field.name: more.pop(field.name) for field in fields(LoadOptions) if field.name in more}
    allowed = [field.name for field in fields(LoadOptions)] + ["model", *inspect.signature(LLM.__init__).parameters]
    for name in more:
        if registry.owners(name):
            continue
        registry.check_kept(name)
        if name in (field.name for field in fields(SamplingParams)):
            raise UserError(f"{name} is an argument of `generate` and of `SamplingParams`, not of LLM")
        if near := difflib.get_close_matches(name, allowed, n=1, cutoff=_SIMILARITY):
            raise UserError(f"LLM has no argument {name!r}; did you mean {near[0]!r}?")
    return target, loading, more


def load(target: Any = None, draft: Any = None, options: LoadOptions | None = None, **more: Any) -> LLM:
    """Load a target (None: the shipped model) and a draft for it; the same as `LLM` with these arguments."""
    return LLM(target, draft, options, **more)
