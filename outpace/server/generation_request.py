"""What the endpoints make of a request's body: prompts in tokens, sampling parameters, and a number of choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.api.llm import LLM, PreparedRequest
from outpace.api.params import SamplingParams
from outpace.server.choices import Choice
from outpace.server.errors import ApiError, PromptTooLong
from outpace.server.request_body import OutpaceOptions, SamplingBody, sampling_params
from outpace.server.tool_calls import ChatModel, TextSplitter, ToolOptions
from outpace.tools.reasoning import has_begun_text

PLAIN = "autoregressive"
DEFAULT_CHAT_TOKENS = 4096


@dataclass(frozen=True)
class GenerationRequest:
    """`n` choices for each prompt, the best of `best_of`.

    `drafting`: how the answers are drafted. `rounds`: report what each round verified. `splitter` makes a splitter for
    the text of a choice, `count_thoughts` counts the reasoning tokens of one.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int
    best_of: int
    drafting: OutpaceOptions
    rounds: bool
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


def chat_request(
    body: SamplingBody,
    conversation: Conversation,
    max_tokens: int | None,
    *,
    n: int = 1,
    rounds: bool = False,
    response_format: Any = None,
    structured_outputs: Any = None,
    **sampling: Any,
) -> GenerationRequest:
    """Render a conversation.

    `rounds`: keep a record of each round. `sampling`: further arguments of SamplingParams.
    """
    tools, prompt = conversation.tools, conversation.render()
    continued = conversation.messages[-1]["content"] if conversation.continues else ""
    begin = tools.thought(prompt, continued)
    if has_begun_text(continued):
        is_structured = structured_outputs is not None or (response_format or {}).get("type", "text") != "text"
        tools = tools.within_text(is_structured)
    most = min(max_tokens or DEFAULT_CHAT_TOKENS, max_answer_tokens(tools.model.llm, prompt))
    sampling |= tools.constraints(begin, response_format, structured_outputs)
    return GenerationRequest(
        (prompt,),
        sampling_params(body, most, **sampling),
        n,
        n,
        drafting_options(body, tools.model),
        rounds,
        tools.splitter(begin),
        tools.thought_counter(begin),
    )


def reasoning_values(effort: str | None) -> dict[str, Any]:
    """Return the template values that set how much a model reasons. Few templates use them."""
    values: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return {**values, "enable_thinking": False} if effort == "none" else values


def max_answer_tokens(llm: LLM, prompt: Sequence[int]) -> int:
    """Return how many tokens may follow a prompt; raise ApiError if it is empty or fills the context."""
    most = llm.target.model.max_positions
    if len(prompt) >= most:
        raise PromptTooLong(len(prompt), most)
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
    changes: dict[str, Any] = {"rounds": request.rounds, "nodes": own.nodes, "cache_salt": key or None}
    return replace(prepared, request=replace(prepared.request, **changes))


def drafting_options(body: SamplingBody, model: ChatModel) -> OutpaceOptions:
    """Return the request's drafting options; raise ApiError for a method, drafter or rule that it may not choose."""
    own, llm, allowed = body.outpace or OutpaceOptions(), model.llm, model.options.methods
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
