"""How `/v1/chat/completions` answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outpace.server.chat_body import ChatBody
from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.chunks import ChunkShape
from outpace.server.jobs import Job
from outpace.server.parts import CallArguments, CallBegin, Part, Text, Thought
from outpace.server.service import Service
from outpace.server.shapes import best, finish_reason, finite, new_id, told_beside


class ChatShape(ChunkShape):
    """Chunks with deltas of messages, or a completion with whole ones."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        super().__init__(service, job, body.model, body.stream_options)
        self._body = body
        self._splitters = [job.splitter() for _ in range(job.n)]
        self._calls: dict[tuple[int, int], str] = {}  # ids of calls, by choice and number

    def _first(self, group: Group) -> Iterator[bytes]:
        for index in range(self._job.n):
            chosen = _chosen(index, {"role": "assistant", "content": ""})
            more = {"prompt_token_ids": list(group.prompts[0])} if self._body.return_token_ids else {}
            yield self._chunk([chosen], **more)

    def delta(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        more = self._beside(delta)
        for index in choice.indices:
            told = self._message(index, self._splitters[index].push(delta.text))
            if told or more:
                yield self._chunk([_chosen(index, told or {"content": ""}, **more)])

    def _last(self, index: int, ended: Ended) -> dict[str, Any]:
        told = self._message(index, self._splitters[index].finish())
        return _chosen(index, told, finish_reason=self._reason(index, ended), stop_reason=ended.stop)

    def _message(self, index: int, parts: Iterable[Part]) -> dict[str, Any]:
        """Parts of a choice as the delta of its message; new calls get their ids."""
        told: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Text):
                told["content"] = told.get("content", "") + part.text
            elif isinstance(part, Thought):
                told["reasoning"] = told.get("reasoning", "") + part.text
            else:
                self._add_call(told.setdefault("tool_calls", []), index, part)
        return told

    def _add_call(self, calls: list[dict[str, Any]], index: int, part: CallBegin | CallArguments) -> None:
        if isinstance(part, CallBegin):
            call_id = self._calls[index, part.number] = new_id("call_")
            function = {"name": part.name, "arguments": ""}
            calls.append({"index": part.number, "id": call_id, "type": "function", "function": function})
            return
        if not calls or calls[-1]["index"] != part.number:
            calls.append({"index": part.number, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += part.text

    def _reason(self, index: int, ended: Ended) -> str:
        has_called = self._splitters[index].calls and ended.reason == "stop"
        return "tool_calls" if has_called else finish_reason(ended)

    def whole(self, group: Group) -> dict[str, Any]:
        choices = [self._whole_choice(index, choice) for choice, index in in_order(group)]
        more = {"prompt_token_ids": list(group.prompts[0])} if self._body.return_token_ids else {}
        head = self._head(self.kind)
        return {**head, "choices": choices, "usage": self._counted(group), **more, **self._facts(group)}

    def _whole_choice(self, index: int, found: tuple[Delta, Ended]) -> dict[str, Any]:
        delta, ended = found
        splitter = self._splitters[index]
        told = self._message(index, [*splitter.push(delta.text), *splitter.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": told.get("content"), "refusal": None}
        if "reasoning" in told:
            message["reasoning"] = told["reasoning"]
        if "tool_calls" in told:
            names = ("id", "type", "function")
            message["tool_calls"] = [{name: call[name] for name in names} for call in told["tool_calls"]]
        elif message["content"] is None:
            message["content"] = ""
        choice = {"index": index, "message": message, "logprobs": None, **self._beside(delta)}
        return {**choice, "finish_reason": self._reason(index, ended), "stop_reason": ended.stop}

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
