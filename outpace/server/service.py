"""What all endpoints share: the model, the engine's thread, the bounded queue, the metrics, and the server's health."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from outpace.api.llm import LLM
from outpace.core import registry
from outpace.models.files.cache import sampled_digest
from outpace.models.files.find import short_name
from outpace.rules.judge import find_judge
from outpace.server import logs
from outpace.server.choices import ChoiceGroup
from outpace.server.engine_thread import ChoiceUpdate, EngineThread
from outpace.server.errors import ApiError, unavailable
from outpace.server.generation_request import GenerationRequest, choices_of
from outpace.server.metrics import Metrics
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.tool_calls import ChatModel

RETRY_SECONDS = 1.0  # after which a refused client should retry


class QueueCounts(NamedTuple):
    """Choices that wait for a slot in the engine, and those that it works on."""

    waiting: int
    running: int


class Admission:
    """All requests that have not ended. Only the event loop uses it."""

    def __init__(self, limits: ServerLimits, batch: int, on_refusal: Callable[[str], None] = lambda code: None) -> None:
        """`on_refusal` is called with the code of each refusal."""
        self._limits, self._batch, self._on_refusal = limits, batch, on_refusal
        self.groups: set[ChoiceGroup] = set()
        self._keys: Counter[str] = Counter()
        self.num_reserved = 0  # requests whose body was received and which were not admitted yet

    def count(self) -> QueueCounts:
        """Count the choices of all requests."""
        states = [choice.is_waiting for group in self.groups for choice in group.choices if choice.ended is None]
        return QueueCounts(sum(states), len(states) - sum(states))

    def check(self) -> None:
        """Raise ApiError 429 if one more request would be refused. An idle server accepts any request."""
        if not self.groups and not self.num_reserved:
            return
        counts = self.count()
        waiting = counts.waiting + self.num_reserved
        if waiting >= self._max_waiting(counts.running):
            raise self._error(f"the queue is full: {waiting} answers are waiting", "queue_full")

    def reserve(self) -> None:
        """Count a request as waiting until `release`; raise ApiError 429 if there is no place."""
        self.check()
        self.num_reserved += 1

    def release(self) -> None:
        self.num_reserved -= 1

    def admit(self, group: ChoiceGroup) -> None:
        """Add a request; raise ApiError 429 if the queue has no space."""
        limits = self._limits
        if limits.max_requests_per_key and self._keys[group.key] >= limits.max_requests_per_key:
            message = f"this key has its limit of {limits.max_requests_per_key} concurrent requests"
            raise self._error(message, "key_limit")
        waiting = [choice for other in self.groups for choice in other.choices if choice.is_waiting]
        if self.groups and len(waiting) + len(group.choices) > self._max_waiting(self.count().running):
            raise self._error(f"the queue is full: {len(waiting)} answers are waiting", "queue_full")
        tokens = sum(len(choice.prepared.request.prompt) for choice in waiting)
        if waiting and tokens + group.prompt_tokens > limits.max_queued_tokens:
            raise self._error(f"the queue is full: prompts of {tokens} tokens are waiting", "queue_full")
        self.groups.add(group)
        self._keys[group.key] += 1

    def remove(self, group: ChoiceGroup) -> None:
        self.groups.remove(group)
        self._keys[group.key] -= 1
        self._keys += Counter()  # drops keys with count 0

    def timeout_error(self, group: ChoiceGroup) -> ApiError | None:
        """Return the error for a request at its queue timeout; None if the engine has started it."""
        if not group.is_waiting:
            return None
        return self._error(f"the request waited {self._limits.queue_timeout:g} seconds in the queue", "queue_timeout")

    def _max_waiting(self, running: int) -> int:
        """Return how many choices may wait: the queue's bound, and those that free slots take at once."""
        return self._limits.max_queue + max(0, self._batch - running)

    def _error(self, message: str, code: str) -> ApiError:
        self._on_refusal(code)
        return ApiError(429, f"{message}; retry later", code=code, retry_after=RETRY_SECONDS)


T = TypeVar("T")
SUBMIT_SECONDS = 0.25  # in which a healthy engine accepts a request
NUM_WORKERS = 2  # threads that tokenize, render templates and compile grammars


