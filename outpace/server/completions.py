"""How `/v1/completions` answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outpace.core.types import TokenLogprobs
from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.chunks import ChunkShape
from outpace.server.completion_body import CompletionBody
from outpace.server.jobs import Job
from outpace.server.service import Service
from outpace.server.shapes import best, finish_reason, finite, told_beside, usage


class CompletionShape(ChunkShape):
    """Chunks of text, or whole texts, each with records of its tokens."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionBody, job: Job) -> None:
        super().__init__(service, job, body.model, body.stream_options)
        self._body = body
        self._lengths: dict[int, int] = {}  # characters that were told, by index

    def delta(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        for index in choice.indices:
            text, records = self._parts(choice, delta, is_first=index not in self._lengths)
            more = self._beside(index, text, records, delta)
            if text or more:
                yield self._chunk([_chosen(index, text, **more)])

    def _last(self, index: int, ended: Ended) -> dict[str, Any]:
        return _chosen(index, "", finish_reason=self._reason(ended), stop_reason=ended.stop)

    def whole(self, group: Group) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        count = len(group.choices) // len(group.prompts)
        for number in range(len(group.prompts)):
            own = group.choices[number * count : (number + 1) * count]
            taken = [(choice, choice.take() or Delta()) for choice in own]
            if self._job.best_of > self._job.n and len(taken) > 1:
                taken = sorted(taken, key=lambda pair: -_mean(pair[1].logprobs))[: self._job.n]
            pairs = [pair for pair in taken for _ in range(max(len(pair[0].indices), 1))]
            found += [self._whole(number * self._job.n + place, *pair) for place, pair in enumerate(pairs)]
        return {**self._head(self.kind), "choices": found, "usage": self._counted(group), **self._facts(group)}

    def _whole(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        assert choice.ended is not None
        text, records = self._parts(choice, delta, is_first=True)
        more = self._beside(index, text, records, delta)
        if self._body.return_token_ids:
            more["prompt_token_ids"] = list(choice.asked.request.prompt)
        return _chosen(index, text, finish_reason=self._reason(choice.ended), stop_reason=choice.ended.stop, **more)

    def _parts(self, choice: Choice, delta: Delta, is_first: bool) -> tuple[str, list[TokenLogprobs | int]]:
        """The text, and the records of its tokens: the echoed prompt's first. A token without one stands for itself."""
        if self._body.max_tokens == 0:
            delta = Delta()
        if not (self._body.echo and is_first):
            return delta.text, list(delta.logprobs)
        prompt = choice.asked.request.prompt
        echo = (
            self.service.llm.tokenizer.decode(prompt) if not isinstance(self._body.prompt, str) else self._body.prompt
        )
        records: list[TokenLogprobs | int] = []
        if self._body.logprobs is not None:
            assert choice.run is not None
            records = [prompt[0], *choice.run.history.prompt_logprobs]
        return echo + delta.text, records + list(delta.logprobs)

    def _beside(self, index: int, text: str, records: Sequence[TokenLogprobs | int], delta: Delta) -> dict[str, Any]:
        start = self._lengths.get(index, 0)
        self._lengths[index] = start + len(text)
        more = told_beside(self._body, delta, self._texts)
        if self._body.logprobs is not None and records:
            more["logprobs"] = self._logprobs(records, start)
        return more

    def _logprobs(self, records: Sequence[TokenLogprobs | int], start: int) -> dict[str, Any]:
        """Four lists of one length. `text_offset` counts characters of the whole text."""
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        stream = self.service.llm.tokenizer.stream(skip_special=False)
        for record in records:
            token = record if isinstance(record, int) else record.token
            told["tokens"].append(self._texts.text(token))
            told["text_offset"].append(start)
            start += len(stream.push([token]))
            if isinstance(record, int):
                told["token_logprobs"].append(None)
                told["top_logprobs"].append(None)
                continue
            told["token_logprobs"].append(finite(record.logprob))
            pairs = [*best(record, self._body.logprobs or 0), (record.token, finite(record.logprob))]
            told["top_logprobs"].append({self._texts.text(other): value for other, value in pairs})
        return told

    def _reason(self, ended: Ended) -> str:
        return "length" if self._body.max_tokens == 0 else finish_reason(ended)

    def _counted(self, group: Group) -> dict[str, Any]:
        found = usage(group)
        if self._body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found


def _chosen(index: int, text: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def _mean(records: Sequence[TokenLogprobs]) -> float:
    """The mean log-probability of a choice; an empty one is the worst."""
    return sum(record.logprob for record in records) / len(records) if records else float("-inf")
