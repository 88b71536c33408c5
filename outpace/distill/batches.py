"""The target's text as training batches: packed rows, in an order that follows from the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.losses import Goals
from outpace.distill.shards import Shard, read_shards
from outpace.distill.student import Packed


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer, cut to the length of a row."""

    tokens: np.ndarray  # int32 [tokens]
    prompt: int  # tokens of the prompt
    top_ids: np.ndarray  # int32 [answer tokens, k]
    top_log_p: np.ndarray  # float16 [answer tokens, k]
    temperature: float


@dataclass(frozen=True)
class Batch:
    """Rows for the student, and what the target said there."""

    packed: Packed
    goals: Goals
    num_tokens: int  # answer tokens


def read_samples(folder: Path, length: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, and those that are held out; UserError where there is no text."""
    train: list[Sample] = []
    held_out: list[Sample] = []
    for shard in read_shards(folder):
        for sample, is_held_out in _samples(shard, length):
            (held_out if is_held_out else train).append(sample)
    if not train:
        raise UserError(f"{folder} holds no answer to train on that fits into {length} tokens")
    return train, held_out


def _samples(shard: Shard, length: int) -> Iterator[tuple[Sample, bool]]:
    row = 0
    for number, prompt in enumerate(shard.prompts.tolist()):
        tokens = shard.tokens[shard.starts[number] : shard.starts[number + 1]]
        end = row + len(tokens) - prompt
        kept = min(len(tokens), length) - prompt
        if kept > 0:
            rows = slice(row, row + kept)
            temperature = float(shard.temperatures[number])
            sample = Sample(tokens[: prompt + kept], prompt, shard.top_ids[rows], shard.top_log_p[rows], temperature)
            yield sample, bool(shard.held_out[number])
        row = end


def frequent_tokens(samples: Sequence[Sample], vocab: int, size: int, always: Sequence[int]) -> Tensor:
    """The `size` tokens that the target writes most, in rising order: int64 [size]. Those of `always` are among them.

    The likeliest tokens at each place count as well as what was written, by their chance.
    """
    counts = np.zeros(vocab)
    for sample in samples:
        np.add.at(counts, sample.top_ids.ravel(), np.exp(sample.top_log_p.ravel().astype(np.float32)))
        np.add.at(counts, sample.tokens[sample.prompt :], 1.0)
    counts[list(always)] = np.inf
    order = np.lexsort((np.arange(vocab), -counts))
    return torch.from_numpy(np.sort(order[:size]))


class Packer:
    """Packs samples into batches of `rows` rows of `length` tokens. `ids`: the draft's own tokens, None: all."""

    def __init__(self, rows: int, length: int, vocab: int, ids: Tensor | None, device: torch.device) -> None:
        self.rows, self.length, self.device = rows, length, device
        self._index = np.arange(vocab) if ids is None else np.full(vocab, -1)
        if ids is not None:
            self._index[ids.cpu().numpy()] = np.arange(len(ids))

    def epoch(self, samples: Sequence[Sample], seed: int, epoch: int) -> list[list[list[int]]]:
        """Which samples go into which rows of which batch: a shuffle by (seed, epoch), packed first fit."""
        order = np.random.default_rng((seed, epoch)).permutation(len(samples)).tolist()
        batches: list[list[list[int]]] = []
        rows: list[list[int]] = []
        room: list[int] = []
        for number in order:
            needed = len(samples[number].tokens)
            row = next((row for row, free in enumerate(room) if free >= needed), None)
            if row is None:
                if len(rows) == self.rows:
                    batches.append(rows)
                    rows, room = [], []
                rows, room, row = [*rows, []], [*room, self.length], len(rows)
            rows[row].append(number)
            room[row] -= needed
        return [*batches, rows] if rows else batches

    def batch(self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> Batch:
        """The batch of these samples. The last token of a sample has no place: nothing comes after it."""
        longest = max(sum(len(samples[number].tokens) for number in numbers) for numbers in rows)
        shape = (len(rows), self._length(longest))
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        sequences = np.full(shape, -1, np.int64)
        chosen: list[Sample] = []
        places: list[np.ndarray] = []
        for row, numbers in enumerate(rows):
            start = 0
            for place, number in enumerate(numbers):
                sample = samples[number]
                count = len(sample.tokens)
                tokens[row, start : start + count] = sample.tokens
                positions[row, start : start + count] = np.arange(count)
                sequences[row, start : start + count] = place
                places.append(row * shape[1] + start + np.arange(sample.prompt - 1, count - 1))
                chosen.append(sample)
                start += count
        packed = Packed(*(self._tensor(part) for part in (tokens, positions, sequences, np.concatenate(places))))
        return Batch(packed, self._goals(chosen), len(packed.places))

    def _length(self, longest: int) -> int:
        """The length of a batch's rows. On a CPU what nobody fills is left out; a GPU's kernels like one size."""
        step = self.length if self.device.type != "cpu" else 16
        return min(-(-longest // step) * step, self.length)

    def _goals(self, samples: Sequence[Sample]) -> Goals:
        written = np.concatenate([sample.tokens[sample.prompt :] for sample in samples])
        top = np.concatenate([sample.top_ids for sample in samples])
        top_p = np.exp(np.concatenate([sample.top_log_p for sample in samples]).astype(np.float32))
        return Goals(self._tensor(self._index[written]), self._tensor(self._index[top]), self._tensor(top_p))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
