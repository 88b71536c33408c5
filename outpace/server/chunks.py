"""What chat completions and completions have in common: chunks of choices, usage where it is asked for, `[DONE]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from outpace.server.choices import Choice, Ended, Group
from outpace.server.fields import StreamOptions
from outpace.server.jobs import Job
from outpace.server.service import Service
from outpace.server.shapes import Shape, TokenTexts, encoded, speculation, usage

DONE = b"data: [DONE]\n\n"


class ChunkShape(Shape):
    """Chunks of one object's kind. What a choice of theirs looks like is said by who inherits."""

    prefix: str  # of ids
    kind: str  # the object's, whole
    chunk_kind: str  # the object's, in a stream

    def __init__(self, service: Service, job: Job, model: str | None, options: StreamOptions | None) -> None:
        """`model`: as the request names it."""
        super().__init__(service, self.prefix)
        self._job = job
        self._model = model or service.names[0]
        self._texts = TokenTexts(service)
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._group: Group | None = None
        self._open = job.n * len(job.prompts)  # choices whose end was not told
        self._beginning = b"data: " + encoded(self._head(self.chunk_kind))[:-1] + b","  # of every chunk

    def opening(self, group: Group) -> Iterable[bytes]:
        self._group = group
        return self._first(group)

    def ended(self, choice: Choice, ended: Ended) -> Iterator[bytes]:
        assert self._group is not None
        self._open -= len(choice.indices)
        for index in choice.indices:
            is_last = self._open == 0 and index == choice.indices[-1]
            facts = self._facts(self._group) if is_last and not self._usage else {}
            yield self._chunk([self._last(index, ended)], **facts)

    def closing(self, group: Group) -> Iterable[bytes]:
        if self._usage:
            yield self._chunk([], **self._facts(group), usage=self._counted(group))
        yield DONE

    def _first(self, group: Group) -> Iterable[bytes]:
        """The chunks before the first token."""
        return ()

    def _last(self, index: int, ended: Ended) -> dict[str, Any]:
        """A choice at its end."""
        raise NotImplementedError

    def _counted(self, group: Group) -> dict[str, Any]:
        """Usage so far."""
        return usage(group)

    def _facts(self, group: Group) -> dict[str, Any]:
        return {"seed": self._job.params.seed, **speculation(group)}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self._model}
        return {**head, "system_fingerprint": self.service.fingerprint}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"choices": choices, **more}
        if self._usage_always and self._group is not None:
            chunk.setdefault("usage", self._counted(self._group))
        elif self._usage:
            chunk.setdefault("usage", None)
        return self._beginning + encoded(chunk)[1:] + b"\n\n"
