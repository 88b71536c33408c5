"""Trains a draft on the target's text (stage train); each step depends on the seed and the step's number alone.

Checkpoints hold the trained weights and the optimizer's two moments. The student defines which tensors
are trained, the forward and the loss.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.options import CheckedOptions, number, whole
from outpace.core.theory import count_rounds
from outpace.distill.batches import PackedRows, Packer, Sample, TrainingBatch, read_samples
from outpace.distill.losses import LossOptions
from outpace.distill.progress_display import Progress
from outpace.distill.shards import shard_files
from outpace.distill.student import Student
from outpace.models.files.cache import new_file
from outpace.models.options import has_bfloat16

CURVE, STATE = "curve.jsonl", "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
WARM_STEPS = 3  # not timed, since a device initialises in them
PROBE_STEPS = 6  # timed steps after which a time budget is converted to a number of tokens
PROBE_SECONDS, PROBE_SHARE = 2.0, 0.05  # least time of these steps: seconds or share of the budget, the smaller one
EVALUATED = 160  # held-out answers evaluated at each checkpoint
CHAIN = 4


@dataclass(frozen=True)
class TrainOptions(CheckedOptions):
    """Options of the training, which sees `tokens` answer tokens, repeats included, or as many as `seconds` allow.

    The learning rate rises over `warmup` steps, stays constant, and falls along a cosine over the last share `cooldown`
    of the tokens (1: from the start).
    """

    tokens: int | None = None
    seconds: float | None = None
    learning_rate: float = number(Student.learning_rate, 1e-9, 1.0)
    warmup: int = whole(40, 1)
    cooldown: float = number(1.0, 0.0, 1.0)
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm
    rows: int = whole(8, 1)
    length: int = whole(512, 1)
    seed: int = whole(0, 0, 2**63 - 1)
    save_every: float = number(180.0, 0.0)  # seconds
    loss: LossOptions = field(default_factory=LossOptions)


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
    """Trains a student on the text in a folder and saves checkpoints to another. `compute_taps`: see `Packer`."""

    def __init__(
        self,
        student: Student,
        text: Path,
        folder: Path,
        options: TrainOptions,
        compute_taps: Callable[[PackedRows], Tensor] | None = None,
    ) -> None:
        self.student, self.options, self._text, self.folder = student, options, text, folder
        self.state = TrainingState()
        self._trained = student.trained
        matrices = [value for value in self._trained.values() if value.dim() > 1]
        vectors = [value for value in self._trained.values() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        vocab = student.config.vocab_size
        self._packer = Packer(options.rows, options.length, vocab, student.ids, student.device, compute_taps)
        self._warm = 0.0, 0  # seconds and tokens after the first steps
        self._files: list[Path] | None = None
        self._read()
        self._mixed = has_fast_bfloat16(student.device)
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Load the last checkpoint; return False if there is none. UserError if its shapes differ."""
        found = load_state(self.folder, self._trained, self.optimizer)
        if found is None:
            return False
        self.state = TrainingState(**found)
        points = read_curve(self.folder / CURVE)
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
        if state.step not in [point["step"] for point in read_curve(self.folder / CURVE)]:
            self.checkpoint(mean, progress, save)
        else:  # a finished run was started again
            save(self.student)
            progress(self._figures(mean))

    def checkpoint(self, mean: float, progress: Progress, save: Callable[[Student], None]) -> None:
        """Save a checkpoint, evaluate the held-out answers and add a point to the learning curve."""
        state = self.state
        save_state(self.folder, self._trained, self.optimizer, asdict(state))
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
        try:
            with (self.folder / CURVE).open("a") as stream:
                stream.write(json.dumps(point) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.folder / CURVE} cannot be written ({error.strerror}); the draft is saved"
            ) from error
        progress(self._figures(mean) | {name: value for name, value in found.items() if value is not None})

    def _step(self, batch: TrainingBatch) -> float:
        rate = learning_rate(self.options, self.state)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.student.device.type, torch.bfloat16, enabled=self._mixed):
            value = self.student.loss(batch, self.options.loss)
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
            self._train, self._held_out = read_samples(self._text, self.options.length, self.student.taps)

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


def operations_per_second(name: str) -> float:
    """Time a matrix product in the training's precision; return its floating-point operations per second."""
    device, size = torch.device(name), 1024
    dtype = torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    one = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(times)


def has_fast_bfloat16(device: torch.device) -> bool:
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
        chains = student.right_chains(batch, CHAIN).cpu().numpy()
        hits.append(chains[:, 0])
        start = 0
        for index in (index for row in rows for index in row):
            count = len(samples[index].top_ids)
            if samples[index].temperature == 0:
                passes += count_rounds(chains[start : start + count].tolist())
                emitted += count
            start += count
    share = float(np.concatenate(hits).mean()) if hits else 0.0
    return Agreement(round(share, 4), round(emitted / passes, 4) if passes else None)


def save_state(
    folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Write the state; UserError if that fails, which keeps the last checkpoint."""
    from safetensors.torch import save_file

    tensors = {f"weight {name}": value.detach() for name, value in trained.items()}
    for moment in MOMENTS:
        for name, value in trained.items():
            tensors[f"{moment} {name}"] = optimizer.state[value].get(moment, torch.zeros_like(value))
    metadata = {"progress": json.dumps(progress)}
    with new_file(folder / STATE, "the checkpoint before it stays good") as part:
        save_file(tensors, part, metadata)


def load_state(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load weights and moments; return the progress, or None without a checkpoint. Raises as `check_state`."""
    progress = check_state(folder, {name: tuple(value.shape) for name, value in trained.items()})
    if progress is None:
        return None
    from safetensors.torch import load_file

    tensors = load_file(folder / STATE)
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(tensors[f"weight {name}"])
            moments = {moment: tensors[f"{moment} {name}"].to(value.device) for moment in MOMENTS}
            step = torch.tensor(float(progress["step"]), device=value.device)  # the fused kernel reads it there
            optimizer.state[value].update(step=step, **moments)
    return progress


def check_state(folder: Path, trained: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """Return the saved progress, or None without a checkpoint.

    Raises UserError for a checkpoint that is torn, or whose tensors do not have the shapes in `trained`.
    """
    from safetensors import safe_open

    file = folder / STATE
    if not file.exists():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:
            progress: dict[str, Any] = json.loads(opened.metadata()["progress"])
            names = [name for name in opened.keys() if name.startswith("weight ")]  # noqa: SIM118
            saved = {name.removeprefix("weight "): opened.get_slice(name).get_shape() for name in names}
    except Exception as error:  # safetensors raises its own error, OSError or a bare Exception, by the kind of damage
        raise UserError(f"{file} is not a whole checkpoint ({error}); remove it to start anew") from error
    own = {name: list(shape) for name, shape in trained.items()}
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            shapes = f"{saved.get(name, 'missing')} in it and {own.get(name, 'missing')} in this draft"
            raise UserError(f"{file} is a checkpoint of another shape: {name} is {shapes}; choose another folder")
    return progress


def read_curve(file: Path) -> list[dict[str, Any]]:
    """Read the points of a learning curve; none if there was no training. A line that was cut off by a full disk or by
    the end of the process is left out."""
    points = list[dict[str, Any]]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            points.append(json.loads(line))
    return points
