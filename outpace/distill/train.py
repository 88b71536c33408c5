"""Trains a draft on the target's text (stage train); each step depends on the seed and the step's number alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from outpace.core.errors import UserError, check_range, check_whole
from outpace.distill import training_state
from outpace.distill.batches import Packer, Sample, TrainingBatch, read_samples
from outpace.distill.losses import LossOptions, loss
from outpace.distill.progress_display import Progress
from outpace.distill.shards import shard_files
from outpace.distill.student import Student
from outpace.models.options import has_bfloat16

CURVE = "curve.jsonl"
WARM_STEPS = 3  # not timed, since a device initialises in them
PROBE_STEPS = 6  # timed steps after which a time budget is converted to a number of tokens
PROBE_SECONDS, PROBE_SHARE = 2.0, 0.05  # least time of these steps: seconds or share of the budget, the smaller one
EVALUATED = 160  # held-out answers evaluated at each checkpoint
CHAIN = 4


@dataclass(frozen=True)
class TrainOptions:
    """Options of the training, which sees `tokens` answer tokens, repeats included, or as many as `seconds` allow.

    The learning rate rises over `warmup` steps, stays constant, and falls along a cosine over the last share `cooldown`
    of the tokens (1: from the start).
    """

    tokens: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    warmup: int = 40
    cooldown: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm
    rows: int = 8
    length: int = 512
    seed: int = 0
    save_every: float = 180.0  # seconds
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        check_range("learning_rate", self.learning_rate, 1e-9, 1.0)
        check_range("cooldown", self.cooldown, 0.0, 1.0)
        for name in ("rows", "length", "warmup"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0, 2**63 - 1)
        check_range("save_every", self.save_every, 0.0)


@dataclass
class TrainingState:
    """The progress of a training, saved with the weights."""

    step: int = 0
    seen: int = 0  # answer tokens
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    samples: int = 0  # answers of the epoch
    total: int = 0  # tokens after which the training ends
    seconds: float = 0.0


def learning_rate(options: TrainOptions, state: TrainingState) -> float:
    """Return the learning rate of the next step."""
    rise = min(1.0, (state.step + 1) / options.warmup)
    left = 1.0 - min(state.seen / state.total, 1.0) if state.total else 1.0
    fall = 0.5 - 0.5 * math.cos(math.pi * left / options.cooldown) if left < options.cooldown else 1.0
    return options.learning_rate * rise * (0.02 + 0.98 * fall)


class Trainer:
    """Trains a student on the text in a folder and saves checkpoints to another."""

    def __init__(self, student: Student, text: Path, folder: Path, options: TrainOptions) -> None:
        self.student, self.options, self._text, self.folder = student, options, text, folder
        self.state = TrainingState()
        self._trained = student.trained
        matrices = [value for value in self._trained.values() if value.dim() > 1]
        vectors = [value for value in self._trained.values() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self._packer = Packer(options.rows, options.length, student.config.vocab_size, student.ids, student.device)
        self._warm = 0.0, 0  # seconds and tokens after the first steps
        self._files: list[Path] | None = None
        self._read()
        self._mixed = _has_fast_bfloat16(student.device)
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Load the last checkpoint; return False if there is none. UserError if its shapes differ."""
        found = training_state.load(self.folder, self._trained, self.optimizer)
        if found is None:
            return False
        self.state = TrainingState(**found)
        points = training_state.read_curve(self.folder / CURVE)
        kept = [point for point in points if point["step"] <= found["step"]]  # the others are newer than the checkpoint
        (self.folder / CURVE).write_text("".join(f"{json.dumps(point)}\n" for point in kept))
        return True

    def run(self, progress: Progress, save: Callable[[Student], None] = lambda student: None) -> None:
        """Train to the end, with a checkpoint every `save_every` seconds."""
        options, state = self.options, self.state
        if options.tokens is not None:
            state.total = options.tokens
        started = saved = time.monotonic()
        before, first = state.seconds, state.step
        mean = math.nan
        batches = self._batches()
        while not state.total or state.seen < state.total:
            value = self._step(next(batches))
            mean = value if math.isnan(mean) else 0.95 * mean + 0.05 * value
            now = time.monotonic()
            state.seconds = before + now - started
            self._plan(now - started, state.step - first)
            progress(self._figures(mean))
            if now - saved >= options.save_every:
                self.checkpoint(mean, progress, save)
                saved = time.monotonic()
        if state.step not in [point["step"] for point in training_state.read_curve(self.folder / CURVE)]:
            self.checkpoint(mean, progress, save)
        else:  # a finished run was started again
            save(self.student)
            progress(self._figures(mean))

    def checkpoint(self, mean: float, progress: Progress, save: Callable[[Student], None]) -> None:
        """Save a checkpoint, evaluate the held-out answers and add a point to the learning curve."""
        state = self.state
        training_state.save(self.folder, self._trained, self.optimizer, asdict(state))
        save(self.student)
        with torch.autocast(self.student.device.type, torch.bfloat16, enabled=self._mixed):
            found = asdict(agreement(self.student, self._packer, self._held_out[:EVALUATED]))
        point = {
            "step": state.step,
            "tokens": state.seen,
            "loss": None if math.isnan(mean) else round(mean, 5),
            **found,
            "text_tokens": sum(len(sample.top_ids) for sample in self._train),
            "seconds": round(state.seconds, 1),
        }
        with (self.folder / CURVE).open("a") as stream:
            stream.write(json.dumps(point) + "\n")
        progress(self._figures(mean) | {name: value for name, value in found.items() if value is not None})

    def _step(self, batch: TrainingBatch) -> float:
        rate = learning_rate(self.options, self.state)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.student.device.type, torch.bfloat16, enabled=self._mixed):
            logits = self.student.logits(batch.packed)
        value = loss(logits, batch.labels, self.options.loss)
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(self._trained.values()), self.options.clip)
        self.optimizer.step()
        self.state.step += 1
        self.state.seen += batch.num_tokens
        return float(value.detach())

    def _batches(self) -> Iterator[TrainingBatch]:
        """Yield batches epoch by epoch; each epoch includes the text written in the meantime."""
        state = self.state
        while True:
            if state.batch == 0 or state.samples != len(self._train):
                self._read()
                state.epoch += state.batch > 0  # there is more text than at the epoch's start: begin a new one
                state.batch, state.samples = 0, len(self._train)
            for rows in self._packer.epoch(self._train, self.options.seed, state.epoch)[state.batch :]:
                state.batch += 1
                yield self._packer.batch(self._train, rows)
            state.epoch, state.batch = state.epoch + 1, 0

    def _read(self) -> None:
        """Read the text if there are new shards."""
        files = shard_files(self._text)
        if files != self._files:
            self._files = files
            self._train, self._held_out = read_samples(self._text, self.options.length)

    def _plan(self, seconds: float, steps: int) -> None:
        """Convert a time budget to a number of tokens once the speed is known, which determines all later steps."""
        state, budget = self.state, self.options.seconds
        if state.total or budget is None:
            return
        if seconds >= budget:
            raise UserError(f"the time for training, {budget:g} s, is too short: {steps} steps took {seconds:.1f} s")
        if steps == WARM_STEPS:
            self._warm = seconds, state.seen
        elif steps >= WARM_STEPS + PROBE_STEPS:
            passed = seconds - self._warm[0]
            if passed >= min(PROBE_SECONDS, PROBE_SHARE * budget):
                state.total = state.seen + int((state.seen - self._warm[1]) * (budget - seconds) / passed)

    def _figures(self, mean: float) -> dict[str, float]:
        state = self.state
        rate = state.seen / state.seconds if state.seconds else 0.0
        figures = {"step": state.step, "tokens": state.seen, "tokens_per_second": rate}
        if not math.isnan(mean):
            figures["loss"] = mean
        if state.total and rate:
            figures["seconds_left"] = max(state.total - state.seen, 0) / rate
        return figures


