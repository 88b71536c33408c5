"""How `/v1/chat/completions` answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outpace.server.chat_body import ChatBody
from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.jobs import Job
from outpace.server.service import Service
from outpace.server.shapes import Shape, TokenTexts, best, event, finish_reason, finite, speculation, told_beside, usage

DONE = b"data: [DONE]\n\n"


class ChatShape(Shape):
    """Chunks with deltas of messages, or a completion with whole ones."""

    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        super().__init__(service, "chatcmpl-")
        self._body, self._job = body, job
        self._model = body.model or service.names[0]
        self._texts = TokenTexts(service)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._group: Group | None = None
        self._open = job.n  # choices whose end was not told

    def opening(self, group: Group) -> Iterator[bytes]:
        self._group = group
        for index in range(self._job.n):
            chosen = _chosen(index, {"role": "assistant", "content": ""})
            more = {"prompt_token_ids": list(group.prompts[0])} if self._body.return_token_ids else {}
            yield self._chunk([chosen], **more)

    def delta(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        more = self._beside(delta)
        if delta.text or more:
            for index in choice.indices:
                yield self._chunk([_chosen(index, {"content": delta.text}, **more)])

    def ended(self, choice: Choice, ended: Ended) -> Iterator[bytes]:
        assert self._group is not None
        self._open -= len(choice.indices)
        for index in choice.indices:
            is_last = self._open == 0 and index == choice.indices[-1]
            facts = self._facts(self._group) if is_last and not self._usage else {}
            chosen = _chosen(index, {}, finish_reason=finish_reason(ended), stop_reason=ended.stop)
            yield self._chunk([chosen], **facts)

    def closing(self, group: Group) -> Iterable[bytes]:
        if self._usage:
            yield self._chunk([], **self._facts(group), usage=usage(group))
        yield DONE

    def _facts(self, group: Group) -> dict[str, Any]:
        return {"seed": self._job.params.seed, **speculation(group)}

    def whole(self, group: Group) -> dict[str, Any]:
        choices = [self._whole_choice(index, choice) for choice, index in in_order(group)]
        more = {"prompt_token_ids": list(group.prompts[0])} if self._body.return_token_ids else {}
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": usage(group), **more, **self._facts(group)}

    def _whole_choice(self, index: int, found: tuple[Delta, Ended]) -> dict[str, Any]:
        delta, ended = found
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": None, **self._beside(delta)}
        return {**choice, "finish_reason": finish_reason(ended), "stop_reason": ended.stop}

    def _beside(self, delta: Delta) -> dict[str, Any]:
        """What is told of the tokens beside their text."""
        more = told_beside(self._body, delta, self._texts)
        if self._body.logprobs and delta.tokens:
            more["logprobs"] = {"content": [self._logprob(record) for record in delta.logprobs], "refusal": None}
        return more

    def _logprob(self, record: Any) -> dict[str, Any]:
        top = [self._entry(*pair) for pair in best(record, self._body.top_logprobs or 0)]
        return {**self._entry(record.token, finite(record.logprob)), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(self._texts.bytes_of(token))}

    def _head(self, kind: str) -> dict[str, Any]:
        fingerprint = self.service.fingerprint
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._model,
            "system_fingerprint": fingerprint,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices, **more}
        if self._usage_always and self._group is not None:
            chunk.setdefault("usage", usage(self._group))
        elif self._usage:
            chunk.setdefault("usage", None)
        return event(chunk)


def _chosen(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


def in_order(group: Group) -> list[tuple[tuple[Delta, Ended], int]]:
    """Every choice that the client gets, whole, with its index, in the order of these."""
    found = []
    for choice in group.choices:
        delta = choice.take() or Delta()
        assert choice.ended is not None
        found += [((delta, choice.ended), index) for index in choice.indices]
    return sorted(found, key=lambda pair: pair[1])
