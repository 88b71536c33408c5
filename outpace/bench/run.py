"""Measures a bench: all contenders answer each prompt in alternation, so that disturbances affect all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.contenders import PLAIN, Contender
from outpace.bench.figures import ALL, TableRow, table_rows
from outpace.bench.method_runner import MethodRunner, PeakMemory, peak_memory
from outpace.bench.peer import Peer, PeerProcess, PeerSettings
from outpace.bench.store import Record, RecordKey, Store
from outpace.bench.tasks import BUILT_IN, TaskPrompt, check_turns, collect, prompt_of
from outpace.core.arrays import num_threads
from outpace.core.errors import UserError, check_whole
from outpace.core.options import CheckedOptions, whole
from outpace.rules.judge import JudgeFile

T = TypeVar("T")

WARM_TOKENS = 12  # of the prompt and of the answer
WARM_SECONDS = 30.0  # longest wait for a drafter in a process to start
REST = 0.05  # seconds between two contenders, in which the threads of the one before go to sleep

Job = tuple[RecordKey, Contender, Sequence[TaskPrompt]]
Progress = Callable[[str, int, int], None]
"""Receives what is being measured, the finished answers, and all answers."""


@dataclass(frozen=True)
class BenchOptions(CheckedOptions):
    """What a bench measures: `prompts` per task, `turns` per conversation, `rounds` repetitions, and batch sizes.

    Batch size 1 is always measured. `target` only records what the user named (None: the shipped model).
    """

    tasks: tuple[str, ...] = (BUILT_IN,)
    methods: tuple[Contender, ...] = ()
    peers: tuple[Contender, ...] = ()
    prompts: int = whole(10, 1)
    turns: int = whole(1, 1, 1000)
    rounds: int = whole(1, 1, 1000)
    batch: tuple[int, ...] = (1,)
    target: str | None = None
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))

    def __post_init__(self) -> None:
        super().__post_init__()
        for count in self.batch:
            check_whole("batch", count, 1, 1024)
        if self.peers and not self.sampling_params.sampling.is_greedy:
            raise UserError("peers are measured greedily only, leave out --temperature or --peers")

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (*self.methods, *self.peers)

    def settings(self, llm: LLM) -> dict[str, Any]:
        """Return the settings that must agree for a bench to continue in an existing folder."""
        params = {name: asdict(self.sampling_params)[name] for name in ("max_tokens", "temperature", "seed")}
        draft = llm.draft.name if llm.draft else None
        setup = {"precision": llm.target.precision, "threads": num_threads()}
        return {"target": llm.target.name, "draft": draft, **setup, **params}


class Bench:
    """A bench over loaded models; `rows` may be called at any time and covers the finished answers."""

    def __init__(self, models: LLM, options: BenchOptions, store: Store, say: Callable[[str], None]) -> None:
        """Check the options and prompts and open the methods. UserError for a wrong option or a torn file."""
        self.models, self.options, self.store, self._say = models, options, store, say
        self.prompts = collect(options.tasks, options.prompts, options.turns)
        self.by_name = {(prompt.task, prompt.name): prompt for prompt in self.prompts}
        check_batches(options, self.prompts)
        check_turns(self.prompts, models.tokenizer)
        self._memory: dict[str, PeakMemory] = {}  # by label
        self._encoded: dict[TaskPrompt, tuple[int, ...]] = {}
        self._check_lengths()
        self._engines: dict[str, Peer] = {}
        with ExitStack() as exits:  # a wrong option of a later method must not leave an earlier one's worker running
            for contender in options.methods:
                engine = MethodRunner(contender, models, options.sampling_params, max(options.batch, default=1))
                self._engines[contender.label] = exits.enter_context(closing(engine))
                self._warn_of_other_tasks(contender)
            self._exits = exits.pop_all()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def rows(self) -> list[TableRow]:
        """Return the rows of all finished answers, including those found in the folder."""
        rows = table_rows(self.store.records.values(), [contender.label for contender in self.options.contenders])
        return [replace(row, peak_memory=self._memory.get(row.label)) for row in rows]

    @property
    def failure(self) -> str | None:
        """The first failure's reason if every answer failed, else None."""
        failures = [record.failed for record in self.store.records.values()]
        return failures[0] if failures and None not in failures else None

    def measure(self, progress: Progress) -> None:
        """Measure all answers that are not stored yet."""
        jobs = [job for job in (*self._single_jobs(), *self._batch_jobs()) if job[0] not in self.store.records]
        self._open_peers({key.label for key, _, _ in jobs})
        jobs = [job for job in jobs if job[0].label in self._engines]
        self._warm_up({key.label for key, _, _ in jobs})
        for done, (key, contender, prompts) in enumerate(jobs):
            progress(f"{key.task} {key.prompt}: {key.label}", done, len(jobs))
            time.sleep(REST)
            self.store.add(self._record(key, contender, prompts))
        progress("done", len(jobs), len(jobs))

    def measure_memory(self, progress: Progress) -> None:
        """Measure the peak memory of outpace's own methods, each in a new process."""
        for done, contender in enumerate(self.options.methods):
            progress(f"memory of {contender.label}", done, len(self.options.methods))
            params, prompt = self.options.sampling_params, self.encode(self.prompts[0])
            try:
                self._memory[contender.label] = peak_memory(self.models, contender, params, prompt)
            except Exception as error:  # the speeds are measured already
                self._say(f"the memory of {contender.label} was not measured ({type(error).__name__}: {error})")

    def encode(self, prompt: TaskPrompt) -> tuple[int, ...]:
        """Return a prompt's token ids; earlier turns have plain decoding's answers of the first repetition.

        UserError if such an answer failed or is missing.
        """
        if prompt not in self._encoded:
            self._encoded[prompt] = prompt_of(prompt, self.models.tokenizer, self._plain_answer)
        return self._encoded[prompt]

    def _plain_answer(self, prompt: TaskPrompt) -> Sequence[int]:
        known = self.store.records.get(RecordKey(PLAIN, prompt.task, prompt.name, 0, 1))
        if known is None or known.failed is not None:
            reason = known.failed if known else "it is not measured"
            raise UserError(f"turn {len(prompt.before) + 1} was not answered: {reason}")
        return known.tokens

    def _single_jobs(self) -> Iterator[Job]:
        """Yield one prompt at a time; the contender that comes first changes from prompt to prompt."""
        for number in range(self.options.rounds):
            for place, prompt in enumerate(self.prompts):
                order = rotated(self.options.contenders, place + number)
                for contender in sorted(order, key=lambda one: one.guess > 0):  # predictions need the plain answer
                    yield RecordKey(contender.label, prompt.task, prompt.name, number, 1), contender, [prompt]

    def _batch_jobs(self) -> Iterator[Job]:
        """Yield batches of prompts, for outpace's own methods."""
        for count in (count for count in self.options.batch if count > 1):
            starts = range(0, len(self.prompts) - count + 1, count)
            for number in range(self.options.rounds):
                for place, start in enumerate(starts):
                    group = self.prompts[start : start + count]
                    for contender in rotated(self.options.methods, place + number):
                        yield RecordKey(contender.label, ALL, f"group {place}", number, count), contender, group

    def _record(self, key: RecordKey, contender: Contender, prompts: Sequence[TaskPrompt]) -> Record:
        """Measure an answer or a batch of answers, and return its record."""
        engine, max_tokens = self._engines[key.label], self.options.sampling_params.max_tokens
        record = Record(**key._asdict(), is_peer=contender.is_peer, precision=engine.precision)
        try:
            encoded = [self.encode(prompt) for prompt in prompts]
            if key.batch > 1 and isinstance(engine, MethodRunner):
                texts, seconds = engine.answer_batch(encoded, max_tokens)
                names = tuple((prompt.task, prompt.name) for prompt in prompts)
                return replace(record, seconds=seconds, prompts=names, texts=tuple(texts))
            if contender.guess and isinstance(engine, MethodRunner):
                prediction = contender.prediction(self._plain_answer(prompts[0]))
                answer = engine.answer(encoded[0], max_tokens, prediction)
            else:
                answer = engine.answer(encoded[0], max_tokens)
            if not answer.tokens:
                raise ValueError("it wrote nothing, not even a stop token")
            return replace(record, **vars(answer))
        except Exception as error:  # one failed answer must not end the bench
            return replace(record, failed=f"{type(error).__name__}: {error}"[:300])

    def _open_peers(self, labels: set[str]) -> None:
        """Start the installed peers; say which are left out, and how to install them."""
        settings = self._peer_settings()
        for contender in (peer for peer in self.options.peers if peer.label in labels):
            try:
                peer = PeerProcess(contender.name, settings)
            except UserError as error:
                self._say(f"{contender.label} is left out: {error}")
            except Exception as error:  # another project's engine may fail in any way
                self._say(f"{contender.label} is left out, it failed to start ({type(error).__name__}: {error})")
            else:
                self._engines[contender.label] = self._exits.enter_context(closing(peer))

    def _peer_settings(self) -> PeerSettings:
        max_tokens, draft = self.options.sampling_params.max_tokens, self.models.draft
        per_turn = 2 * max_tokens  # an answer's text may be tokenized into more tokens than were written
        longest = max(
            len(prompt_of(prompt, self.models.tokenizer, lambda _: ())) + per_turn * len(prompt.before)
            for prompt in self.prompts
        )
        files = draft.files() if draft is not None and draft.files is not None else None
        return PeerSettings(
            target=self.options.target,
            draft=files or (draft.name if draft is not None else None),
            stop_ids=frozenset(self.models.tokenizer.stop_ids),
            threads=num_threads(),
            max_context=longest + max_tokens + 1,
        )

    def _warm_up(self, labels: set[str]) -> None:
        """Let each contender write short untimed answers; a UserError of an own method ends the bench."""
        prompt = self.encode(self.prompts[0])[:WARM_TOKENS]
        for contender in (one for one in self.options.contenders if one.label in labels):
            engine = self._engines[contender.label]
            try:
                engine.answer(prompt, WARM_TOKENS)
                # a drafter in a process needs time to start
                until = time.monotonic() + (WARM_SECONDS if contender.options.get("worker") == "process" else 0.0)
                while not engine.answer(prompt, WARM_TOKENS).drafted and time.monotonic() < until:
                    time.sleep(0.1)
            except UserError:
                if not contender.is_peer:
                    raise
            except Exception as error:  # the failed answers will report it again
                self._say(f"{contender.label} failed to warm up ({type(error).__name__}: {error})")

    def _warn_of_other_tasks(self, contender: Contender) -> None:
        """Warn if a contender's judge was mined on tasks other than those measured."""
        if contender.options.get("rule") != "judge":
            return
        mined = JudgeFile.read(Path(str(contender.options["judge"]))).tasks
        if others := sorted({prompt.task for prompt in self.prompts} - {*mined}):
            self._say(
                f"{contender.label}: this judge was mined on {', '.join(sorted(mined))}, not on {', '.join(others)};"
                " speed and right answers on one task say little about others"
            )

    def _check_lengths(self) -> None:
        """Raise UserError if no prompt fits the context; a single prompt that is too long only fails itself."""
        context = self.models.target.model.max_positions
        shortest = min(len(self.encode(prompt)) for prompt in self.prompts if not prompt.before)
        if shortest >= context:
            raise UserError(
                f"every prompt is too long: {shortest} tokens or more, the target's context holds {context}"
            )


def check_batches(options: BenchOptions, prompts: Sequence[TaskPrompt]) -> None:
    """Raise UserError for a batch with more prompts than there are."""
    for count in options.batch:
        if count > len(prompts):
            available = f"there are {len(prompts)} prompts in all"
            raise UserError(f"batch is {count}, {available}: raise --prompts or name more --tasks")


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Rotate a sequence to the left."""
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]
