"""Stage train: the draft learns the target's text. Every step follows from the seed and the step's number alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from outpace.core.errors import UserError, check_range, check_whole
from outpace.distill import training_state
from outpace.distill.agreement import Agreement, agreement
from outpace.distill.batches import Batch, Packer, Sample, read_samples
from outpace.distill.losses import LossOptions, loss
from outpace.distill.progress import Progress
from outpace.distill.shards import shard_files
from outpace.distill.student import Student
from outpace.models.options import has_bfloat16

CURVE = "curve.jsonl"
WARM_STEPS = 3  # the first ones make what a device needs
PROBE_STEPS = 6  # after so many more, and some seconds, a time budget is turned into a number of tokens
PROBE_SECONDS, PROBE_SHARE = 2.0, 0.05  # at least so long, or this share of the budget where that is less
EVALUATED = 160  # held-out answers judged at each checkpoint


@dataclass(frozen=True)
class TrainOptions:
    """`tokens` of answers to see, repeats counted, or as many as `seconds` allow. The learning rate rises over `warmup`
    steps, holds, and falls along a cosine over the last `cooldown` share of the tokens (1: from the start)."""

    tokens: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    warmup: int = 40
    cooldown: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0
    rows: int = 8
    length: int = 512
    seed: int = 0
    save_every: float = 180.0  # seconds
    part_bytes: int | None = None  # the largest file of a checkpoint; None: one file, however large
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        check_range("learning_rate", self.learning_rate, 1e-9, 1.0)
        check_range("cooldown", self.cooldown, 0.0, 1.0)
        check_range("clip", self.clip, 1e-9)
        for name in ("rows", "length", "warmup"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0, 2**63 - 1)
        check_range("save_every", self.save_every, 0.0)
        if self.part_bytes is not None:
            check_whole("part_bytes", self.part_bytes, 1)


@dataclass
class TrainingState:
    """Where a training stands; saved with the weights."""

    step: int = 0
    seen: int = 0  # answer tokens
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    samples: int = 0  # answers that the epoch is made of
    total: int = 0  # tokens after which training ends
    seconds: float = 0.0


def learning_rate(options: TrainOptions, state: TrainingState) -> float:
    """The rate of the next step."""
    rise = min(1.0, (state.step + 1) / options.warmup)
    left = 1.0 - min(state.seen / state.total, 1.0) if state.total else 1.0
    fall = 0.5 - 0.5 * math.cos(math.pi * left / options.cooldown) if left < options.cooldown else 1.0
    return options.learning_rate * rise * (0.02 + 0.98 * fall)


class Trainer:
    """A student, its optimizer, and the text that it learns; `run` goes on until the tokens are seen."""

    def __init__(self, student: Student, text: Path, folder: Path, options: TrainOptions) -> None:
        self.student, self.options, self._text, self.folder = student, options, text, folder
        self.state = TrainingState()
        self._trained = student.trained
        betas, decay = (0.9, 0.95), options.weight_decay
        matrices = [value for value in self._trained.values() if value.dim() > 1]
        vectors = [value for value in self._trained.values() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, fused=True)
        self._packer = Packer(options.rows, options.length, student.config.vocab_size, student.ids, student.device)
        self._warm = 0.0, 0  # seconds and tokens after the first steps
        self._files: list[Path] | None = None
        self._read()
        self._mixed = _has_fast_bfloat16(student.device)
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Goes back to the last checkpoint; False where there is none. UserError where it has another shape."""
        found = training_state.load(self.folder, self._trained, self.optimizer)
        if found is None:
            return False
        self.state = TrainingState(**found)
        training_state.cut_curve(self.folder / CURVE, self.state.step)
        return True

    def run(self, progress: Progress, save: Callable[[Student], None] = lambda student: None) -> None:
        """Trains to the end, with a checkpoint every `save_every` seconds: a stopped run goes on from there."""
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
        if not training_state.has_point(self.folder / CURVE, state.step):
            self.checkpoint(mean, progress, save)
        else:  # a finished run was started again
            save(self.student)
            progress(self._figures(mean))

    def checkpoint(self, mean: float, progress: Progress, save: Callable[[Student], None]) -> Agreement:
        """Saves all that a resumed run needs, judges the held-out answers and adds a point to the learning curve."""
        most = self.options.part_bytes
        training_state.save(self.folder, self._trained, self.optimizer, asdict(self.state), most)
        save(self.student)
        found = self.judge()
        state = self.state
        point = {"step": state.step, "tokens": state.seen, "loss": None if math.isnan(mean) else round(mean, 5)}
        point |= asdict(found)
        point |= {
            "text_tokens": sum(len(sample.top_ids) for sample in self._train),
            "seconds": round(state.seconds, 1),
        }
        with (self.folder / CURVE).open("a") as stream:
            stream.write(json.dumps(point) + "\n")
        progress(self._figures(mean) | {name: value for name, value in asdict(found).items() if value is not None})
        return found

    def judge(self) -> Agreement:
        """How often the draft agrees with the target on held-out answers."""
        with torch.autocast(self.student.device.type, torch.bfloat16, enabled=self._mixed):
            return agreement(self.student, self._packer, self._held_out[:EVALUATED])

    def _step(self, batch: Batch) -> float:
        rate = learning_rate(self.options, self.state)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.student.device.type, torch.bfloat16, enabled=self._mixed):
            logits = self.student.logits(batch.packed)
        value = loss(logits, batch.goals, self.options.loss)
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(self._trained.values()), self.options.clip)
        self.optimizer.step()
        self.state.step += 1
        self.state.seen += batch.num_tokens
        return float(value.detach())

    def _batches(self) -> Iterator[Batch]:
        """Epoch after epoch; each takes in the text that has been written meanwhile."""
        state = self.state
        while True:
            if state.batch == 0 or state.samples != len(self._train):
                self._read()
                state.epoch += state.batch > 0  # more text than the epoch began with: a new one
                state.batch, state.samples = 0, len(self._train)
            for rows in self._packer.epoch(self._train, self.options.seed, state.epoch)[state.batch :]:
                state.batch += 1
                yield self._packer.batch(self._train, rows)
            state.epoch, state.batch = state.epoch + 1, 0

    def _read(self) -> None:
        """The text, where it is not read yet or there is more of it by now."""
        files = shard_files(self._text)
        if files != self._files:
            self._files = files
            self._train, self._held_out = read_samples(self._text, self.options.length)

    def _plan(self, seconds: float, steps: int) -> None:
        """Turns a time budget into tokens once the speed is known, so that every later step is settled."""
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
    """Whether products in bfloat16 are faster than in float32."""
    if device.type == "cuda":
        return has_bfloat16(device)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device.type == "cpu" and supported is not None and bool(supported())


__all__ = ["Sample", "TrainOptions", "Trainer"]
