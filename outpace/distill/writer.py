"""The target writes many answers at once: one batched decoder over plain bfloat16 weights, for text by the million.

Not the engine's forest pass: that one keeps a row's bits apart from its neighbours', which training text has no use
for, and it attends session by session. Here a cohort of answers starts together, so that all of them write to the same
slot, and one batched product a layer serves a cohort. Finished answers leave, and a new cohort takes their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.noise import uniform
from outpace.distill.weights import Weights, normed

SLICE = 16  # rows judged at a time on a CPU, so that what they need stays in its caches
CHUNK = 64  # the k largest of a row lie in the k chunks with the largest maxima


@dataclass(frozen=True)
class Job:
    """One answer to write. `number` keys its noise and names it in the shards."""

    number: int
    prompt: tuple[int, ...]
    temperature: float
    held_out: bool = False


@dataclass(frozen=True)
class Answer:
    """What the target wrote, and the k likeliest tokens at each place at temperature 1, likeliest first."""

    job: Job
    tokens: np.ndarray  # int32 [tokens], the stop token included
    top_ids: np.ndarray  # int32 [tokens, k]
    top_log_p: np.ndarray  # float16 [tokens, k]


@dataclass(frozen=True)
class WriterOptions:
    """`rows` answers are written at once, in cohorts of `cohort`; no answer is longer than `max_tokens`."""

    rows: int = 128
    cohort: int = 24
    max_tokens: int = 256
    top: int = 16
    seed: int = 0


class _Cohort:
    """Answers that started together: prompts end at the same slot, so that every later slot is theirs in common."""

    def __init__(self, jobs: list[Job], weights: Weights, options: WriterOptions, stops: Tensor) -> None:
        config, device = weights.config, weights.device
        self.jobs, self.stops, self.limit = jobs, stops, options.max_tokens
        self.width = max(len(job.prompt) for job in jobs) - 1  # the last token of a prompt is the first step's input
        self.length, self.count = self.width, 0
        self.pads = torch.tensor([self.width + 1 - len(job.prompt) for job in jobs], device=device)  # [rows]
        self.input = torch.tensor([job.prompt[-1] for job in jobs], device=device)  # [rows]
        slots = self.width + options.max_tokens
        shape = (config.num_layers, len(jobs), config.num_kv_heads)
        self.keys = torch.empty(*shape, config.head_dim, slots, dtype=weights.dtype, device=device)
        self.values = torch.empty(*shape, slots, config.head_dim, dtype=weights.dtype, device=device)
        before = torch.arange(slots, device=device) < self.pads[:, None]
        self.hidden = torch.zeros(before.shape, device=device).masked_fill_(before, -torch.inf)  # [rows, slots]
        self.temperatures = torch.tensor([job.temperature for job in jobs], device=device)
        self.tokens = torch.zeros(len(jobs), self.limit, dtype=torch.int32, device=device)
        self.top_ids = torch.zeros(len(jobs), self.limit, options.top, dtype=torch.int32, device=device)
        self.top_log_p = torch.zeros(len(jobs), self.limit, options.top, dtype=torch.float16, device=device)
        noise = [[uniform(options.seed, job.number, place) for place in range(self.limit)] for job in jobs]
        self.noise = torch.tensor(noise, device=device)  # [rows, tokens]

    @property
    def live(self) -> int:
        return len(self.jobs)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token a row. query [rows, heads, d], key and value [rows, kv_heads, d] to [rows, heads * d]."""
        rows, groups, width = key.shape
        self.keys[layer, :rows, :, :, self.length] = key
        self.values[layer, :rows, :, self.length] = value
        seen = self.length + 1
        keys = self.keys[layer, :rows].flatten(0, 1)[:, :, :seen]  # [rows * kv_heads, d, seen]
        values = self.values[layer, :rows].flatten(0, 1)[:, :seen]
        scores = torch.bmm(query.reshape(rows * groups, -1, width), keys).float()
        scores = scores.view(rows, -1, seen) + self.hidden[:rows, None, :seen]  # [rows, heads, seen]
        weights = scores.softmax(-1).to(values.dtype)
        return torch.bmm(weights.view(rows * groups, -1, seen), values).view(rows, -1)

    def push(self, tokens: Tensor, top_ids: Tensor, top_log_p: Tensor) -> list[Answer]:
        """Takes one more token a row; what is finished by it leaves."""
        rows = self.live
        self.tokens[:rows, self.count] = tokens.int()
        self.top_ids[:rows, self.count] = top_ids.int()
        self.top_log_p[:rows, self.count] = top_log_p.half()
        self.input = tokens
        self.length, self.count = self.length + 1, self.count + 1
        if self.count == self.limit:
            ended = list(range(rows))
        else:
            ended = torch.isin(tokens, self.stops).nonzero().flatten().tolist()
        answers = [self._answer(row) for row in ended]
        if len(ended) == rows:
            self.jobs = []
        else:
            for row in reversed(ended):
                self._drop(row)
        return answers

    def _answer(self, row: int) -> Answer:
        parts = (part[row, : self.count].cpu().numpy().copy() for part in (self.tokens, self.top_ids, self.top_log_p))
        return Answer(self.jobs[row], *parts)

    def _drop(self, row: int) -> None:
        """The last row takes the place of a finished one."""
        last = self.live - 1
        if row < last:
            self.keys[:, row, :, :, : self.length] = self.keys[:, last, :, :, : self.length]
            self.values[:, row, :, : self.length] = self.values[:, last, :, : self.length]
            for part in (self.tokens, self.top_ids, self.top_log_p):
                part[row, : self.count] = part[last, : self.count]
            for part in (self.input, self.pads, self.hidden, self.temperatures, self.noise):
                part[row] = part[last]
            self.jobs[row] = self.jobs[last]
        self.jobs.pop()
        self.input, self.pads = self.input[:last], self.pads[:last]


