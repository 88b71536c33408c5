"""Options of a distillation, the layout of its folder, and the lock of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.distill.evaluate import EvaluationOptions
from outpace.distill.prompts import BUILT_IN
from outpace.distill.start import DraftShape
from outpace.distill.text import TEMPERATURES, check_temperatures
from outpace.distill.train import TrainOptions
from outpace.distill.writer import WriterOptions
from outpace.models.files.cache_folder import exclusive_lock
from outpace.models.runtimes import RUNTIMES

STAGES = ("text", "train", "judge", "all")
TEXT, TRAINING, DRAFT = "text", "training", "draft"  # folders


@dataclass(frozen=True)
class DistillOptions:
    """What to distill, the run's folder `out`, and how much: `tokens` of the target's text, or `seconds` in total."""

    target: str | None
    out: Path
    prompts: Sequence[str] = (BUILT_IN,)
    stage: str = "all"
    tokens: int | None = None
    seconds: float | None = None
    epochs: float = 3.0  # passes over the text, where `tokens` limits the text
    temperatures: Sequence[float] = TEMPERATURES  # at which prompts are answered, in rotation
    device: str = "cpu"
    runtime: str = "auto"  # of the evaluation
    evaluate: str | None = None  # the draft to evaluate; None: the run's own
    tasks: Sequence[str] = ()  # files of prompts to evaluate on; none: the held-out prompts
    shape: DraftShape = field(default_factory=DraftShape)
    writer: WriterOptions = field(default_factory=WriterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    command: str = ""  # for the model card

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise unknown("stage", self.stage, STAGES)
        if self.runtime not in RUNTIMES:
            raise unknown("runtime", self.runtime, RUNTIMES)
        if self.tokens is not None:
            check_whole("tokens", self.tokens, 1)
        if self.seconds is not None:
            check_range("budget", self.seconds, 1.0)
        if self.tokens is None and self.seconds is None and self.stage in ("text", "all"):
            raise UserError("say how much to distil: a time (--budget 2h) or a number of tokens (--tokens 100000)")
        check_temperatures(self.temperatures)
        check_range("epochs", self.epochs, 0.001, 10000.0)

    @property
    def writes_text(self) -> bool:
        """Whether the stage text runs."""
        return self.stage in ("text", "all")

    @property
    def trains(self) -> bool:
        """Whether the stage train runs."""
        return self.stage in ("train", "all")

    @property
    def evaluates(self) -> bool:
        """Whether the stage judge runs."""
        return self.stage in ("judge", "all")

    @property
    def draft(self) -> str:
        """The draft to evaluate."""
        return self.evaluate if self.evaluate is not None else str(self.out / DRAFT)


@contextmanager
def stage_lock(path: Path, work: str) -> Iterator[None]:
    """Hold a lock on `path`; UserError if another process holds it, whose files this one would overwrite."""

    def fail() -> None:
        raise UserError(f"another process is {work} in {path}: wait for it, end it, or choose another --out")

    with exclusive_lock(path, fail):
        yield
