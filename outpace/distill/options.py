"""What is to be distilled, and where the parts of a run lie in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.distill.evaluate import EvaluationOptions
from outpace.distill.prompts import BUILT_IN
from outpace.distill.start import DraftShape
from outpace.distill.text import TEMPERATURES, check_temperatures
from outpace.distill.train import TrainOptions
from outpace.distill.writer import WriterOptions
from outpace.models.runtimes import RUNTIMES

STAGES = ("text", "train", "judge", "all")
TEXT, TRAINING, DRAFT = "text", "training", "draft"  # folders


@dataclass(frozen=True)
class DistillOptions:
    """What to distil, where to, and how much of it: `tokens` of the target's text, or `seconds` for all stages."""

    target: str | None
    out: Path
    prompts: Sequence[str] = (BUILT_IN,)
    stage: str = "all"
    tokens: int | None = None
    seconds: float | None = None
    epochs: float = 3.0  # how often training sees the text, where `tokens` says how much there is
    temperatures: Sequence[float] = TEMPERATURES  # at which a prompt is answered, in turn
    device: str = "cpu"
    runtime: str = "auto"  # by which the draft is judged
    evaluate: str | None = None  # the draft to judge; None: the run's own
    tasks: Sequence[str] = ()  # files of prompts to judge on; none: the held-out prompts
    shape: DraftShape = field(default_factory=DraftShape)
    writer: WriterOptions = field(default_factory=WriterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    judge: EvaluationOptions = field(default_factory=EvaluationOptions)
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
    def writes(self) -> bool:
        """Whether text is written."""
        return self.stage in ("text", "all")

    @property
    def trains(self) -> bool:
        return self.stage in ("train", "all")

    @property
    def judges(self) -> bool:
        return self.stage in ("judge", "all")

    @property
    def draft(self) -> str:
        """The draft that is judged."""
        return self.evaluate if self.evaluate is not None else str(self.out / DRAFT)
