"""Records, generates, saves and loads traces: a target's answers, and the draft's proposals at every position.

A trace is recorded once and replayed for any method, ratio of times and width (`outpace simulate`), without the models.
The draft is teacher-forced: it reads the target's own text, which is exact for chains at temperature 0. For sampled
texts the rows are the values by which the drafter ranks tokens: log q plus the noise shared with the target.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.types import LogprobsOptions, Request, Row
from outpace.decoders.autoregressive import Autoregressive
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, check_decoder_only, read_text
from outpace.models.files.cache import new_file
from outpace.models.load import Loaded
from outpace.rules.base import top_k_rows
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

FORMAT, VERSION = "outpace-trace", "1"
_TYPES = {
    "prompt_tokens": np.int32,
    "prompt_starts": np.int64,  # [answers + 1]
    "tokens": np.int32,
    "starts": np.int64,  # [answers + 1]
    "target_logprobs": np.float32,
    "draft_tokens": np.int32,  # [all tokens, ranks]
    "draft_logprobs": np.float32,
}
_ROWS = ("target_logprobs", "draft_tokens", "draft_logprobs")
_BATCH = 8  # answers that the target writes at once

Progress = Callable[[int, int], None]
"""Receives the number of recorded answers and of all answers."""


@dataclass(frozen=True)
class TracedAnswer:
    """One answer with the draft's most likely tokens at each position, given the true text before it, best first.

    `draft_tokens` and `draft_logprobs` are [tokens, ranks]; natural logarithms, plus noise if the text was sampled;
    -inf where the draft has no more tokens.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    target_logprobs: np.ndarray  # [tokens]
    draft_tokens: np.ndarray
    draft_logprobs: np.ndarray
    task: str = ""


@dataclass(frozen=True)
class Trace:
    """All answers of one pair of models, at one temperature."""

    target: str
    draft: str
    vocab_size: int
    answers: tuple[TracedAnswer, ...]
    temperature: float = 0.0

    @property
    def ranks(self) -> int:
        """Number of draft tokens recorded at each position."""
        return int(self.answers[0].draft_tokens.shape[1])

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    def acceptance(self, rank: int = 1) -> float:
        """Return how often the target's token is among the draft's `rank` most likely ones."""
        found = [(a.draft_tokens[:, :rank] == np.array(a.tokens)[:, None]).any(1) for a in self.answers]
        return float(np.concatenate(found).mean())

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        from safetensors.numpy import save_file

        about = {"format": FORMAT, "version": VERSION, "target": self.target, "draft": self.draft}
        about |= {"ranks": str(self.ranks), "vocab_size": str(self.vocab_size)}
        about["temperature"] = repr(self.temperature)
        about["tasks"] = json.dumps([answer.task for answer in self.answers])
        with new_file(path) as part:
            save_file(_tensors(self.answers), part, metadata=about)


@dataclass(frozen=True)
class RecordOptions:
    """Options of a recording: answers of `max_tokens`, with `ranks` draft tokens at each position.

    `sampling` must not have filters.
    """

    max_tokens: int = 128
    ranks: int = 32
    sampling: Sampling = GREEDY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling.filters:
            raise UserError("a trace is recorded without top-k, top-p and min-p, leave them out")
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("ranks", self.ranks, 1, 1024)


def record(
    target: Loaded,
    draft: Loaded,
    prompts: Sequence[Sequence[int]],
    options: RecordOptions,
    *,
    tasks: Sequence[str] = (),
    progress: Progress = lambda done, all: None,
) -> Trace:
    """Let the target answer the prompts (token ids) by plain decoding, and the draft read each answer.

    `tasks` has each prompt's task. UserError if a text does not fit the draft's context, or without prompts.
    """
    if not prompts:
        raise UserError("there are no prompts, at least one is needed for a trace")
    check_decoder_only(target.model, target.name, "a trace")
    stops = frozenset(target.tokenizer.stop_ids)
    # sampled texts have noise that target and draft share
    rule = Greedy() if options.sampling.is_greedy else Gumbel()
    arguments = (rule, options.max_tokens, options.sampling, options.seed)
    requests = [Request(tuple(prompt), *arguments, stop_ids=stops, logprobs=LogprobsOptions()) for prompt in prompts]
    answers = []
    for number, (request, run) in enumerate(zip(requests, _write(target, requests), strict=True)):
        logprobs = np.array([record.logprob for record in run.history.logprobs], np.float32)
        rows = _draft_rows(draft.model, request, run.tokens, options.ranks)
        task = tasks[number] if tasks else ""
        answers.append(TracedAnswer(request.prompt, tuple(run.tokens), logprobs, *rows, task))
        progress(number + 1, len(prompts))
    temperature = options.sampling.temperature
    return Trace(_name(target), _name(draft), int(target.model.vocab_size), tuple(answers), temperature)


