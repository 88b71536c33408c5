"""Figures of the server for Prometheus, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from outpace.core.stats import RunStats
from outpace.engine.sequence import History
from outpace.server.choices import Choice, Delta, Ended, Group

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
COUNTERS = {
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts whose keys and values were there.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens that were written.",
    "spec_decode_num_drafts": "Rounds that verified drafted tokens.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "client_disconnects": "Clients that left before their answer's end.",
    "candidate_hits": "Rounds whose next token stood in the candidate cache.",
    "candidate_misses": "Rounds whose next token did not.",
    "candidate_stale": "Candidates that came after the text had gone another way.",
}
LABELLED = {
    "request_success": ("Answers that ended, by their finish reason.", "finished_reason"),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens by position.", "position"),
    "draft_tokens": ("Drafted tokens that were verified, by who proposed them.", "source"),
    "requests_rejected": ("Requests that were refused for want of room.", "reason"),
}
GAUGES = {
    "num_requests_running": "Answers that are being written.",
    "num_requests_waiting": "Answers that wait for room.",
    "engine_step_age_seconds": "Since the last step ended, while work is pending.",
    "kv_cache_usage_perc": "Share of the budget for keys and values in use, 0 to 1.",
    "speculation_speedup": "Tokens a second lately, over those of plain decoding by its measured rounds; 0: unknown.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request to its first token.", LONG),
    "inter_token_latency_seconds": ("Between two rounds of an answer, by token.", SHORT),
    "e2e_request_latency_seconds": ("From the request to its last token.", LONG),
    "request_queue_time_seconds": ("Until the engine began with it.", LONG),
    "request_prefill_time_seconds": ("From there to the first token.", LONG),
    "request_decode_time_seconds": ("From there to the last token.", LONG),
    "draft_ahead_depth": ("Length of the longest branch in the candidate cache when the target asked.", DEPTHS),
    "target_wait_seconds": ("Of an answer, in which no pass of the target ran.", LONG),
}


class Metrics:
    """One registry under one or two prefixes."""

    def __init__(
        self, prefix: str, readings: Mapping[str, Callable[[], float]], grammars: Callable[[], tuple[int, float]]
    ) -> None:
        """`readings` give the values of GAUGES, but for the speedup, which comes with the answers' ends; and
        `grammars`, how many there were and the seconds that they took to compile."""
        self.registry = CollectorRegistry()
        prefixes = ("outpace", "vllm") if prefix == "both" else (prefix,)
        self._parts = [_Part(f"{name}:", self.registry) for name in prefixes]
        self._seen: dict[Choice, float] = {}  # when it wrote last
        self._latest = 0.0  # speedup
        for part in self._parts:
            for name, text in GAUGES.items():
                Gauge(part.prefix + name, text, registry=self.registry).set_function(readings.get(name, self._speedup))
            self.registry.register(_Compiled(f"{part.prefix}grammar_compile_seconds", grammars))

    def _speedup(self) -> float:
        return self._latest

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Counts, or observes, under every prefix."""
        for part in self._parts:
            part.add(name, amount, labels)

    def rejected(self, reason: str) -> None:
        self.add("requests_rejected", reason=reason)

    def wrote(self, choice: Choice, delta: Delta | None, ended: Ended | None) -> None:
        """A round of a choice."""
        now = time.perf_counter()
        if delta is not None and delta.tokens:
            before = self._seen.get(choice)
            self._seen[choice] = now
            if before is not None:
                self.add("inter_token_latency_seconds", (now - before) / len(delta.tokens))
        if ended is not None:
            self._seen.pop(choice, None)
            self.add("prefix_cache_queries", len(choice.asked.request.prompt))
            self._ended(ended)

    def finished(self, group: Group) -> None:
        """A request is over."""
        self.add("prompt_tokens", group.prompt_tokens)
        if group.is_gone:
            self.add("client_disconnects")
        for choice in group.choices:
            self._seen.pop(choice, None)

    def _ended(self, ended: Ended) -> None:
        history, figures = ended.history, ended.figures
        self.add("request_success", finished_reason=ended.reason)
        self._draft_figures(figures, history)
        self._latest = ended.speedup or self._latest
        if not history.began:
            return
        self.add("prefix_cache_hits", history.reused)
        self.add("request_queue_time_seconds", history.began - history.submitted)
        if history.first_token:
            self.add("time_to_first_token_seconds", history.first_token - history.submitted)
            self.add("request_prefill_time_seconds", history.first_token - history.began)
            self.add("request_decode_time_seconds", history.ended - history.first_token)
            self.add("e2e_request_latency_seconds", history.ended - history.submitted)
            waits = [max(step.seconds - step.target_seconds, 0.0) for step in history.steps]
            self.add("target_wait_seconds", sum(waits))

    def _draft_figures(self, figures: RunStats, history: History) -> None:
        self.add("spec_decode_num_draft_tokens", figures.drafted)
        self.add("spec_decode_num_accepted_tokens", figures.accepted)
        self.add("spec_decode_num_drafts", figures.positions[0][0] if figures.positions else 0)
        self.add("candidate_hits", figures.hits)
        self.add("candidate_misses", figures.misses)
        self.add("candidate_stale", history.stale)
        for source, count in history.drafted.items():
            self.add("draft_tokens", count, source=source)
        for step in history.steps:
            if step.hit is not None:
                self.add("draft_ahead_depth", step.depth_offered)
        for position, (_, kept) in enumerate(figures.positions):
            self.add("spec_decode_num_accepted_tokens_per_pos", kept, position=str(position))


class _Compiled(Collector):
    """Grammars that were compiled, as a summary: how many, and the seconds of all."""

    def __init__(self, name: str, grammars: Callable[[], tuple[int, float]]) -> None:
        self._name, self._grammars = name, grammars

    def collect(self) -> Iterator[Metric]:
        count, seconds = self._grammars()
        yield SummaryMetricFamily(self._name, "To compile a grammar.", count_value=count, sum_value=seconds)


class _Part:
    """The counters and histograms under one prefix."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self.prefix = prefix
        self._parts: dict[str, Any] = {
            name: Counter(prefix + name, text, registry=registry) for name, text in COUNTERS.items()
        }
        for name, (text, label) in LABELLED.items():
            self._parts[name] = Counter(prefix + name, text, [label], registry=registry)
        for name, (text, buckets) in HISTOGRAMS.items():
            self._parts[name] = Histogram(prefix + name, text, buckets=buckets, registry=registry)

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        part = self._parts[name]
        if labels:
            part = part.labels(**labels)
        if isinstance(part, Histogram):
            part.observe(amount)
        else:
            part.inc(amount)
