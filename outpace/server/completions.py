"""`/v1/completions`, and `/infill` as in llama.cpp's server: request bodies and response formats.

Editors request the text between a prefix and a suffix by `/infill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from outpace.api.llm import LLM
from outpace.api.prompts import infill_prompt
from outpace.core.errors import UserError
from outpace.core.types import TokenLogprobs
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.generation_request import GenerationRequest, drafting_options, max_answer_tokens
from outpace.server.replies import ChunkFormat, ResponseFormat, finite, sse
from outpace.server.request_body import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Body,
    DetailsBody,
    MaxTokens,
    SamplingBody,
    StreamOptions,
    Whole,
    sampling_params,
)
from outpace.server.service import Service

DEFAULT_TOKENS = 16
MAX_ANSWERS = 1024  # choices of all prompts of a request
INFILL_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
DISABLED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TokenIds = list[Annotated[Whole, Field(ge=0)]]


class CompletionBody(DetailsBody):
    """The request body of a completion."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    suffix: str | None = None
    max_tokens: MaxTokens | None = Field(default=None, ge=0)
    add_special_tokens: bool | None = None
    n: Whole | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: Whole | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def to_request(body: CompletionBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    llm = service.llm
    prompts = tuple(_token_ids(prompt, llm, body) for prompt in _prompts(body))
    n, best_of = body.n or 1, body.best_of or body.n or 1
    _check(body, len(prompts), n, best_of)
    left = max(max_answer_tokens(llm, prompt) for prompt in prompts)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    given = {"response_format": body.response_format, "structured_outputs": body.structured_outputs}
    params = sampling_params(
        body,
        max(1, min(most, left)),
        service.chat_model.default_sampling,
        logprobs=0 if best_of > n and body.logprobs is None else body.logprobs,  # best_of ranks by them
        echo=bool(body.echo and body.logprobs is not None),
        **{name: value for name, value in given.items() if value is not None},
    )
    drafting = drafting_options(body, service.chat_model)
    return GenerationRequest(prompts, params, n, best_of, drafting, bool(body.return_rounds), body.cache_salt)


def _check(body: CompletionBody, num_prompts: int, n: int, best_of: int) -> None:
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of}, it must be at least n, which is {n}", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(400, "best_of ranks complete answers and cannot be streamed", param="best_of")
    if num_prompts * best_of > MAX_ANSWERS:
        message = f"{num_prompts} prompts of {best_of} choices exceed the limit of {MAX_ANSWERS} answers a request"
        raise ApiError(400, message, param="prompt")
    if body.suffix and body.echo and body.logprobs is not None:
        why = "echo with logprobs cannot be combined with suffix"
        raise ApiError(400, why, param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, it must be at least 1 without echo", param="max_tokens")


def _prompts(body: CompletionBody) -> list[Any]:
    """Return the prompts, each a text or token ids."""
    given = body.prompt
    if not given and not isinstance(given, str):
        raise ApiError(400, "prompt is an empty list, it must be text, token ids, or a list of them", param="prompt")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def _token_ids(prompt: str | list[int], llm: LLM, body: CompletionBody) -> tuple[int, ...]:
    """Return the tokens of a prompt; if there is a suffix, of a prompt for the text before it."""
    if not isinstance(prompt, str):
        last = llm.target.model.vocab_size - 1
        bad = next((token for token in prompt if token > last), None)
        if bad is not None:
            raise ApiError(400, f"the prompt has token {bad}, allowed are 0 to {last}", param="prompt")
    if body.suffix:
        return infill_tokens(llm, prompt, body.suffix)
    if not isinstance(prompt, str):
        return tuple(prompt)
    encode = llm.tokenizer.continuation if body.add_special_tokens is False else llm.tokenizer.encode
    return tuple(encode(prompt))


def infill_tokens(llm: LLM, prefix: str | Sequence[int], suffix: str, **options: Any) -> tuple[int, ...]:
    """Return the prompt for the text between a prefix and a suffix; raise ApiError if the model cannot fill it in."""
    try:
        return tuple(infill_prompt(llm.tokenizer, prefix, suffix, **options))
    except UserError as error:
        message = f"{llm.target.name}: {error}"
        raise ApiError(400, message, param="suffix", code="infill_not_supported") from None


class CompletionFormat(ChunkFormat):
    """Writes completions and their chunks."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    content_field, empty = "text", ""

    def __init__(self, service: Service, body: CompletionBody, request: GenerationRequest, group: ChoiceGroup) -> None:
        super().__init__(service, body, request, group)
        self._lengths: dict[int, int] = {}  # characters sent so far, by index

    def _rest(self, index: int) -> str:
        return ""

    def whole(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        choices, n = self.group.choices, self.request.n
        count = len(choices) // len(self.group.prompts)
        for first in range(0, len(choices), count):  # the choices of one prompt
            pairs = [(choice, choice.take() or ChoiceDelta()) for choice in choices[first : first + count]]
            if count > n:
                pairs = sorted(pairs, key=lambda pair: -_mean_logprob(pair[1].logprobs))[:n]
            for choice, delta in pairs:
                for _ in choice.indices or (0,):
                    found.append(self._whole_choice(len(found), choice, delta))
        return self._whole(found)

    def _whole_choice(self, index: int, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        assert choice.ended is not None
        text, more = self._output(index, choice, delta)
        if self.body.return_token_ids:
            more["prompt_token_ids"] = list(choice.prepared.request.prompt)
        return self._choice(index, text, **self._end(index, choice.ended), **more)

    def _output(self, index: int, choice: Choice, delta: ChoiceDelta) -> tuple[str, dict[str, Any]]:
        text, records = self._text(choice, delta, is_first=index not in self._lengths)
        start = self._lengths.get(index, 0)
        self._lengths[index] = start + len(text)
        more = self.token_fields(delta)
        if self.body.logprobs is not None and records:
            more["logprobs"] = self._logprobs(records, start)
        return text, more

    def _text(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> tuple[str, list[TokenLogprobs | int]]:
        """Return text and log-probabilities, first those of an echoed prompt. A token id has no log-probability."""
        if self.body.max_tokens == 0:
            delta = ChoiceDelta()
        if not (self.body.echo and is_first):
            return delta.text, list(delta.logprobs)
        prompt, given = choice.prepared.request.prompt, self.body.prompt
        tokenizer, echoed = self.service.llm.tokenizer, prompt
        if self.body.suffix and tokenizer.infill_tokens:
            marks = tokenizer.infill_tokens
            echoed = prompt[prompt.index(marks.prefix) + 1 : prompt.index(marks.suffix)]
        echo = given if isinstance(given, str) else tokenizer.decode(echoed)
        records: list[TokenLogprobs | int] = []
        if self.body.logprobs is not None:
            assert choice.run is not None
            records = [prompt[0], *choice.run.history.prompt_logprobs]
        return echo + delta.text, records + list(delta.logprobs)

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
            pairs = [*record.top[: self.body.logprobs or 0], (record.token, record.logprob)]
            found["top_logprobs"].append({self.token_text(other): finite(value) for other, value in pairs})
        return found

    def _end(self, index: int, ended: ChoiceEnd) -> dict[str, Any]:
        return super()._end(index, ended) | ({"finish_reason": "length"} if self.body.max_tokens == 0 else {})

    def _usage(self) -> dict[str, Any]:
        found = super()._usage()
        if self.body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found


def _mean_logprob(records: Sequence[TokenLogprobs]) -> float:
    return sum(record.logprob for record in records) / len(records) if records else float("-inf")


class ExtraFile(Body):
    """Text of another file."""

    text: str
    filename: str | None = None


class InfillBody(SamplingBody):
    """The request body of an infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None  # the current line up to the cursor, at the end of the prefix
    n_predict: Whole | None = Field(default=None, ge=-1)
    samplers: list[str] | None = None  # samplers of INFILL_DEFAULTS that are not listed are turned off
    response_fields: list[str] | None = None
    t_max_prompt_ms: Whole | None = None  # sent by editors, and accepted without effect
    t_max_predict_ms: Whole | None = None  # as above
    n_indent: Whole | None = None  # as above


def infill_request(body: InfillBody, service: Service) -> GenerationRequest:
    """Convert a request body. Of a prompt that exceeds the context, the parts farthest from the cursor are left out."""
    llm = service.llm
    context = llm.target.model.max_positions
    asked = None if body.n_predict == -1 else body.n_predict  # -1: no limit
    reserved = context // 4 if asked is None else max(asked, 1)  # for the answer
    files = tuple((file.filename or "tmp", file.text) for file in body.input_extra or ())
    prompt = infill_tokens(
        llm,
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        files=files,
        max_tokens=max(context - reserved, context // 2),
    )
    left = max_answer_tokens(llm, prompt)
    off = {} if body.samplers is None else {name: DISABLED[name] for name in DISABLED.keys() - {*body.samplers}}
    most = max(1, left if asked is None else min(asked, left))
    params = sampling_params(body, most, INFILL_DEFAULTS | service.chat_model.recommended, **off)
    drafting = drafting_options(body, service.chat_model)
    return GenerationRequest((prompt,), params, 1, 1, drafting, False, body.cache_salt)


class InfillFormat(ResponseFormat):
    """Writes completions as llama.cpp does."""

    prefix = "infill-"

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        if delta.text:
            yield sse(self._part(delta.text, delta.tokens, choice.num_tokens, False))

    def ended(self, choice: Choice, ended: ChoiceEnd) -> Iterator[bytes]:
        yield sse(self._part("", (), ended.tokens, True) | self._end(ended))

    def whole(self) -> dict[str, Any]:
        (choice,) = self.group.choices
        assert choice.ended is not None
        delta = choice.take() or ChoiceDelta()
        found = self._part(delta.text, delta.tokens, choice.ended.tokens, True) | self._end(choice.ended)
        fields = self.body.response_fields
        return found if fields is None else {path: value for path in fields for value in _at(found, path)}

    def _part(self, text: str, tokens: tuple[int, ...], written: int, is_last: bool) -> dict[str, Any]:
        if self.body.n_predict == 0:  # the request only fills the prefix cache
            text, tokens, written = "", (), 0
        found = {"index": 0, "content": text, "tokens": list(tokens), "id_slot": 0, "stop": is_last}
        return found | {"tokens_predicted": written, "tokens_evaluated": self.group.prompt_tokens}

    def _end(self, ended: ChoiceEnd) -> dict[str, Any]:
        word = ended.stop if isinstance(ended.stop, str) else ""
        return {
            "model": self.model,
            "truncated": False,
            "stop_type": "word" if word else "limit" if ended.reason == "length" else "eos",
            "stopping_word": word,
            "tokens_cached": self.group.cached_tokens,
            **self.statistics(),
        }


def _at(value: Any, path: str) -> Iterator[Any]:
    """Yield the value at a path such as "timings/prompt_n", if there is one."""
    for name in path.split("/"):
        if not isinstance(value, dict) or name not in value:
            return
        value = value[name]
    yield value
