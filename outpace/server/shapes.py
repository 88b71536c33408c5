"""What the answers of all APIs have in common: events, usage, figures of speculation, token texts."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from outpace.core.stats import RoundStats
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import Round
from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.errors import ApiError
from outpace.server.fields import Sampled
from outpace.server.service import Service

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
LEAST = -9999.0  # stands for minus infinity, which JSON does not have
REASONS = {"stop": "stop", "length": "length"}


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return prefix + secrets.token_hex(12)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + encoded(value) + b"\n\n"


def encoded(value: Any) -> bytes:
    """JSON as it is sent."""
    return _encode(value).encode("utf-8", "replace")


class Shape:
    """How one API tells an answer, in events or whole. One object an answer: it remembers what was told."""

    in_messages = False  # errors are told as the Messages API does

    def __init__(self, service: Service, prefix: str) -> None:
        self.service = service
        self.id = new_id(prefix)
        self.created = int(time.time())

    def opening(self, group: Group) -> Iterable[bytes]:
        """Before the first token."""
        return ()

    def delta(self, choice: Choice, delta: Delta) -> Iterable[bytes]:
        """What was written."""
        raise NotImplementedError

    def ended(self, choice: Choice, ended: Ended) -> Iterable[bytes]:
        """A choice is over."""
        raise NotImplementedError

    def closing(self, group: Group) -> Iterable[bytes]:
        """All are."""
        return ()

    def failed(self, error: ApiError, request_id: str) -> Iterable[bytes]:
        """Instead of what was still to come."""
        yield event(error.openai())

    def ping(self, group: Group) -> bytes:
        """A sign of life, with how much of the prompt is read."""
        return f": ping {progress(group)}\n\n".encode()

    def whole(self, group: Group) -> dict[str, Any]:
        """All choices at once."""
        raise NotImplementedError


def progress(group: Group) -> str:
    """Tokens of the first prompt that are read, of all that it has."""
    run, total = group.choices[0].run, len(group.choices[0].asked.request.prompt)
    session = getattr(run, "session", None)  # none while it waits, and none once it is over
    return f"{min(session.length + 1, total) if session is not None else 0}/{total}"


def finish_reason(ended: Ended) -> str:
    """In the OpenAI API's words."""
    return REASONS.get(ended.reason, "stop")


def usage(group: Group) -> dict[str, Any]:
    """Tokens that were read and written so far."""
    written = sum(
        len(choice.indices) * (choice.ended.tokens if choice.ended else choice.written) for choice in group.choices
    )
    prompt, figures = group.prompt_tokens, group.figures
    details = {
        "reasoning_tokens": group.thought_tokens,
        "accepted_prediction_tokens": figures.predicted_accepted,
        "rejected_prediction_tokens": figures.predicted_rejected,
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(group)},
        "completion_tokens_details": details,
    }


def cached_tokens(group: Group) -> int:
    """Of all prompts: those that none of their choices had to read."""
    least: dict[tuple[int, ...], int] = {}
    for choice in group.choices:
        if choice.run is not None:
            prompt = choice.asked.request.prompt
            least[prompt] = min(least.get(prompt, len(prompt)), choice.run.history.reused)
    return sum(least.values())


def speculation(group: Group) -> dict[str, Any]:
    """What drafting did for the answer: vLLM's figures and llama.cpp's."""
    steps = [step for choice in group.choices if choice.ended for step in choice.ended.history.steps]
    drafted = [step for step in steps if step.drafted]
    counts = Counter(step.accepted for step in drafted)
    figures = group.figures
    vllm = {
        "mean_acceptance_length": round(figures.mean_accepted_length, 4),
        "draft_acceptance_rate": round(figures.draft_acceptance or 0.0, 4),
        "acceptance_histogram": [counts[length] for length in range(max(counts, default=-1) + 1)],
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": figures.accepted,
        "num_draft_tokens": figures.drafted,
        "num_spec_tokens": max((step.depth_offered for step in drafted), default=0),
    }
    return {"metrics": {"speculative_decoding": vllm}, "timings": _timings(group)}


def _timings(group: Group) -> dict[str, Any]:
    histories = [choice.ended.history for choice in group.choices if choice.ended]
    figures, written = group.figures, sum(choice.ended.tokens for choice in group.choices if choice.ended)
    first = [h.first_token - h.began for h in histories if h.first_token]
    later = [h.ended - h.first_token for h in histories if h.first_token]
    prompt_ms, predicted_ms = 1000 * max(first, default=0.0), 1000 * max(later, default=0.0)
    read = max(group.prompt_tokens - cached_tokens(group), 0)
    after_first = max(written - sum(h.steps[0].emitted for h in histories if h.steps), 0)
    return {
        "cache_n": cached_tokens(group),
        "prompt_n": read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(1000 * read / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": round(1000 * after_first / predicted_ms, 3) if predicted_ms else 0.0,
        "draft_n": figures.drafted,
        "draft_n_accepted": figures.accepted,
    }


class TokenTexts:
    """What single tokens are called in log-probabilities."""

    def __init__(self, service: Service) -> None:
        self._bytes_of = service.llm.tokenizer.spelled

    def bytes_of(self, token: int) -> bytes:
        return self._bytes_of(token)

    def text(self, token: int) -> str:
        """Its text; a part of a character by its bytes, as the OpenAI API writes it."""
        found = self._bytes_of(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def told_beside(body: Sampled, delta: Delta, texts: TokenTexts) -> dict[str, Any]:
    """What a request asks to be told of the tokens beside their text."""
    more: dict[str, Any] = {}
    if body.return_token_ids and delta.tokens:
        more["token_ids"] = list(delta.tokens)
    if body.return_sources and delta.tokens:
        more["sources"] = list(delta.sources)
        more["token_texts"] = [texts.text(token) for token in delta.tokens]
    if body.return_rounds and delta.rounds:
        more["rounds"] = [_told_round(found, step, texts) for found, step in delta.rounds]
    return more


def _told_round(found: Round, step: RoundStats, texts: TokenTexts) -> dict[str, Any]:
    """A tree and its times; the parent of the root is null."""
    return {
        "tokens": [texts.text(token) for token in found.tokens],
        "parents": [parent if parent >= 0 else None for parent in found.parents],
        "sources": list(found.sources),
        "path": list(found.path),
        "draft_ms": round(1000 * step.draft_seconds, 3),
        "target_ms": round(1000 * step.target_seconds, 3),
        "ms": round(1000 * step.seconds, 3),
    }


def best(record: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens and their log-probabilities."""
    return [(token, finite(value)) for token, value in record.top[:count]]


def finite(value: float) -> float:
    """A log-probability that JSON can carry."""
    return value if value > LEAST else LEAST
