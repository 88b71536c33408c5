"""Packs the target's text into training batches, in an order that depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.shards import StoredTaps, read_shards
from outpace.distill.writer import TAPS, tap_list


@dataclass(frozen=True)
class Sample:
    """A prompt with its answer, cut to the length of a row."""

    tokens: np.ndarray  # int32 [tokens]
    prompt: int  # tokens of the prompt
    top_ids: np.ndarray  # int32 [answer tokens, k]
    top_log_p: np.ndarray  # float16 [answer tokens, k]
    temperature: float
    taps: StoredTaps | None = None


@dataclass(frozen=True)
class Labels:
    """The target's tokens at the scored positions, as indices of the draft's vocabulary; -1 if a token is not in it."""

    tokens: Tensor  # int64 [scored]: the tokens that it wrote
    top: Tensor  # int64 [scored, k]: its most likely tokens, in descending order
    top_p: Tensor  # float32 [scored, k], at temperature 1
    answers: Tensor  # int64 [scored]: number of the answer that a position belongs to

    def __getitem__(self, rows: Tensor) -> Labels:
        return Labels(self.tokens[rows], self.top[rows], self.top_p[rows], self.answers[rows])


@dataclass(frozen=True)
class PackedRows:
    """Rows that each hold several sequences; a token attends to the earlier tokens of its own sequence."""

    tokens: Tensor  # int64 [rows, length]
    positions: Tensor  # int64 [rows, length], starting from 0 in every sequence
    sequences: Tensor  # int64 [rows, length], which of the row's sequences a token belongs to
    scored: Tensor  # int64 [scored]: flat indices of the positions whose next token has a loss
    taps: Tensor | None = None  # float32 [rows, length, taps * width]: the target's hidden states


@dataclass(frozen=True)
class TrainingBatch:
    """The student's input rows and their labels."""

    packed: PackedRows
    labels: Labels
    num_tokens: int  # answer tokens


def follows(batch: TrainingBatch, places: int) -> Tensor:
    """Return whether the label `places` before (after, if negative) each one is of the same answer: bool [scored]."""
    answers = batch.labels.answers
    found = answers.roll(places) == answers
    found[: max(places, 0)] = False
    found[len(found) + min(places, 0) :] = False
    return found


def read_samples(folder: Path, length: int, taps: Sequence[int] = ()) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on and the held-out ones; UserError if there are none to train on.

    Samples refer to stored hidden states if all shards hold those after the layers `taps`.
    """
    shards = [*read_shards(folder)]
    is_stored = bool(taps) and all(shard.origin.get(TAPS) == tap_list(taps) for shard in shards)
    train: list[Sample] = []
    held_out: list[Sample] = []
    for shard in shards:
        row = 0
        for number, prompt in enumerate(shard.prompts.tolist()):
            tokens = shard.tokens[shard.starts[number] : shard.starts[number + 1]]
            rows = slice(row, row + min(len(tokens), length) - prompt)
            row += len(tokens) - prompt
            if rows.stop > rows.start:
                temperature = float(shard.temperatures[number])
                stop = int(shard.starts[number]) + len(tokens[:length])
                stored = shard.taps(number)._replace(stop=stop) if is_stored else None
                top = shard.top_ids[rows], shard.top_log_p[rows]
                sample = Sample(tokens[:length], prompt, *top, temperature, stored)
                (held_out if shard.held_out[number] else train).append(sample)
    if not train:
        raise UserError(f"{folder} holds no answer to train on that fits into {length} tokens")
    return train, held_out


def frequent_tokens(samples: Sequence[Sample], vocab: int, size: int, always: Sequence[int]) -> Tensor:
    """Return the `size` tokens that the target writes most, those of `always` included, in ascending order.

    The most likely tokens at each position count by their probability, in addition to the written tokens. int64 [size]
    """
    counts = np.zeros(vocab)
    for sample in samples:
        np.add.at(counts, sample.top_ids.ravel(), np.exp(sample.top_log_p.ravel().astype(np.float32)))
        np.add.at(counts, sample.tokens[sample.prompt :], 1.0)
    counts[list(always)] = np.inf
    order = np.lexsort((np.arange(vocab), -counts))
    return torch.from_numpy(np.sort(order[:size]))


class Packer:
    """Packs samples into batches of `rows` rows of `length` tokens; `ids` is the draft's vocabulary (None: all).

    `compute_taps` returns the target's hidden states for samples that have none stored; None: the student reads none.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        vocab: int,
        ids: Tensor | None,
        device: torch.device,
        compute_taps: Callable[[PackedRows], Tensor] | None = None,
    ) -> None:
        self.rows, self.length, self.device, self._compute_taps = rows, length, device, compute_taps
        self._index = np.arange(vocab) if ids is None else np.full(vocab, -1)
        if ids is not None:
            self._index[ids.cpu().numpy()] = np.arange(len(ids))

    def epoch(self, samples: Sequence[Sample], seed: int, epoch: int) -> list[list[list[int]]]:
        """Return the samples' numbers by batch and row: shuffled by (seed, epoch), packed first-fit."""
        order = np.random.default_rng((seed, epoch)).permutation(len(samples)).tolist()
        batches: list[list[list[int]]] = []
        free: list[int] = []  # tokens of the last batch's rows
        for number in order:
            needed = len(samples[number].tokens)
            row = next((row for row, length in enumerate(free) if length >= needed), len(free))
            if row == len(free):
                if not batches or row == self.rows:
                    batches.append([])
                    free, row = [], 0
                batches[-1].append([])
                free.append(self.length)
            batches[-1][row].append(number)
            free[row] -= needed
        return batches

    def batch(self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> TrainingBatch:
        """Build a batch; the last token of a sample has no label, since nothing follows it."""
        longest = max(sum(len(samples[number].tokens) for number in numbers) for numbers in rows)
        # on a CPU the padding is minimised; a GPU's kernels are faster with one shape
        step = self.length if self.device.type != "cpu" else 16
        shape = (len(rows), min(-(-longest // step) * step, self.length))
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        sequences = np.full(shape, -1, np.int64)
        chosen: list[Sample] = []
        scored: list[np.ndarray] = []
        features: np.ndarray | None = None
        for row, numbers in enumerate(rows):
            start = 0
            for place, number in enumerate(numbers):
                sample = samples[number]
                count = len(sample.tokens)
                tokens[row, start : start + count] = sample.tokens
                positions[row, start : start + count] = np.arange(count)
                sequences[row, start : start + count] = place
                if sample.taps is not None:
                    hidden = sample.taps.read()
                    features = np.zeros((*shape, hidden.shape[1]), np.float32) if features is None else features
                    features[row, start : start + count] = hidden
                scored.append(row * shape[1] + start + np.arange(sample.prompt - 1, count - 1))
                chosen.append(sample)
                start += count
        written = np.concatenate([sample.tokens[sample.prompt :] for sample in chosen])
        top = np.concatenate([sample.top_ids for sample in chosen])
        top_p = np.exp(np.concatenate([sample.top_log_p for sample in chosen]).astype(np.float32))
        packed = PackedRows(
            self._to_device(tokens),
            self._to_device(positions),
            self._to_device(sequences),
            self._to_device(np.concatenate(scored)),
            None if features is None else self._to_device(features),
        )
        answers = np.repeat(np.arange(len(chosen)), [len(rows) for rows in scored])
        labels = Labels(*map(self._to_device, (self._index[written], self._index[top], top_p, answers)))
        if features is None and self._compute_taps is not None:  # last, because copies wait for the device
            packed = replace(packed, taps=self._compute_taps(packed))
        return TrainingBatch(packed, labels, len(packed.scored))

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
