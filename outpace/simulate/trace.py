"""The trace of a real pair: what a target wrote, and what a draft would have proposed at every place of it.

It is recorded once and then replayed for any method, ratio of times and width (`outpace simulate`), without the models.
The draft is teacher-forced: at every place it sees the target's own text. For chains at temperature 0 that is exact. Of
sampled texts the rows are what the rule's drafter ranks by: log q plus the noise that it shares with the target.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.types import LogprobsOptions, Request, Row
from outpace.decoders import Autoregressive
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, chain
from outpace.models.load import Loaded
from outpace.rules import greedy, gumbel

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
_CHUNK = 256  # tokens of a text a forward of the draft

Progress = Callable[[int, int], None]
"""Told how many of how many answers are recorded."""


@dataclass(frozen=True)
class TracedAnswer:
    """One answer. `draft_tokens` and `draft_logprobs` [tokens, ranks]: the draft's likeliest tokens for each place,
    best first, given the true text before it. Natural logarithms, plus noise where the text was sampled; -inf where
    the draft has no more tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    target_logprobs: np.ndarray  # [tokens]
    draft_tokens: np.ndarray
    draft_logprobs: np.ndarray
    task: str = ""


@dataclass(frozen=True)
class Trace:
    """All answers of one pair, at one temperature."""

    target: str
    draft: str
    vocab_size: int
    answers: tuple[TracedAnswer, ...]
    temperature: float = 0.0

    @property
    def ranks(self) -> int:
        """Tokens of the draft that are known at each place."""
        return int(self.answers[0].draft_tokens.shape[1])

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    def acceptance(self, rank: int = 1) -> float:
        """How often the target's token is among the draft's `rank` likeliest."""
        found = [(a.draft_tokens[:, :rank] == np.array(a.tokens)[:, None]).any(1) for a in self.answers]
        return float(np.concatenate(found).mean())

    def save(self, path: Path | str) -> None:
        """Writes one safetensors file, whole or not at all."""
        from safetensors.numpy import save_file

        path = Path(path)
        about = {"format": FORMAT, "version": VERSION, "target": self.target, "draft": self.draft}
        about |= {"ranks": str(self.ranks), "vocab_size": str(self.vocab_size)}
        about["temperature"] = repr(self.temperature)
        about["tasks"] = json.dumps([answer.task for answer in self.answers])
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(_tensors(self.answers), part, metadata=about)
            part.replace(path)
        except Exception as error:  # safetensors has an error class of its own
            part.unlink(missing_ok=True)
            raise UserError(f"the trace cannot be written to {path}: {error}") from error


@dataclass(frozen=True)
class RecordOptions:
    """`max_tokens` an answer; `ranks` of the draft's tokens at each place; `batch` answers at once; `sampling` without
    filters, and its `seed`."""

    max_tokens: int = 128
    ranks: int = 32
    batch: int = 8
    sampling: Sampling = GREEDY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling.filters:
            raise UserError("a trace is recorded without top-k, top-p and min-p, leave them out")
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("ranks", self.ranks, 1, 1024)
        check_whole("batch", self.batch, 1, 4096)


def record(
    target: Loaded,
    draft: Loaded,
    prompts: Sequence[Sequence[int]],
    options: RecordOptions | None = None,
    *,
    tasks: Sequence[str] = (),
    progress: Progress = lambda done, all: None,
) -> Trace:
    """The target answers the prompts (token ids) plainly, the draft then reads every answer in one go.

    `tasks` names each prompt's task. UserError where a text does not fit the draft's context, or nothing is asked.
    """
    options = options or RecordOptions()
    if not prompts:
        raise UserError("there are no prompts, at least one is needed for a trace")
    stops = frozenset(target.tokenizer.stop_ids)
    requests = [_request(prompt, options, stops) for prompt in prompts]
    written = _answers(target, requests, options.batch)
    answers = []
    for number, (request, (tokens, logprobs)) in enumerate(zip(requests, written, strict=True)):
        rows = _draft_rows(draft.model, request, tokens, options.ranks)
        task = tasks[number] if tasks else ""
        answers.append(TracedAnswer(request.prompt, tokens, np.array(logprobs, np.float32), *rows, task))
        progress(number + 1, len(prompts))
    temperature = options.sampling.temperature
    return Trace(_name(target), _name(draft), int(target.model.vocab_size), tuple(answers), temperature)


def _request(prompt: Sequence[int], options: RecordOptions, stops: frozenset[int]) -> Request:
    """Greedy, or sampled with the noise that target and draft share."""
    rule = greedy.build(greedy.Options()) if options.sampling.is_greedy else gumbel.build(gumbel.Options())
    asked = (tuple(prompt), rule, options.max_tokens, options.sampling, options.seed)
    return Request(*asked, stop_ids=stops, logprobs=LogprobsOptions())