def _has_fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products are faster in bfloat16 than in float32."""
    if device.type == "cuda":
        return has_bfloat16(device)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device.type == "cpu" and supported is not None and bool(supported())


@dataclass(frozen=True)
class Agreement:
    """The agreement of a draft with the target on held-out answers.

    `top1` is the share of answer tokens with the same most likely token. `chain` is the mean accepted length of chains
    of CHAIN tokens at temperature 0, None without greedy answers.
    """

    top1: float
    chain: float | None


@torch.inference_mode()
def agreement(student: Student, packer: Packer, samples: Sequence[Sample]) -> Agreement:
    """Measure the agreement with teacher forcing: the draft reads the target's own text.

    At temperature 0 the accepted lengths are exact nevertheless, since a chain is accepted only as far as it equals the
    target's text.
    """
    hits: list[np.ndarray] = []
    passes = emitted = 0
    for rows in packer.epoch(samples, 0, 0):
        batch = packer.batch(samples, rows)
        same = (student.logits(batch.packed).argmax(1) == batch.labels.top[:, 0]).cpu().numpy()
        hits.append(same)
        start = 0
        for number in (number for row in rows for number in row):
            count = len(samples[number].top_ids)
            if samples[number].temperature == 0:
                passes += _count_passes(same[start : start + count])
                emitted += count
            start += count
    share = float(np.concatenate(hits).mean()) if hits else 0.0
    return Agreement(round(share, 4), round(emitted / passes, 4) if passes else None)


def _count_passes(same: np.ndarray) -> int:
    """Count the target passes of an answer, drafted in chains of CHAIN, given which tokens the draft predicts."""
    passes = place = 0
    while place < len(same):
        chain = same[place : place + CHAIN]
        place += 1 + (len(chain) if chain.all() else int(chain.argmin()))
        passes += 1
    return passes