class Service:
    """One served model. Everything but the engine's thread belongs to one event loop."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options, self.limits = llm, options, options.limits
        self.names = tuple(options.served_name or ()) or (short_name(llm.target.name),)
        self.created = int(time.time())
        self.chat_model = ChatModel(llm, options)
        self.fingerprint = system_fingerprint(llm, self.chat_model.default_sampling)
        self.max_model_len: int = llm.target.model.max_positions
        self.thread = EngineThread(llm.engine, self._post, logs.fault)
        gauges: dict[str, Callable[[], float]] = {
            "num_requests_running": lambda: self.admission.count().running,
            "num_requests_waiting": lambda: self.admission.count().waiting,
            "engine_step_age_seconds": lambda: self.thread.step_age,
            "kv_cache_usage_perc": lambda: llm.engine.memory.used / max(llm.engine.memory.budget, 1),
        }
        self.metrics = Metrics(options.metrics_prefix, gauges, llm.grammars)
        self.admission = Admission(self.limits, llm.engine.options.batch, self.metrics.refused)
        self.is_draining = False
        self._executor = ThreadPoolExecutor(NUM_WORKERS, "prepare")
        self._loop: asyncio.AbstractEventLoop | None = None
        self.clients: Any = None  # a `ClientListener`, if there is a port for drafting clients

    def begin(self) -> None:
        """Start the engine's thread, and let drafting clients join. Must be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        if self.clients is not None:
            self.clients.start(self._loop)
        self.thread.start()

    def end(self) -> None:
        """Stop the engine's thread, which ends all answers."""
        self.is_draining = True
        if self.clients is not None:
            self.clients.close()
        self.thread.stop(10.0)
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def draft_port(self) -> int | None:
        """The port for clients that draft for themselves; None if there is none."""
        return None if self.clients is None else self.clients.port

    @property
    def is_stuck(self) -> bool:
        """Whether work is pending and the engine's step does not end."""
        return self.thread.step_age > self.limits.stuck

    def check_ready(self) -> None:
        """Raise ApiError 503 if the server accepts no requests."""
        if self.is_draining:
            raise unavailable("the server is shutting down and accepts no requests", "draining")
        if self.is_stuck:
            raise unavailable(f"the engine has been stuck for {self.thread.step_age:.0f} seconds", "stuck")

    async def run_in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def start(
        self, to_request: Callable[[Any, Service], GenerationRequest], body: Any, key: str
    ) -> tuple[GenerationRequest, ChoiceGroup]:
        """Admit a request and submit its choices to the engine; raise ApiError or UserError if that fails.

        `to_request` converts the body in a worker thread.
        """

        def prepare() -> tuple[GenerationRequest, ChoiceGroup]:
            request = to_request(body, self)
            choices = list(choices_of(request, self.llm, key))
            return request, ChoiceGroup(choices, request.prompts, key, request.count_thoughts)

        return await self.submit(prepare)

    async def submit(self, prepare: Callable[[], tuple[T, ChoiceGroup]]) -> tuple[T, ChoiceGroup]:
        """Admit what `prepare`, which runs in a worker thread, returns, and submit its choices to the engine; see
        `start`."""
        self.check_ready()
        self.admission.reserve()
        try:
            request, group = await self.run_in_thread(prepare)
            self.admission.admit(group)
        finally:
            self.admission.release()
        self._set_deadlines(group)

        def fail_if_refused(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and isinstance(error := done.exception(), Exception):
                group.fail(error)

        submitted = asyncio.wrap_future(self.thread.submit(group.choices))
        submitted.add_done_callback(fail_if_refused)
        await asyncio.wait([submitted], timeout=SUBMIT_SECONDS)  # an error is best reported before the headers
        if group.failure is not None:
            self.leave(group)
            raise group.failure
        return request, group

    def leave(self, group: ChoiceGroup) -> None:
        """Forget a request whose response has ended, and abort its choices that still run."""
        if not group.has_ended:
            self.thread.abort(group.choices)
        for timer in group.deadlines:
            timer.cancel()
        for choice in group.choices:
            choice.group = None
        if group in self.admission.groups:
            self.admission.remove(group)
            self.metrics.finished(group)

    def fail_all(self, error: ApiError) -> None:
        for group in list(self.admission.groups):
            group.fail(error)

    def _set_deadlines(self, group: ChoiceGroup) -> None:
        loop, limits = asyncio.get_running_loop(), self.limits
        late = ApiError(504, f"the answer took more than {limits.request_timeout:g} seconds", code="timeout")

        def check_queue_timeout() -> None:
            if error := self.admission.timeout_error(group):
                group.fail(error)

        group.deadlines = (
            loop.call_later(limits.request_timeout, group.fail, late),
            loop.call_later(limits.queue_timeout, check_queue_timeout),
        )

    def _post(self, updates: Sequence[ChoiceUpdate]) -> None:
        """Pass a step's updates from the engine's thread to the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[ChoiceUpdate]) -> None:
        self.metrics.add("generation_tokens", sum(len(update.delta.tokens) for update in updates if update.delta))
        for choice, delta, ended in updates:
            self.metrics.updated(choice, delta, ended)
            choice.add(delta, ended)
            if choice.group is not None:
                choice.group.wake()


def system_fingerprint(llm: LLM, default_sampling: Mapping[str, Any] = {}) -> str:
    """Return `system_fingerprint`, equal for two servers that write equal texts for equal seeds and requests.

    It is a hash of the weights, tokenizer, template, precision, runtime, exact mode, rules and their options, and of
    `default_sampling`, which applies to requests without sampling parameters.
    """
    target = llm.target
    model, tokenizer, place = target.model, target.tokenizer, target.files() if target.files else None
    files = [] if place is None else sorted(place.iterdir() if place.is_dir() else [place])
    facts: dict[str, Any] = {
        "config": dict(target.config),
        "precision": target.precision,
        "keys and values": getattr(model, "kv_dtype", None),
        "runtime": f"{type(model).__module__}.{type(model).__name__}",
        "exact": bool(model.exact),
        "arithmetic": getattr(model, "arithmetic", None),
        "instructions": model.instruction_set if not model.exact else None,
        "rule": llm.rule,
        "sampling": dict(default_sampling),
        "rules": [(name, _options_of(name, llm)) for name in llm.build_options.known_rules],
        "vocabulary": sorted(tokenizer.stop_ids),
        "template": tokenizer.chat_template,
        "files": [(file.name, sampled_digest(file)) for file in files if file.is_file()],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _options_of(rule: str, llm: LLM) -> dict[str, Any]:
    """Return a rule's options; a judge is represented by its file's digest."""
    options = asdict(registry.build_options(registry.find("rules", rule), llm.build_options.part_options))
    if options.get("judge"):
        options["judge"] = sampled_digest(find_judge(options["judge"]))
    return options
