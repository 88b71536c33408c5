"""What `/v1/completions` takes, and the job that it makes of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outpace.api.llm import LLM
from outpace.server.errors import ApiError
from outpace.server.fields import MOST_CHOICES, MOST_LOGPROBS, Sampled, StreamOptions, sampling
from outpace.server.jobs import MOST_ANSWERS, Job, own_options, room, seed_of
from outpace.server.service import Service

USUAL_TOKENS = 16
Tokens = list[Annotated[int, Field(ge=0)]]


class CompletionBody(Sampled):
    """The fields of a completion."""

    prompt: str | list[str] | Tokens | list[Tokens]
    max_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def job(body: CompletionBody, service: Service) -> Job:
    """Tokenises the prompts; in the executor."""
    llm = service.llm
    prompts = tuple(_tokens(prompt, llm) for prompt in _prompts(body))
    n, best_of = body.n or 1, body.best_of or body.n or 1
    _check(body, len(prompts), n, best_of)
    left = max(room(llm, prompt) for prompt in prompts)
    asked = USUAL_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = body.logprobs
    if best_of > n and logprobs is None:
        logprobs = 0  # to rank by
    given = {"response_format": body.response_format, "structured_outputs": body.structured_outputs}
    forms = {name: value for name, value in given.items() if value is not None}
    params = sampling(
        body,
        max(1, min(asked, left)),
        seed_of(body),
        logprobs=logprobs,
        echo=bool(body.echo and body.logprobs is not None),
        **forms,
    )
    return Job(prompts, params, n, best_of, own_options(body, llm, service.options.methods), bool(body.return_rounds))


def _check(body: CompletionBody, prompts: int, n: int, best_of: int) -> None:
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of}, it must be at least n, which is {n}", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(400, "best_of chooses among whole answers, which cannot be streamed", param="best_of")
    if prompts * best_of > MOST_ANSWERS:
        said = f"{prompts} prompts of {best_of} choices are more than {MOST_ANSWERS} answers, a request's limit"
        raise ApiError(400, said, param="prompt")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, it must be at least 1 without echo", param="max_tokens")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list, it must be text, tokens, or a list of such", param="prompt")
    if isinstance(given[0], int):
        return [given]
    return list(given)


def _tokens(prompt: str | list[int], llm: LLM) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(llm.tokenizer.encode(prompt))
    last = llm.target.model.vocab_size - 1
    bad = next((token for token in prompt if token > last), None)
    if bad is not None:
        raise ApiError(400, f"the prompt has token {bad}, allowed are 0 to {last}", param="prompt")
    return tuple(prompt)