def _answers(target: Loaded, requests: Sequence[Request], batch: int) -> list[tuple[tuple[int, ...], list[float]]]:
    """The target's tokens for every request, and their log-probabilities."""
    settings = EngineOptions(nodes=1, batch=batch, reuse=False)
    with Engine(target.model, options=settings) as engine:
        runs = [engine.submit(request, Autoregressive, Autoregressive.Options()) for request in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
    for run in runs:
        if run.error is not None:
            raise run.error
    return [(tuple(run.tokens), [record.logprob for record in run.history.logprobs]) for run in runs]


def _name(loaded: Loaded) -> str:
    """Without the folders of the machine that it was recorded on."""
    return Path(loaded.name).name if Path(loaded.name).is_absolute() else loaded.name


def _draft_rows(model: Model, request: Request, written: Sequence[int], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft's best tokens for every place of the answer, by the rule's rank. [tokens, ranks] each"""
    text, start = (*request.prompt, *written), len(request.prompt)
    if len(text) > model.max_positions:
        raise UserError(f"a text of {len(text)} tokens does not fit the draft's context of {model.max_positions}")
    known = [min(token, model.vocab_size - 1) for token in text[:-1]]
    session = model.open(len(text), _CHUNK)
    tokens, values, keep = [], [], range(0)
    for at in range(0, len(known), _CHUNK):
        piece = known[at : at + _CHUNK]
        wanted = [place for place in range(len(piece)) if at + place >= start - 1]
        scores = model.score([chain(session, piece, wanted, keep)])[:, : model.vocab_size]
        rows = [Row(request, text[: at + place + 1]) for place in wanted]
        best = torch.topk(request.rule.rank(scores, rows), min(ranks, scores.shape[1]))
        tokens.append(best.indices.cpu().numpy())
        values.append(best.values.cpu().numpy())
        keep = range(len(piece))
    return np.concatenate(tokens).astype(np.int32), np.concatenate(values).astype(np.float32)


def load(path: Path | str) -> Trace:
    """Reads a trace. UserError for a file that is not one, is torn, or holds what cannot be."""
    path = Path(path)
    about, arrays = _read(path)
    if about.get("format") != FORMAT:
        raise UserError(f"{path} is not a trace, `outpace bench --trace FILE` writes one")
    if about.get("version") != VERSION:
        raise UserError(f"{path} is a trace of version {about.get('version')}, this outpace reads version {VERSION}")
    try:
        vocab_size, tasks = int(about["vocab_size"]), json.loads(about["tasks"])
        target, draft, temperature = about["target"], about["draft"], float(about.get("temperature", 0.0))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged: its manifest lacks {error!s:.80}") from error
    problem = _objection(arrays, vocab_size, tasks)
    if problem:
        raise UserError(f"{path} is damaged: {problem}")
    return Trace(target, draft, vocab_size, tuple(_cut(arrays, tasks)), temperature)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, np.ndarray]]:
    from safetensors import safe_open

    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise UserError(f"{path} cannot be read as a trace: {error!s:.200}") from error


def _objection(arrays: Mapping[str, np.ndarray], vocab_size: int, tasks: Any) -> str | None:
    """What is wrong with a file's tensors, or None."""
    for name, kind in _TYPES.items():
        dims = 2 if name.startswith("draft") else 1
        if name not in arrays or arrays[name].dtype != kind or arrays[name].ndim != dims:
            return f"{name} is missing or of another type"
    lengths = {name: len(array) for name, array in arrays.items()}
    for starts, tokens in (("prompt_starts", "prompt_tokens"), ("starts", "tokens")):
        bounds = arrays[starts]
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != lengths[tokens] or (np.diff(bounds) < 1).any():
            return f"{starts} does not cut the {lengths[tokens]} {tokens}"
    shape = arrays["draft_tokens"].shape
    if lengths["starts"] != lengths["prompt_starts"] or not isinstance(tasks, list):
        return "it holds more answers than prompts, or fewer"
    if len(tasks) != lengths["starts"] - 1 or not all(isinstance(task, str) for task in tasks):
        return f"it names {len(tasks)} tasks for {lengths['starts'] - 1} answers"
    if shape != arrays["draft_logprobs"].shape or shape[0] != lengths["tokens"] or shape[1] < 1:
        return f"the draft's rows {list(shape)} are not those of {lengths['tokens']} tokens"
    if lengths["target_logprobs"] != lengths["tokens"]:
        return "target_logprobs are not those of the tokens"
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
        asked = slice(*arrays["prompt_starts"][number : number + 2])
        here = slice(*arrays["starts"][number : number + 2])
        prompt, tokens = arrays["prompt_tokens"][asked].tolist(), arrays["tokens"][here].tolist()
        logprobs, best, values = (arrays[name][here] for name in _ROWS)
        answers.append(TracedAnswer(tuple(prompt), tuple(tokens), logprobs, best, values, task))
    return answers


def _tensors(answers: Sequence[TracedAnswer]) -> dict[str, np.ndarray]:
    """What a file holds; the inverse of `_cut`."""
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
    """A made-up trace with this chance of acceptance, between 0 and 1."""
    check_range("acceptance", acceptance, 0.0, 1.0)
    check_whole("answers", answers, 1)
    check_whole("tokens", tokens, 1)
    chance = random.Random(seed)
    made = tuple(_answer(chance, acceptance, tokens) for _ in range(answers))
    return Trace("stated", f"acceptance {acceptance:g}", _VOCAB, made)


def _answer(chance: random.Random, acceptance: float, tokens: int) -> TracedAnswer:
    written, rows = [], []
    for _ in range(tokens):
        token, *others = chance.sample(range(_VOCAB), _RANKS + 1)
        rank = 0
        while rank < _RANKS and chance.random() >= acceptance:
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
