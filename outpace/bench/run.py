"""Measures: every prompt by every contender in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench import contenders as names
from outpace.bench import method_runner
from outpace.bench.apart import Apart
from outpace.bench.contenders import Contender
from outpace.bench.figures import ALL, TableRow, table_rows
from outpace.bench.peer import Answered, Peer, PeerSettings
from outpace.bench.store import Key, Record, Store
from outpace.bench.tasks import BUILT_IN, TaskPrompt, bare_length, check_turns, collect, prompt_of
from outpace.core.errors import UserError, check_whole

WARM_TOKENS = 12  # of the prompt, and of the answer
WARM_SECONDS = 30.0  # that a drafter in a process may take until it is there
REST = 0.05  # seconds between two contenders: threads of the one before go to sleep

Progress = Callable[[str, int, int], None]
"""Told what is measured now, and how many of how many answers are there."""


@dataclass(frozen=True)
class BenchOptions:
    """`prompts` of each task, and of conversations so many `turns`; `rounds` of everything; `batch`: how many prompts
    at once, 1 is measured always.

    `inflate` and `target` are told, not done here: how the target was loaded, what the user named (None: shipped)."""

    tasks: tuple[str, ...] = (BUILT_IN,)
    methods: tuple[Contender, ...] = ()
    peers: tuple[Contender, ...] = ()
    prompts: int = 10
    turns: int = 1
    rounds: int = 1
    batch: tuple[int, ...] = (1,)
    inflate: int = 1
    target: str | None = None
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))

    def __post_init__(self) -> None:
        check_whole("prompts", self.prompts, 1)
        check_whole("turns", self.turns, 1, 1000)
        check_whole("rounds", self.rounds, 1, 1000)
        check_whole("inflate", self.inflate, 1, 64)
        for count in self.batch:
            check_whole("batch", count, 1, 1024)
        if self.peers and not self.sampling_params.sampling.is_greedy:
            raise UserError("peers are measured greedily only, leave out --temperature or --peers")
        if self.peers and self.inflate > 1:
            raise UserError("an inflated target is ours alone, leave out --peers or --inflate")

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (*self.methods, *self.peers)

    def settings(self, llm: LLM) -> dict[str, Any]:
        """What must be the same for a bench to go on in a folder."""
        drawn = {name: asdict(self.sampling_params)[name] for name in ("max_tokens", "temperature", "seed")}
        draft = llm.draft.name if llm.draft else None
        kind = {"precision": llm.target.precision, "inflate": self.inflate, "threads": torch.get_num_threads()}
        return {"target": llm.target.name, "draft": draft, **kind, **drawn}


class Bench:
    """One run. `rows` may be asked for at any time: it tells what is finished."""

    def __init__(self, models: LLM, options: BenchOptions, store: Store, say: Callable[[str], None]) -> None:
        """`models` has them loaded. UserError for a wrong option or a torn file, before anything is measured."""
        self.models, self.options, self.store, self._say = models, options, store, say
        self.asked = collect(options.tasks, options.prompts, options.turns)
        check_batches(options, self.asked)
        check_turns(self.asked, models.tokenizer)
        self._prompts: dict[TaskPrompt, tuple[int, ...]] = {}
        self._check_lengths()
        self._running: dict[str, Peer] = {}
        self._parts = ExitStack()
        most = max(options.batch, default=1)
        with ExitStack() as parts:  # a wrong option of a later method must not leave an earlier one's worker behind
            for contender in options.methods:
                opened = parts.enter_context(
                    closing(method_runner.MethodRunner(contender, models, options.sampling_params, most))
                )
                self._running[contender.label] = opened
            self._parts = parts.pop_all()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.close()

    @property
    def order(self) -> list[str]:
        """The contenders' labels, as asked for."""
        return [contender.label for contender in self.options.contenders]

    def table_rows(self) -> list[TableRow]:
        """What is finished so far, of this run's prompts and contenders and of any that lay in the folder."""
        return table_rows(self.store.records.values(), self.order)

    @property
    def failure(self) -> str | None:
        """Why there is not one finished answer; None where there is one."""
        failures = [record.failed for record in self.store.records.values()]
        return failures[0] if failures and None not in failures else None

    def measure(self, progress: Progress) -> None:
        """Whatever is not there yet."""
        alone = list(self._alone())
        groups = list(self._groups())
        left = [job for job in (*alone, *groups) if not self.store.has(job[0])]
        self._open_peers({key.label for key, _, _ in left})
        left = [job for job in left if job[0].label in self._running]
        self._warm_up(list(dict.fromkeys(key.label for key, _, _ in left)))
        for done, (key, contender, asked) in enumerate(left):
            progress(f"{key.task} {key.prompt}: {key.label}", done, len(left))
            time.sleep(REST)
            self.store.add(self._record(key, contender, asked))
        progress("done", len(left), len(left))

    def prompt(self, asked: TaskPrompt) -> tuple[int, ...]:
        """Its tokens: of a later turn behind what plain decoding answered in the first round, where it was measured.
        UserError where that failed, or is not there yet."""
        if asked not in self._prompts:
            self._prompts[asked] = prompt_of(asked, self.models.tokenizer, self._said)
        return self._prompts[asked]

    def _said(self, asked: TaskPrompt, turn: int) -> Sequence[int]:
        known = self.store.records.get(Key(names.PLAIN, asked.task_of(turn), asked.name, 0, 1))
        if known is None or known.failed is not None:
            raise UserError(f"turn {turn + 1} was not answered: {known.failed if known else 'it is not measured'}")
        return known.tokens

    def _alone(self) -> Iterator[tuple[Key, Contender, Sequence[TaskPrompt]]]:
        """One prompt at a time; who comes first moves on from prompt to prompt."""
        for number in range(self.options.rounds):
            for place, asked in enumerate(self.asked):
                turns = rotated(self.options.contenders, place + number)
                for contender in sorted(turns, key=lambda one: one.guess > 0):  # they are told of the others' answer
                    yield Key(contender.label, asked.task, asked.name, number, 1), contender, [asked]

    def _groups(self) -> Iterator[tuple[Key, Contender, Sequence[TaskPrompt]]]:
        """Several prompts at once, by our own methods."""
        for count in (count for count in self.options.batch if count > 1):
            starts = range(0, len(self.asked) - count + 1, count)
            for number in range(self.options.rounds):
                for place, start in enumerate(starts):
                    group = self.asked[start : start + count]
                    for contender in rotated(self.options.methods, place + number):
                        yield Key(contender.label, ALL, f"group {place}", number, count), contender, group

    def _record(self, key: Key, contender: Contender, asked: Sequence[TaskPrompt]) -> Record:
        engine = self._running[key.label]
        known = Record(*key, is_peer=contender.is_peer, precision=engine.precision)
        try:
            return self._measured(known, engine, contender, asked)
        except Exception as error:  # of one answer: the others are worth having
            return replace(known, failed=f"{type(error).__name__}: {error}"[:300])

    def _measured(self, known: Record, engine: Peer, contender: Contender, asked: Sequence[TaskPrompt]) -> Record:
        most = self.options.sampling_params.max_tokens
        prompts = [self.prompt(one) for one in asked]
        if known.batch > 1 and isinstance(engine, method_runner.MethodRunner):
            texts, seconds = engine.together(prompts, most)
            held = tuple((one.task, one.name) for one in asked)
            return replace(known, seconds=seconds, prompts=held, texts=tuple(texts))
        if contender.guess and isinstance(engine, method_runner.MethodRunner):
            prediction = contender.prediction(self._said(asked[0], len(asked[0].before)))
            return replace(known, **answered(engine.answer(prompts[0], most, prediction)))
        return replace(known, **answered(engine.answer(prompts[0], most)))

    def _open_peers(self, needed: set[str]) -> None:
        """Those that are installed; the others are named, with how to install them."""
        settings = self._peer_settings()
        for contender in self.options.peers:
            if contender.label not in needed:
                continue
            try:
                peer = Apart(contender.name, settings)
            except UserError as error:
                self._say(f"{contender.label} is left out: {error}")
            except Exception as error:  # another project's engine may fail in any way
                self._say(f"{contender.label} is left out, it failed to start ({type(error).__name__}: {error})")
            else:
                self._running[contender.label] = self._parts.enter_context(closing(peer))

    def _peer_settings(self) -> PeerSettings:
        most, draft = self.options.sampling_params.max_tokens, self.models.draft
        room = 2 * most  # for an answer whose text may be cut into more tokens than were written
        longest = max(bare_length(one, self.models.tokenizer) + room * len(one.before) for one in self.asked)
        files = draft.files() if draft is not None and draft.files is not None else None
        return PeerSettings(
            target=self.options.target,
            draft=files or (draft.name if draft is not None else None),
            stop_ids=frozenset(self.models.tokenizer.stop_ids),
            threads=torch.get_num_threads(),
            max_context=longest + most + 1,
        )

    def _warm_up(self, labels: Sequence[str]) -> None:
        """A short answer by each, whose time nobody sees; a UserError of our own method is the user's to mend."""
        if not labels:
            return
        prompt = self.prompt(self.asked[0])[:WARM_TOKENS]
        for contender in self.options.contenders:
            engine = self._running.get(contender.label)
            if engine is None or contender.label not in labels:
                continue
            try:
                self._warm(engine, prompt, contender.options.get("worker") == "process")
            except UserError:
                if not contender.is_peer:
                    raise
            except Exception as error:  # it will be said again, as the reason of its failed answers
                self._say(f"{contender.label} failed to warm up ({type(error).__name__}: {error})")

    def _warm(self, engine: Peer, prompt: Sequence[int], in_process: bool) -> None:
        """Twice; a drafter in a process is waited for until it has offered something."""
        engine.answer(prompt, WARM_TOKENS)
        until = time.monotonic() + (WARM_SECONDS if in_process else 0.0)
        while not engine.answer(prompt, WARM_TOKENS).drafted and time.monotonic() < until:
            time.sleep(0.1)

    def _check_lengths(self) -> None:
        """A prompt that does not fit fails by itself; with none that fits there is nothing to measure."""
        context = self.models.target.model.max_positions
        shortest = min(len(self.prompt(asked)) for asked in self.asked if not asked.before)
        if shortest >= context:
            said = f"the shortest has {shortest} tokens, the target's context holds {context}"
            raise UserError(f"every prompt is too long: {said}")