class Writer:
    """Batched decoding of a Llama target; `answers` turns jobs into answers, in the order in which they end."""

    def __init__(self, weights: Weights, stop_ids: frozenset[int], options: WriterOptions) -> None:
        self.weights, self.options = weights, options
        self._stops = torch.tensor(sorted(stop_ids), device=weights.device, dtype=torch.int64)

    @property
    def max_positions(self) -> int:
        """The target's context, in tokens."""
        return self.weights.config.max_positions

    @torch.inference_mode()
    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        cohorts: list[_Cohort] = []
        while True:
            while self.options.rows - sum(cohort.live for cohort in cohorts) >= self.options.cohort or not cohorts:
                new = list(islice(jobs, self.options.cohort))
                if not new:
                    break
                cohorts.append(self._open(new))
            if not cohorts:
                return
            yield from self._step(cohorts)
            cohorts = [cohort for cohort in cohorts if cohort.live]

    def _open(self, jobs: list[Job]) -> _Cohort:
        """A cohort whose prompts are read, but for their last tokens."""
        cohort = _Cohort(jobs, self.weights, self.options, self._stops)
        if not cohort.width:
            return cohort
        rows = [[0] * (cohort.width + 1 - len(job.prompt)) + list(job.prompt[:-1]) for job in jobs]
        tokens = torch.tensor(rows, device=self.weights.device)  # [rows, width]
        places = torch.arange(cohort.width, device=self.weights.device)
        turn = self.weights.turn((places - cohort.pads[:, None]).clamp_min(0).flatten())
        sees = (places[:, None] >= places) & ~cohort.hidden[:, None, : cohort.width].isinf()
        sees = (sees | (places[:, None] == places))[:, None]  # [rows, 1, width, width]; what pads see does not matter
        mask = torch.zeros(sees.shape, dtype=self.weights.dtype, device=sees.device).masked_fill_(~sees, -torch.inf)
        x = self.weights.embedding[tokens.flatten()]  # [rows * width, hidden] float32
        for number, layer in enumerate(self.weights.layers):
            parts = (part.unflatten(0, tokens.shape).transpose(1, 2) for part in layer.project(x, turn))
            query, key, value = parts  # [rows, heads, width, d]
            cohort.keys[number, ..., : cohort.width] = key.transpose(2, 3)
            cohort.values[number, :, :, : cohort.width] = value
            mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=1.0, enable_gqa=True)
            x = layer.finish(x, mixed.transpose(1, 2).flatten(0, 1).flatten(1))
        return cohort

    def _step(self, cohorts: list[_Cohort]) -> Iterator[Answer]:
        """One token for every answer."""
        hidden = self.forward(cohorts)
        noise = torch.cat([cohort.noise[: cohort.live, cohort.count] for cohort in cohorts])
        temperatures = torch.cat([cohort.temperatures[: cohort.live] for cohort in cohorts])
        picked = pick(self.weights, hidden, temperatures, noise, self.options.top)
        sizes = [cohort.live for cohort in cohorts]
        for cohort, *parts in zip(cohorts, *(part.split(sizes) for part in picked), strict=True):
            yield from cohort.push(*parts)

    def forward(self, cohorts: list[_Cohort]) -> Tensor:
        """The last layer's output for the next token of every row, normed: float32 [rows, hidden]."""
        weights = self.weights
        sizes = [cohort.live for cohort in cohorts]
        turn = weights.turn(torch.cat([cohort.length - cohort.pads for cohort in cohorts]))
        x = weights.embedding[torch.cat([cohort.input for cohort in cohorts])]  # [rows, hidden] float32
        for number, layer in enumerate(weights.layers):
            parts = [part.split(sizes) for part in layer.project(x, turn)]
            mixed = [cohort.attend(number, *part) for cohort, *part in zip(cohorts, *parts, strict=True)]
            x = layer.finish(x, torch.cat(mixed))
        return normed(x, weights.norm, weights.config.rms_norm_eps)


