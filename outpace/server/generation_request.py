"""What the endpoints make of a request's body: prompts in tokens, sampling parameters, and a number of choices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from outpace.api.llm import LLM, PreparedRequest
from outpace.api.params import SamplingParams
from outpace.models.text.template_form import text_of
from outpace.server.choices import Choice
from outpace.server.errors import ApiError, PromptTooLong
from outpace.server.request_body import Body, OutpaceOptions, SamplingBody, Whole, agreed, sampling_params
from outpace.server.tool_calls import ChatModel, TextSplitter, ToolOptions
from outpace.tools.reasoning import has_begun_text, thought_of

PLAIN = "autoregressive"
DEFAULT_CHAT_TOKENS = 4096
ANSWER_SHARE = 4  # a shortened conversation leaves space for max_tokens, or for this part of the context if it is less
# Not allowed in `chat_template_kwargs`, since they have their own fields or are not supported.
RESERVED_VALUES = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template"}


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]  # the last two: as the model decides
    budget_tokens: Whole | None = None  # the Messages API demands it; it has no effect


class ReasoningOptions(Body):
    """How much the model reasons."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: Literal[False] | None = None
    max_tokens: None = None  # not supported, must be null


class TemplateBody(Body):
    """Fields that become values of the chat template, by the names that several servers give them."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None


def template_values(body: TemplateBody, effort: str | None = None, verbosity: str | None = None) -> dict[str, Any]:
    """Return the chat template's values; ApiError for fields that contradict each other. Few templates use them.

    `effort` and `verbosity` are those of an API that nests them in fields of its own.
    """
    own = body.chat_template_kwargs or {}
    if reserved := own.keys() & RESERVED_VALUES:
        raise ApiError(400, f"chat_template_kwargs may not have {min(reserved)}", param="chat_template_kwargs")
    asked, thinking = body.reasoning or ReasoningOptions(), body.thinking
    if isinstance(thinking, Thinking):
        thinking = {"enabled": True, "disabled": False}.get(thinking.type)
    thinks = agreed({"enable_thinking": body.enable_thinking, "thinking": thinking, "reasoning.enabled": asked.enabled})
    efforts = {"output_config.effort": effort, "reasoning.effort": asked.effort}
    effort = agreed({**efforts, "reasoning_effort": body.reasoning_effort})
    if effort is None and thinks is False and body.enable_thinking is None:
        effort = "none"
    elif thinks is None and effort == "none":
        thinks = False
    values: dict[str, Any] = {"reasoning_effort": effort}
    if not own.keys() & {"enable_thinking", "thinking"}:  # templates have one or the other
        values |= {"enable_thinking": thinks, "thinking": thinks}
    values["verbosity"] = agreed({"verbosity": body.verbosity, "text.verbosity": verbosity})
    values["add_generation_prompt"] = body.add_generation_prompt
    return {name: value for name, value in values.items() if value is not None} | own


@dataclass(frozen=True)
class GenerationRequest:
    """`n` choices for each prompt, the best of `best_of`.

    `drafting`: how the answers are drafted. `rounds`: report what each round verified. `cache_salt`: only requests of
    the same salt share keys, values and earlier answers. `splitter` makes a splitter for
    the text of a choice, `count_thoughts` counts the reasoning tokens of one.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int
    best_of: int
    drafting: OutpaceOptions
    rounds: bool
    cache_salt: str | None = None
    splitter: Callable[[], TextSplitter] = TextSplitter
    count_thoughts: Callable[[Sequence[int]], int] | None = None


@dataclass(frozen=True)
class Conversation:
    """What the chat template renders. `values` are passed to it; `continues`: the answer continues the last message."""

    tools: ToolOptions
    messages: Sequence[Mapping[str, Any]]
    values: Mapping[str, Any]
    continues: bool = False

    def render(self) -> tuple[int, ...]:
        """Return the tokens of the prompt."""
        continuation = {"continue_final_message": True} if self.continues else {}
        return self.tools.render(self.messages, {**self.values, **continuation})

    def render_within(self, most: int) -> tuple[int, ...]:
        """Return the tokens of the prompt without its oldest turns, so that they are at most `most` if possible.

        System messages at the beginning are kept, and so is the last turn. A turn begins with a user's message.
        """
        given = self.messages
        begin = next((place for place, one in enumerate(given) if one["role"] != "system"), 0)
        turns = [begin, *(place for place, one in enumerate(given) if place > begin and one["role"] == "user")]
        render = cache(lambda place: replace(self, messages=[*given[:begin], *given[place:]]).render())
        found = bisect_left(turns, True, key=lambda place: len(render(place)) <= most)
        return render(turns[min(found, len(turns) - 1)])


