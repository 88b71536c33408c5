"""The server's metrics for Prometheus, named as in vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from outpace.core.stats import RunStats
from outpace.engine.sequence import History
from outpace.grammar.compiler import Grammars
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup

SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LONG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DEPTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens whose keys and values were in the prefix cache.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "spec_decode_num_drafts": "Rounds that verified drafted tokens.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "client_disconnects": "Clients that disconnected before the end of their answer.",
    "candidate_hits": "Rounds whose next token was in the candidate cache.",
    "candidate_misses": "Rounds whose next token was not in the candidate cache.",
    "candidate_stale": "Candidates that arrived after the text had diverged from them.",
}
LABELLED = {
    "request_success": ("Finished answers by finish reason.", "finished_reason"),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted draft tokens by position.", "position"),
    "draft_tokens": ("Drafted tokens that were verified, by drafter.", "source"),
    "requests_rejected": ("Requests that were refused because of a full queue or a limit.", "reason"),
}
GAUGES = {
    "num_requests_running": "Answers that are being generated.",
    "num_requests_waiting": "Answers that wait in the queue.",
    "engine_step_age_seconds": "Seconds since the last step ended, while work is pending.",
    "kv_cache_usage_perc": "Used share of the KV cache, 0 to 1.",
    "speculation_speedup": "Recent tokens/s over those of plain decoding by its measured rounds; 0: unknown.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from the request to its first token.", LONG_BUCKETS),
    "inter_token_latency_seconds": ("Seconds between two rounds of an answer, per token.", SHORT_BUCKETS),
    "e2e_request_latency_seconds": ("Seconds from the request to its last token.", LONG_BUCKETS),
    "request_queue_time_seconds": ("Seconds in the queue.", LONG_BUCKETS),
    "request_prefill_time_seconds": ("Seconds from the end of the queue to the first token.", LONG_BUCKETS),
    "request_decode_time_seconds": ("Seconds from the first token to the last.", LONG_BUCKETS),
    "draft_ahead_depth": ("Length of the longest cached branch when the target queries the cache.", DEPTH_BUCKETS),
    "target_wait_seconds": ("Seconds of an answer in which no target pass ran.", LONG_BUCKETS),
}


class Metrics:
    """One registry with all metrics under one or two prefixes."""

    def __init__(self, prefix: str, gauges: Mapping[str, Callable[[], float]], grammars: Grammars) -> None:
        """`gauges` read the values of GAUGES except the speedup, which is known from finished answers."""
        self.registry = CollectorRegistry()
        self._metrics: dict[str, list[Any]] = {}  # by name, one for each prefix
        self._last_output: dict[Choice, float] = {}  # time of a choice's last output
        self._last_speedup = 0.0
        for start in ("outpace:", "vllm:") if prefix == "both" else (f"{prefix}:",):
            for name, text in COUNTERS.items():
                self._register(name, Counter(start + name, text, registry=self.registry))
            for name, (text, label) in LABELLED.items():
                self._register(name, Counter(start + name, text, [label], registry=self.registry))
            for name, (text, buckets) in HISTOGRAMS.items():
                self._register(name, Histogram(start + name, text, buckets=buckets, registry=self.registry))
            for name, text in GAUGES.items():
                read = gauges.get(name, lambda: self._last_speedup)
                Gauge(start + name, text, registry=self.registry).set_function(read)
            self.registry.register(_GrammarSummary(f"{start}grammar_compile_seconds", grammars))

    def _register(self, name: str, metric: Any) -> None:
        self._metrics.setdefault(name, []).append(metric)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter, or observe a value of a histogram, under every prefix."""
        for metric in self._metrics[name]:
            labelled = metric.labels(**labels) if labels else metric
            if isinstance(metric, Histogram):
                labelled.observe(amount)
            else:
                labelled.inc(amount)

    def refused(self, reason: str) -> None:
        self.add("requests_rejected", reason=reason)

    def updated(self, choice: Choice, delta: ChoiceDelta | None, ended: ChoiceEnd | None) -> None:
        now = time.perf_counter()
        if delta is not None and delta.tokens:
            before = self._last_output.get(choice)
            self._last_output[choice] = now
            if before is not None:
                self.add("inter_token_latency_seconds", (now - before) / len(delta.tokens))
        if ended is not None:
            self._last_output.pop(choice, None)
            self.add("prefix_cache_queries", len(choice.prepared.request.prompt))
            self._ended(ended)

    def finished(self, group: ChoiceGroup) -> None:
        self.add("prompt_tokens", group.prompt_tokens)
        if group.is_gone:
            self.add("client_disconnects")
        for choice in group.choices:
            self._last_output.pop(choice, None)

    def _ended(self, ended: ChoiceEnd) -> None:
        history = ended.history
        self.add("request_success", finished_reason=ended.reason)
        self._record_drafting(ended.figures, history)
        self._last_speedup = ended.speedup or self._last_speedup
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

    def _record_drafting(self, figures: RunStats, history: History) -> None:
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


class _GrammarSummary(Collector):
    """Number of compiled grammars and their total time, as a summary."""

    def __init__(self, name: str, grammars: Grammars) -> None:
        self._name, self._grammars = name, grammars

    def collect(self) -> Iterator[Metric]:
        count, seconds = self._grammars.compiled, self._grammars.seconds
        yield SummaryMetricFamily(self._name, "Seconds to compile a grammar.", count_value=count, sum_value=seconds)