def _write(target: Loaded, requests: Sequence[Request]) -> list[TokenSequence]:
    """Answer all requests by plain decoding."""
    with Engine(target.model, options=EngineOptions(nodes=1, batch=_BATCH, reuse=False)) as engine:
        runs = [engine.submit(request, Autoregressive, Autoregressive.Options()) for request in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs


def _name(loaded: Loaded) -> str:
    """Return the model's name without folders of the recording machine."""
    return Path(loaded.name).name if Path(loaded.name).is_absolute() else loaded.name


def _draft_rows(model: Model, request: Request, written: Sequence[int], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the draft's best tokens by the rule's rank, and their values, at each position: [tokens, ranks]."""
    text, start = (*request.prompt, *written), len(request.prompt)
    if len(text) > model.max_positions:
        raise UserError(f"a text of {len(text)} tokens does not fit the draft's context of {model.max_positions}")
    ranks = min(ranks, model.vocab_size)
    known = [min(token, model.vocab_size - 1) for token in text[:-1]]
    tokens, values = np.zeros((len(written), ranks), np.int32), np.full((len(written), ranks), -np.inf, np.float32)
    for first, held in read_text(model, known, start - 1):
        rows = [Row(request, text[: place + 1]) for place in range(first, first + len(held.values))]
        for place, (best, ranked) in enumerate(top_k_rows(held, rows, ranks), first + 1 - start):
            tokens[place, : len(best)], values[place, : len(best)] = best, ranked
    return tokens, values


def load(path: Path | str) -> Trace:
    """Read a trace; UserError for another file, a torn one, or one with invalid content."""
    from safetensors import safe_open

    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            names, about = file.keys(), file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise UserError(f"{path} cannot be read as a trace: {error!s:.200}") from error
    if about.get("format") != FORMAT:
        raise UserError(f"{path} is not a trace, `outpace bench --trace FILE` writes one")
    if about.get("version") != VERSION:
        raise UserError(f"{path} is a trace of version {about.get('version')}, this outpace reads version {VERSION}")
    try:
        vocab_size, tasks = int(about["vocab_size"]), json.loads(about["tasks"])
        target, draft, temperature = about["target"], about["draft"], float(about.get("temperature", 0.0))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged: its manifest lacks {error!s:.80}") from error
    problem = _problem(arrays, vocab_size, tasks)
    if problem:
        raise UserError(f"{path} is damaged: {problem}")
    return Trace(target, draft, vocab_size, tuple(_cut(arrays, tasks)), temperature)


def _problem(arrays: Mapping[str, np.ndarray], vocab_size: int, tasks: Any) -> str | None:
    """Return what is wrong with a file's tensors, or None."""
    for name, kind in _TYPES.items():
        dims = 2 if name.startswith("draft") else 1
        if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != dims:
            return f"{name} is missing or of another type"
    answers, tokens = len(arrays["starts"]) - 1, len(arrays["tokens"])
    for starts, cut in (("prompt_starts", "prompt_tokens"), ("starts", "tokens")):
        bounds = arrays[starts]
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(arrays[cut]) or (np.diff(bounds) < 1).any():
            return f"{starts} does not cut the {len(arrays[cut])} {cut}"
    if answers != len(arrays["prompt_starts"]) - 1:
        return "it holds more answers than prompts, or fewer"
    if not isinstance(tasks, list) or len(tasks) != answers or not all(isinstance(task, str) for task in tasks):
        return f"it does not name the tasks of {answers} answers"
    shape = arrays["draft_tokens"].shape
    lengths = {shape[0], len(arrays["target_logprobs"]), tokens}
    if len(lengths) > 1 or not shape[1] or shape != arrays["draft_logprobs"].shape:
        return f"{', '.join(_ROWS)} are not those of {tokens} tokens"
    for name in ("prompt_tokens", "tokens", "draft_tokens"):
        if arrays[name].min() < 0 or arrays[name].max() >= vocab_size:
            return f"{name} go beyond the vocabulary of {vocab_size}"
    rows = arrays["draft_logprobs"]
    if np.isnan(rows).any() or not np.isfinite(rows[:, 0]).all() or (rows[:, 1:] > rows[:, :-1]).any():
        return "draft_logprobs are not numbers that fall from rank to rank"
    return None


def _cut(arrays: Mapping[str, np.ndarray], tasks: Sequence[str]) -> list[TracedAnswer]:
    answers = []
    for number, task in enumerate(tasks):
        prompt_rows = slice(*arrays["prompt_starts"][number : number + 2])
        here = slice(*arrays["starts"][number : number + 2])
        prompt, tokens = arrays["prompt_tokens"][prompt_rows].tolist(), arrays["tokens"][here].tolist()
        logprobs, best, values = (arrays[name][here] for name in _ROWS)
        answers.append(TracedAnswer(tuple(prompt), tuple(tokens), logprobs, best, values, task))
    return answers


def _tensors(answers: Sequence[TracedAnswer]) -> dict[str, np.ndarray]:
    """Return the tensors of a file; the inverse of `_cut`."""
    parts = {
        "prompt_tokens": [np.array(answer.prompt) for answer in answers],
        "prompt_starts": [np.cumsum([0, *(len(answer.prompt) for answer in answers)])],
        "tokens": [np.array(answer.tokens) for answer in answers],
        "starts": [np.cumsum([0, *(len(answer.tokens) for answer in answers)])],
    }
    for name in _ROWS:
        parts[name] = [getattr(answer, name) for answer in answers]
    return {name: np.ascontiguousarray(np.concatenate(part).astype(_TYPES[name])) for name, part in parts.items()}


_RANKS = 16
_VOCAB = 64


def synthetic_trace(acceptance: float, answers: int = 8, tokens: int = 256, seed: int = 0) -> Trace:
    """Generate a trace with this acceptance rate, whose positions are alike and independent.

    The target's token is the draft's i-th with probability A (1 - A)^(i - 1), and the draft knows these probabilities.
    """
    check_range("acceptance", acceptance, 0.0, 1.0)
    check_whole("answers", answers, 1)
    check_whole("tokens", tokens, 1)
    generator = random.Random(seed)
    made = tuple(_synthetic_answer(generator, acceptance, tokens) for _ in range(answers))
    return Trace("stated", f"acceptance {acceptance:g}", _VOCAB, made)


def _synthetic_answer(generator: random.Random, acceptance: float, tokens: int) -> TracedAnswer:
    written, rows = [], []
    for _ in range(tokens):
        token, *others = generator.sample(range(_VOCAB), _RANKS + 1)
        rank = 0
        while rank < _RANKS and generator.random() >= acceptance:
            rank += 1
        written.append(token)
        rows.append([*others[:rank], token, *others[rank:]][:_RANKS])
    log_miss = math.log1p(-acceptance) if acceptance < 1 else -50.0
    log_hit = math.log(acceptance) if acceptance else 0.0
    falling = np.array([log_hit + rank * log_miss for rank in range(_RANKS)], dtype=np.float32)
    return TracedAnswer(
        prompt=(0,),
        tokens=tuple(written),
        target_logprobs=np.zeros(tokens, dtype=np.float32),
        draft_tokens=np.array(rows, dtype=np.int32),
        draft_logprobs=np.broadcast_to(falling, (tokens, _RANKS)).copy(),
        task="stated",
    )


def limit_trace(trace: Trace, answers: int | None, tasks: Sequence[str] = ()) -> Trace:
    """Keep these tasks' answers only (none: all tasks), and at most `answers` of them, evenly spread over the tasks."""
    chosen = [answer for answer in trace.answers if not tasks or answer.task in tasks]
    if not chosen:
        known = sorted({answer.task for answer in trace.answers})
        raise UserError(f"the trace has no answers of {', '.join(tasks)}, it has {', '.join(known)}")
    if answers is not None:
        chosen = [chosen[number] for number in spread([answer.task for answer in chosen], answers)]
    return replace(trace, answers=tuple(chosen))


def spread(tasks: Sequence[str], count: int) -> list[int]:
    """Return the indices of at most `count` answers with these tasks, evenly spread over each task's."""
    if count >= len(tasks):
        return list(range(len(tasks)))
    by_task = sorted(range(len(tasks)), key=lambda number: tasks[number])
    return sorted(by_task[number * len(tasks) // count] for number in range(count))