def chat_request(
    body: SamplingBody,
    conversation: Conversation,
    max_tokens: int | None,
    *,
    n: int = 1,
    shortens: bool = False,
    rounds: bool = False,
    response_format: Any = None,
    structured_outputs: Any = None,
    **sampling: Any,
) -> GenerationRequest:
    """Render a conversation.

    `shortens`: leave out the oldest turns if the conversation is too long. `rounds`: keep a record of each round.
    `sampling`: further arguments of SamplingParams.
    """
    tools = conversation.tools
    context = tools.model.llm.target.model.max_positions
    reserved = min(max_tokens or DEFAULT_CHAT_TOKENS, context // ANSWER_SHARE)
    prompt = conversation.render_within(context - reserved) if shortens else conversation.render()
    continued = text_of(conversation.messages[-1]["content"]) if conversation.continues else ""
    begin = thought_of(tools.model.tokenizer, prompt, continued)
    if has_begun_text(continued, tools.model.marks):
        is_structured = structured_outputs is not None or (response_format or {}).get("type", "text") != "text"
        tools = tools.within_text(is_structured)
    most = min(max_tokens or DEFAULT_CHAT_TOKENS, max_answer_tokens(tools.model.llm, prompt))
    sampling |= tools.constraints(begin, response_format, structured_outputs)
    return GenerationRequest(
        (prompt,),
        sampling_params(body, most, tools.model.default_sampling, **sampling),
        n,
        n,
        drafting_options(body, tools.model),
        rounds,
        body.cache_salt,
        tools.splitter(begin),
        tools.thought_counter(begin),
    )


def max_answer_tokens(llm: LLM, prompt: Sequence[int]) -> int:
    """Return how many tokens may follow a prompt; raise ApiError if it is empty or fills the context."""
    model = llm.target.model
    most = model.max_length(len(prompt) + len(model.decoder_start)) - len(model.decoder_start)
    if len(prompt) >= most:
        raise PromptTooLong(len(prompt), model.max_source or most)
    if not prompt:
        raise ApiError(400, "the prompt has no tokens, at least one is needed", param="prompt", code="invalid_value")
    return most - len(prompt)


def choices_of(request: GenerationRequest, llm: LLM, key: str) -> Iterator[Choice]:
    """Yield the choices to compute. Greedy choices of a prompt are equal, so that one is computed for all."""
    is_greedy = request.params.sampling.is_greedy
    for number, prompt in enumerate(request.prompts):
        indices = range(number * request.n, (number + 1) * request.n)
        for choice in range(1 if is_greedy else request.best_of):
            own_indices = indices if is_greedy else indices[choice : choice + 1]
            yield Choice(_prepare(llm, prompt, choice, request, key), own_indices, request.params.stop_token_ids)


def _prepare(llm: LLM, prompt: Sequence[int], choice: int, request: GenerationRequest, key: str) -> PreparedRequest:
    own = request.drafting
    is_plain = own.speculation is False or own.method == PLAIN
    drafter = None if is_plain else own.drafter
    prepared = llm.prepare(prompt, request.params, choice, is_plain, drafter, own.rule, own.method)
    changes: dict[str, Any] = {"rounds": request.rounds, "nodes": own.nodes}
    changes["cache_salt"] = f"{key}/{request.cache_salt}" if request.cache_salt else key or None
    return replace(prepared, request=replace(prepared.request, **changes))


def drafting_options(body: SamplingBody, model: ChatModel) -> OutpaceOptions:
    """Return the request's drafting options; raise ApiError for a method, drafter or rule that it may not choose."""
    own, llm, allowed = body.outpace or OutpaceOptions(), model.llm, model.options.allow_method or ()
    choices = {
        "method": {llm.method, PLAIN, *allowed},
        "drafter": {*llm.engine.drafting.drafters, *allowed},
        "rule": {llm.rule, *allowed} - {"auto"},
    }
    for name, names in choices.items():
        value = getattr(own, name)
        if value is not None and value not in names:
            message = f"{name} {value!r:.60} is not allowed here, allowed are {', '.join(sorted(names)) or 'none'}"
            raise ApiError(400, message, param="outpace", code="invalid_value")
    return own
