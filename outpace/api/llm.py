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
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from outpace.api.pair import load_pair
from outpace.api.params import SamplingParams, read_params, read_params_each
from outpace.api.profile import Profile, subject
from outpace.api.prompts import ChatPrompt, Prompt, infill_prompt, messages_of, prompts_of, tokens_of
from outpace.api.shared_engine import SharedEngine
from outpace.api.stream import Result, Stream
from outpace.api.text import TextAssembler, assembler_of, echo_of, thought_before
from outpace.core import arrays, registry
from outpace.core.errors import UserError, check_whole
from outpace.core.options import help_of, with_options
from outpace.core.types import Request
from outpace.decoders.base import Decoder
from outpace.engine.build import AUTO, RequestChoices, build_engine, resolve
from outpace.engine.options import BuildOptions
from outpace.engine.warmup import warm_up
from outpace.models.files.tokenizer_folder import Thought
from outpace.models.load import Progress, silent
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded

if TYPE_CHECKING:
    from outpace.grammar.compiler import Grammars

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

    target: a Hub id, a folder with safetensors, a .gguf file, or a causal LM of transformers that is already loaded,
        with its `tokenizer`; None: the shipped model. `model` is another name for it.
    draft: a smaller model with the same vocabulary, given like the target; "auto": the known small sibling of the
        target; "mtp": the MTP layer in the target's files; some of the target's layers, "layers:0-24,26-29"; a trained
        head for the target (which it may name); a list of drafts, and each round uses the best; "none"; or None: no
        draft, except for the shipped target if the method and the drafter can use one.
    options: how the models are loaded; or the fields of `LoadOptions` by name.
    progress: a function that is called with the name of a stage and the fraction of it that is done.

    All other keyword arguments are fields of `LoadOptions` and of `engine.options.BuildOptions`, and options of the
    method, the drafter and the rule; docs/methods.md lists them with their defaults. The text does not depend on them,
    except for rules that say so and for what changes the model's arithmetic.
    """

    _is_closed = True  # until the engine exists

    def __init__(
        self,
        target: Any = None,
        draft: Any = None,
        options: LoadOptions | None = None,
        *,
        tokenizer: Any = None,
        progress: Progress = silent,
        **more: Any,
    ) -> None:
        target, loading, building, part_options = _split_kwargs(target, more)
        build = BuildOptions(**building, part_options=part_options)
        if build.is_on_ray:
            raise UserError(
                "worker ray is for commands: `outpace.cluster.on_ray.place_draft_worker` returns an address"
            )
        if build.is_remote:
            if draft is not None and not isinstance(draft, Loaded):
                raise UserError(f"the draft model is at {build.worker}: name {draft!r} there, not here")
            draft = None  # bench passes a loaded draft to all methods
        options = replace(options or LoadOptions(), **loading)
        self.target, self.draft = load_pair(target, draft, options, build, tokenizer=tokenizer, progress=progress)
        self.tokenizer = self.target.tokenizer
        learns = build.method == "auto" and build.profile and not build.is_remote
        self._profile = Profile(subject(self.target, self.draft)) if learns else None
        build = resolve(build, self.target, self.draft, self._profile.method if self._profile else None)
        self.build_options, self.method, self.rule = build, build.method, build.rule
        self._choices = RequestChoices(build, self.target)
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

    @property
    def reads_source(self) -> bool:
        """Whether a prompt is the source of an encoder-decoder model without a chat template."""
        return bool(self.target.model.decoder_start) and not self.tokenizer.has_template

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of structures, created for the first structured answer."""
        from outpace.grammar.compiler import Grammars

        return Grammars(self.tokenizer)

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
                several = params if n is None else replace(params, n=n)
                single = params if several.n == params.n == 1 else replace(several, n=1)
                for choice in range(several.n):
                    streams.append(self.stream(prompt, single, choice=choice, plain=plain, drafter=drafter, rule=rule))
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
        for token in params.stop_token_ids:
            check_whole("a token of stop_token_ids", token, 0, self.target.model.vocab_size - 1)
        tokens = tokens_of(prompt, self.tokenizer)
        structure, thought = params.structure, thought_before(prompt, tokens, params, self.tokenizer)
        if structure and thought is not Thought.NONE:
            from outpace.tools.call_grammar import after_thought, thought_rules  # for structured answers only

            structure = after_thought(structure, thought_rules(self.tokenizer, thought.is_open))
        chosen = self._choices.choose(
            params.sampling,
            plain=plain,
            is_structured=structure is not None,
            is_predicted=bool(params.prediction),
            drafter=drafter,
            rule=rule,
            method=method,
        )
        target, constraint = self.target.model, None
        if structure:
            constraint = self.grammars.constraint(structure, len(tokens) + len(target.decoder_start))
        request = target.complete(params.request(tokens, chosen.rule, self.tokenizer, choice, constraint))
        text = assembler_of(params, self.tokenizer, thought)
        echo = echo_of(params, prompt, tokens, self.tokenizer)
        return PreparedRequest(request, chosen.decoder, chosen.options, text, chosen.method, echo, chosen.drafter)


LLM.__signature__ = with_options(inspect.signature(LLM), LoadOptions, BuildOptions)  # type: ignore[attr-defined]


def _split_kwargs(target: Any, more: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split LLM's other keyword arguments: the target (under its other name), fields of `LoadOptions` and of
    `BuildOptions`, and options of methods, drafters and rules. UserError for a name that no method has and that
    resembles a known one."""
    if "model" in more:
        if target is not None:
            raise UserError("model is another name for target, give one of them")
        target = more.pop("model")
    loading, building = (
        {name: arrays.to_python(more.pop(name)) for name in help_of(record) if name in more}
        for record in (LoadOptions, BuildOptions)
    )
    allowed = ["model", *inspect.signature(LLM).parameters]
    for name in more:
        if registry.owners(name):
            continue
        registry.check_kept(name)
        if name in (field.name for field in fields(SamplingParams)):
            raise UserError(f"{name} is an argument of `generate` and of `SamplingParams`, not of LLM")
        if near := difflib.get_close_matches(name, allowed, n=1, cutoff=_SIMILARITY):
            raise UserError(f"LLM has no argument {name!r}; did you mean {near[0]!r}?")
    return target, loading, building, {name: arrays.to_python(value) for name, value in more.items()}


def load(target: Any = None, draft: Any = None, options: LoadOptions | None = None, **more: Any) -> LLM:
    """Load a target (None: the shipped model) and a draft for it; the same as `LLM` with these arguments."""
    return LLM(target, draft, options, **more)