def check_batches(options: BenchOptions, asked: Sequence[TaskPrompt]) -> None:
    """UserError where more prompts are to be answered at once than there are."""
    for count in options.batch:
        if count > len(asked):
            have = f"there are {len(asked)} prompts in all"
            raise UserError(f"batch is {count}, {have}: raise --prompts or name more --tasks")


def rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    """The same in the same order, another one first."""
    by %= max(len(contenders), 1)
    return [*contenders[by:], *contenders[:by]]


def answered(answer: Answered) -> dict[str, Any]:
    """An answer's fields under the names that a Record has."""
    if not answer.tokens:
        raise ValueError("it wrote nothing, not even a stop token")
    return {name: value for name, value in vars(answer).items() if name in Record.__dataclass_fields__}


def with_gaps(found: Sequence[TableRow], bench: Bench) -> list[TableRow]:
    """The rows with the target's own judgement of each first divergence, where both texts have a token there."""
    prompts = {(asked.task, asked.name): asked for asked in bench.asked}
    made = []
    for row in found:
        left = row.divergence
        if left and left.plain_token is not None and left.token is not None and (left.task, left.prompt) in prompts:
            plain = bench.store.records.get(Key(names.PLAIN, left.task, left.prompt, 0, 1))
            before = plain.tokens[: left.position] if plain else ()
            text = [*bench.prompt(prompts[left.task, left.prompt]), *before]
            gap = method_runner.score_gap(bench.models.target.model, text, (left.plain_token, left.token))
            row = replace(row, divergence=replace(left, score_gap=round(gap, 5)))
        made.append(row)
    return made