def pick(
    weights: Weights, hidden: Tensor, temperatures: Tensor, noise: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of every row, and the `top` likeliest with their log-probabilities at temperature 1.

    hidden [rows, hidden]; temperatures and noise (uniform) [rows]. Half precision is too coarse to order tokens, so the
    likeliest are scored anew in float32; the rest counts by chunks.
    """
    scores = weights.head(hidden.to(weights.dtype))  # [rows, vocab]
    if not scores.is_cpu:
        return _pick(weights, scores, hidden, temperatures, noise, top)
    parts = []
    for start in range(0, len(scores), SLICE):
        rows = slice(start, start + SLICE)
        parts.append(_pick(weights, scores[rows], hidden[rows], temperatures[rows], noise[rows], top))
    tokens, ids, log_p = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(ids), torch.cat(log_p)


def _pick(
    weights: Weights, rest: Tensor, hidden: Tensor, temperatures: Tensor, noise: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `pick`, from half precision scores `rest` [rows, vocab], which are changed."""
    vocab = rest.shape[1]
    rest = F.pad(rest, (0, -vocab % CHUNK), value=-torch.inf) if vocab % CHUNK else rest
    near = _largest(rest, min(2 * top, vocab))  # [rows, candidates]
    scores = torch.bmm(weights.rows[near], hidden[:, :, None]).squeeze(2)  # [rows, candidates] float32
    rest.scatter_(1, near, -torch.inf)
    best = scores.amax(1, keepdim=True)
    masses = torch.cat([torch.exp(scores - best), _chunk_masses(rest, best)], 1)  # [rows, candidates + chunks]
    likeliest, order = scores.topk(min(top, vocab), dim=1)
    ids = near.gather(1, order)
    tokens = ids[:, 0].clone()
    for temperature in set(temperatures.tolist()) - {0.0}:
        rows = (temperatures == temperature).nonzero().flatten()
        own, peak = rest[rows], best[rows]
        if temperature != 1.0:
            candidates = torch.exp((scores[rows] - peak) / temperature)
            drawn_from = torch.cat([candidates, _chunk_masses(own, peak, temperature)], 1)
        else:
            drawn_from = masses[rows]
        tokens[rows] = _draw(drawn_from, near[rows], (own, peak, temperature), noise[rows])
    return tokens, ids, likeliest - best - torch.log(masses.sum(1, keepdim=True))


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` largest scores of every row. [rows, chunks * CHUNK] to [rows, count]"""
    chunks = scores.float().unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    kept = chunks.amax(2).topk(min(count, chunks.shape[1]), dim=1).indices  # [rows, kept]
    inside = chunks.gather(1, kept[:, :, None].expand(-1, -1, CHUNK)).flatten(1).topk(count, dim=1).indices
    return kept.gather(1, inside // CHUNK) * CHUNK + inside % CHUNK


def _chunk_masses(scores: Tensor, best: Tensor, temperature: float = 1.0) -> Tensor:
    """exp((scores - best) / temperature), summed by chunks: [rows, chunks * CHUNK] to float32 [rows, chunks]."""
    shifted = scores - best.to(scores.dtype)
    if temperature != 1.0:
        shifted /= temperature
    return shifted.exp_().unflatten(1, (-1, CHUNK)).sum(2).float()  # sums run in float32 and are rounded once


def _draw(masses: Tensor, near: Tensor, rest: tuple[Tensor, Tensor, float], noise: Tensor) -> Tensor:
    """Tokens drawn by inverting the distribution at `noise`: a candidate, or a chunk and then a token inside. [rows]"""
    ends = masses.double().cumsum(1)  # [rows, candidates + chunks]
    goal = noise[:, None] * ends[:, -1:]
    place = torch.searchsorted(ends, goal, right=True)
    place = torch.minimum(place, (ends < ends[:, -1:]).sum(1, keepdim=True))  # never behind the last mass
    candidates = near.shape[1]
    chunk = (place - candidates).clamp_min(0)  # [rows, 1]
    scores, best, temperature = rest
    own = scores.unflatten(1, (-1, CHUNK)).gather(1, chunk[:, :, None].expand(-1, -1, CHUNK)).squeeze(1)
    inside = torch.exp((own.double() - best) / temperature).cumsum(1)  # [rows, CHUNK]
    share = (goal - (ends - masses).gather(1, place)) / masses.gather(1, place)  # where in its chunk the goal lies
    token = torch.searchsorted(inside, share.clamp(0, 1) * inside[:, -1:], right=True)
    token = torch.minimum(token, (inside < inside[:, -1:]).sum(1, keepdim=True))
    near_token = near.gather(1, place.clamp_max(candidates - 1))
    return torch.where(place < candidates, near_token, chunk * CHUNK + token).squeeze(1)
