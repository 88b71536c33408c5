"""`/infill`, as in llama.cpp's server: editors request the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd
from outpace.server.completions import infill_tokens
from outpace.server.generation_request import GenerationRequest, drafting_options, max_answer_tokens
from outpace.server.request_body import Body, SamplingBody, sampling_params
from outpace.server.response_formats import ResponseFormat, sse
from outpace.server.service import Service

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
DISABLED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


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
    n_predict: int | None = Field(default=None, ge=-1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100)
    samplers: list[str] | None = None  # samplers of DEFAULTS that are not listed are turned off
    response_fields: list[str] | None = None
    # The fields below are accepted without effect.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    timings_per_token: bool | None = None


def to_request(body: InfillBody, service: Service) -> GenerationRequest:
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
        room=max(context - reserved, context // 2),
    )
    left = max_answer_tokens(llm, prompt)
    sampling = {name: value for name, value in DEFAULTS.items() if getattr(body, name) is None}
    if body.samplers is not None:
        sampling |= {name: value for name, value in DISABLED.items() if name not in body.samplers}
    if body.repeat_penalty is not None:
        sampling["repetition_penalty"] = body.repeat_penalty
    if body.seed == -1:
        body.seed = None  # a random one
    params = sampling_params(body, max(1, left if asked is None else min(asked, left)), **sampling)
    return GenerationRequest((prompt,), params, 1, 1, drafting_options(body, service.chat_model), False)


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
