"""`/v1/completions`: its request body and its response format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from outpace.api.llm import LLM
from outpace.core.types import TokenLogprobs
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.generation_request import GenerationRequest, max_answer_tokens, own_options, seed_of
from outpace.server.request_body import MAX_CHOICES, MAX_LOGPROBS, SamplingBody, StreamOptions, sampling_params
from outpace.server.response_formats import ChunkFormat, best_logprobs, finish_reason, finite, usage
from outpace.server.service import Service

DEFAULT_TOKENS = 16
MAX_ANSWERS = 1024  # choices of all prompts of a request
TokenIds = list[Annotated[int, Field(ge=0)]]


class CompletionBody(SamplingBody):
    """The request body of a completion."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def to_request(body: CompletionBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    llm = service.llm
    prompts = tuple(_token_ids(prompt, llm) for prompt in _prompts(body))
    n, best_of = body.n or 1, body.best_of or body.n or 1
    _check(body, len(prompts), n, best_of)
    left = max(max_answer_tokens(llm, prompt) for prompt in prompts)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    given = {"response_format": body.response_format, "structured_outputs": body.structured_outputs}
    params = sampling_params(
        body,
        max(1, min(most, left)),
        seed_of(body),
        logprobs=0 if best_of > n and body.logprobs is None else body.logprobs,  # best_of ranks by them
        echo=bool(body.echo and body.logprobs is not None),
        **{name: value for name, value in given.items() if value is not None},
    )
    return GenerationRequest(
        prompts, params, n, best_of, own_options(body, llm, service.options.methods), bool(body.return_rounds)
    )


def _check(body: CompletionBody, num_prompts: int, n: int, best_of: int) -> None:
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of}, it must be at least n, which is {n}", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(400, "best_of ranks complete answers and cannot be streamed", param="best_of")
    if num_prompts * best_of > MAX_ANSWERS:
        message = f"{num_prompts} prompts of {best_of} choices exceed the limit of {MAX_ANSWERS} answers a request"
        raise ApiError(400, message, param="prompt")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, it must be at least 1 without echo", param="max_tokens")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list, it must be text, token ids, or a list of them", param="prompt")
    if isinstance(given[0], int):
        return [given]
    return list(given)


def _token_ids(prompt: str | list[int], llm: LLM) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(llm.tokenizer.encode(prompt))
    last = llm.target.model.vocab_size - 1
    bad = next((token for token in prompt if token > last), None)
    if bad is not None:
        raise ApiError(400, f"the prompt has token {bad}, allowed are 0 to {last}", param="prompt")
    return tuple(prompt)


class CompletionFormat(ChunkFormat):
    """Writes completions and their chunks."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionBody, request: GenerationRequest) -> None:
        super().__init__(service, body, request)
        self._lengths: dict[int, int] = {}  # characters sent so far, by index

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for index in choice.indices:
            text, records = self._output(choice, delta, is_first=index not in self._lengths)
            more = self._more(index, text, records, delta)
            if text or more:
                yield self._chunk([_choice(index, text, **more)])

    def _last(self, index: int, ended: ChoiceEnd) -> dict[str, Any]:
        return _choice(index, "", finish_reason=self._finish_reason(ended), stop_reason=ended.stop)

    def whole(self, group: ChoiceGroup) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        count, n = len(group.choices) // len(group.prompts), self.request.n
        for number in range(len(group.prompts)):
            own = group.choices[number * count : (number + 1) * count]
            pairs = [(choice, choice.take() or ChoiceDelta()) for choice in own]
            if self.request.best_of > n and len(pairs) > 1:
                pairs = sorted(pairs, key=lambda pair: -_mean_logprob(pair[1].logprobs))[:n]
            pairs = [pair for pair in pairs for _ in range(max(len(pair[0].indices), 1))]
            found += [self._whole_choice(number * n + place, *pair) for place, pair in enumerate(pairs)]
        return {**self._head(self.kind), "choices": found, "usage": self._usage(group), **self.statistics(group)}

    def _whole_choice(self, index: int, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        assert choice.ended is not None
        text, records = self._output(choice, delta, is_first=True)
        more = self._more(index, text, records, delta)
        if self.body.return_token_ids:
            more["prompt_token_ids"] = list(choice.prepared.request.prompt)
        reason = self._finish_reason(choice.ended)
        return _choice(index, text, finish_reason=reason, stop_reason=choice.ended.stop, **more)

    def _output(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> tuple[str, list[TokenLogprobs | int]]:
        """Return text and log-probabilities, first those of an echoed prompt. A token id has no log-probability."""
        if self.body.max_tokens == 0:
            delta = ChoiceDelta()
        if not (self.body.echo and is_first):
            return delta.text, list(delta.logprobs)
        prompt, given = choice.prepared.request.prompt, self.body.prompt
        echo = given if isinstance(given, str) else self.service.llm.tokenizer.decode(prompt)
        records: list[TokenLogprobs | int] = []
        if self.body.logprobs is not None:
            assert choice.run is not None
            records = [prompt[0], *choice.run.history.prompt_logprobs]
        return echo + delta.text, records + list(delta.logprobs)

    def _more(
        self, index: int, text: str, records: Sequence[TokenLogprobs | int], delta: ChoiceDelta
    ) -> dict[str, Any]:
        """Return the optional fields of a choice."""
        start = self._lengths.get(index, 0)
        self._lengths[index] = start + len(text)
        more = self.token_fields(delta)
        if self.body.logprobs is not None and records:
            more["logprobs"] = self._logprobs(records, start)
        return more

    def _logprobs(self, records: Sequence[TokenLogprobs | int], start: int) -> dict[str, Any]:
        """Return four lists of equal length. `text_offset` counts characters of the whole text."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        stream = self.service.llm.tokenizer.stream(skip_special=False)
        for record in records:
            token = record if isinstance(record, int) else record.token
            found["tokens"].append(self.token_text(token))
            found["text_offset"].append(start)
            start += len(stream.push([token]))
            if isinstance(record, int):
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            found["token_logprobs"].append(finite(record.logprob))
            pairs = [*best_logprobs(record, self.body.logprobs or 0), (record.token, finite(record.logprob))]
            found["top_logprobs"].append({self.token_text(other): value for other, value in pairs})
        return found

    def _finish_reason(self, ended: ChoiceEnd) -> str:
        return "length" if self.body.max_tokens == 0 else finish_reason(ended)

    def _usage(self, group: ChoiceGroup) -> dict[str, Any]:
        found = usage(group)
        if self.body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found


def _choice(index: int, text: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def _mean_logprob(records: Sequence[TokenLogprobs]) -> float:
    """Return the mean log-probability of a choice, minus infinity for an empty one."""
    return sum(record.logprob for record in records) / len(records) if records else float("-inf")
