"""What all endpoints share: the model, its engine's thread, the queue, the metrics, and whether the server is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from outpace.api.llm import LLM
from outpace.server import fingerprint, logs
from outpace.server.admission import Admission, Place
from outpace.server.choices import Choice, Group
from outpace.server.engine_thread import EngineThread, Update
from outpace.server.errors import ApiError, unavailable
from outpace.server.jobs import Job, choices_of
from outpace.server.metrics import Metrics
from outpace.server.options import ServerOptions
from outpace.server.timers import LoopClock, Timer
from outpace.tools.definitions import CallFormat, call_format_of, takes_tools
from outpace.tools.reasoning import has_thoughts

T = TypeVar("T")
PROMPTLY = 0.25  # seconds in which an engine that is well takes a request in
PREPARERS = 2  # threads that tokenise, render templates and compile grammars


class Service:
    """One model that is served. Everything but the engine's thread belongs to one event loop."""

    def __init__(self, llm: LLM, options: ServerOptions, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: the system's clock."""
        self.clock = LoopClock(now)
        self.llm, self.options, self.limits = llm, options, options.limits
        self.names = options.names or (llm.target.name,)
        self.created = int(time.time())
        self.fingerprint = fingerprint.of(llm)
        self.max_model_len: int = llm.target.model.max_positions
        self.admission = Admission(self.limits, llm.engine.options.batch, self.clock.time)
        self.thread = EngineThread(llm.engine, self._post, logs.fault, self.clock.time)
        readings: dict[str, Callable[[], float]] = {
            "num_requests_running": lambda: self.admission.running,
            "num_requests_waiting": lambda: self.admission.waiting,
            "engine_step_age_seconds": lambda: self.thread.step_age,
            "kv_cache_usage_perc": lambda: llm.engine.memory.used / max(llm.engine.memory.budget, 1),
        }
        grammars = llm.grammars
        self.metrics = Metrics(options.metrics_prefix, readings, lambda: (grammars.compiled, grammars.seconds))
        self.is_draining = False
        self._executor = ThreadPoolExecutor(PREPARERS, "prepare")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._groups: dict[Any, Group] = {}  # by choice
        self._timers: dict[Group, list[Timer]] = {}

    def begin(self) -> None:
        """Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.clock.begin(self._loop)
        self.thread.start()

    def end(self) -> None:
        """Ends the engine's thread, and with it all answers."""
        self.is_draining = True
        self.thread.stop(10.0)
        self.clock.end()
        self._executor.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the model's chat template tells it of tools."""
        return takes_tools(self.llm.tokenizer)

    @cached_property
    def family(self) -> CallFormat:
        """How the model writes a call of a tool."""
        return call_format_of(self.llm.tokenizer)

    @cached_property
    def has_thoughts(self) -> bool:
        """Whether the model thinks before it answers."""
        return has_thoughts(self.llm.tokenizer)

    @property
    def is_stuck(self) -> bool:
        """Whether work is pending and no step ends."""
        return self.thread.step_age > self.limits.stuck

    def check_ready(self) -> None:
        """ApiError where no request can be taken."""
        if self.is_draining:
            raise unavailable("the server is shutting down and takes no more requests", "draining")
        if self.is_stuck:
            raise unavailable(f"the engine is stuck for {self.thread.step_age:.0f} seconds", "stuck")

    def check_room(self) -> None:
        """ApiError 429 where the queue is full: told before the body is read."""
        with self._counting():
            self.admission.check()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Refusals, for the metrics."""
        try:
            yield
        except ApiError as error:
            if error.status == 429:
                self.metrics.rejected(error.code or "")
            raise

    async def apart(self, call: Callable[..., T], *arguments: Any) -> T:
        """What a call gives that takes long, in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def start(
        self, job_of: Callable[..., Job], body: Any, key: str, place: Place | None = None
    ) -> tuple[Job, Group]:
        """Takes a request in, into the `place` that it has: it is admitted, and each of its choices can run. ApiError
        or UserError where not."""
        self.check_ready()
        with self._counting():
            place = place or self.admission.place()
            try:
                job, choices = await self.apart(self._prepared, job_of, body, key)
                group = Group(choices, job.prompts, key, job.thoughts)
                self.admission.admit(group)
            finally:
                place.leave()
        self._groups.update(dict.fromkeys(choices, group))
        self._set_timers(group)
        submitted = asyncio.wrap_future(self.thread.submit(choices))
        submitted.add_done_callback(lambda done: self._taken(group, done))
        await asyncio.wait([submitted], timeout=PROMPTLY)  # what is wrong is best told before the headers
        if group.failure is not None:
            self.leave(group)
            raise group.failure
        return job, group

    def _prepared(self, job_of: Callable[..., Job], body: Any, key: str) -> tuple[Job, list[Choice]]:
        """In an executor's thread."""
        job = job_of(body, self)
        return job, list(choices_of(job, self.llm, key))

    @staticmethod
    def _taken(group: Group, done: asyncio.Future[None]) -> None:
        """The engine has taken a request in, or refused it."""
        error = None if done.cancelled() else done.exception()
        if isinstance(error, Exception):
            group.fail(error)

    def leave(self, group: Group) -> None:
        """A request is over for its client: what still runs of it is ended."""
        if not group.has_ended:
            self.thread.abort(group.choices)
        for timer in self._timers.pop(group, ()):
            timer.cancel()
        for choice in group.choices:
            self._groups.pop(choice, None)
        if group in self.admission.groups:
            self.admission.leave(group)
            self.metrics.finished(group)

    def end_all(self, error: ApiError) -> None:
        """Ends all requests with an error: the server goes."""
        for group in list(self.admission.groups):
            group.fail(error)

    def _set_timers(self, group: Group) -> None:
        limits = self.limits
        late = ApiError(504, f"the answer took more than {limits.request_timeout:g} seconds", code="timeout")

        def look_at_queue() -> None:
            if error := self.admission.waited(group):
                self.metrics.rejected(error.code or "")
                group.fail(error)

        self._timers[group] = [
            self.clock.after(limits.request_timeout, lambda: group.fail(late)),
            self.clock.after(limits.queue_timeout, look_at_queue),
        ]

    def _post(self, updates: Sequence[Update]) -> None:
        """In the engine's thread: hands a step's news to the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[Update]) -> None:
        tokens = sum(len(update.delta.tokens) for update in updates if update.delta)
        self.metrics.add("generation_tokens", tokens)
        for choice, delta, ended in updates:
            group = self._groups.get(choice)
            self.metrics.wrote(choice, delta, ended)
            choice.add(delta, ended)
            if group is not None:
                group.wake()
        self.admission.wrote(tokens)
