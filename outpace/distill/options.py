"""Options of a distillation, the layout of its folder, and the lock of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.options import CheckedOptions, number, one_of, whole
from outpace.distill.draft_shape import DraftShape
from outpace.distill.evaluate import EvaluationOptions
from outpace.distill.kinds import KINDS
from outpace.distill.prompts import BUILT_IN
from outpace.distill.train import TrainOptions
from outpace.distill.writer import WriterOptions, tap_list
from outpace.models.files.cache import exclusive_lock
from outpace.models.files.find import shipped_model
from outpace.models.heads.files import kind_of_head, open_head
from outpace.models.heads.reader import read_head
from outpace.models.heads.steering import open_steering
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.options import RUNTIMES

START = "start"  # writes the draft as training begins with it; not among "all"
STAGES = ("text", "train", "judge", "all", START)
TEMPERATURES = (0.0, 0.8, 1.0)
TEXT, TRAINING, DRAFT, STEERED = "text", "training", "draft", "steered"  # folders; the last: the steering's run


@dataclass(frozen=True)
class DistillOptions(CheckedOptions):
    """What to distill, the run's folder `out`, and how much: `tokens` of the target's text, or `budget` seconds."""

    target: str | None
    out: Path
    prompts: Sequence[str] = (BUILT_IN,)
    stage: str = one_of("all", STAGES)
    tokens: int | None = whole(None, 1)
    budget: float | None = number(None, 1.0)  # seconds
    epochs: float = number(3.0, 0.001, 10000.0)  # passes over the text, where `tokens` limits the text
    temperatures: Sequence[float] = TEMPERATURES  # of the passes over the prompts, in rotation
    device: str = "cpu"
    runtime: str = one_of("auto", RUNTIMES)  # of the evaluation
    evaluate: str | None = None  # the draft to evaluate; None: the run's own
    tasks: Sequence[str] = ()  # files of prompts to evaluate on; none: the held-out prompts
    kind: str = one_of("standalone", list(KINDS))
    steers: bool = False  # after a standalone draft, train a steering of it, and keep it if it is faster
    shards: Path | None = None  # folder of the text; None: the run's own
    taps: tuple[int, ...] | None = None  # layers whose hidden states the draft reads; None: those of draft or kind
    shape: DraftShape = field(default_factory=DraftShape)
    writer: WriterOptions = field(default_factory=WriterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    command: str = ""  # for the model card

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps and self.kind == "standalone" and self.stage != "text":
            raise UserError(
                f"taps is {tap_list(self.taps)}, and the kind standalone reads none: leave it out, or name --stage text"
                " or --kind eagle3"
            )
        if self.taps and self.kind == "standalone" and not self.stores_taps:
            raise UserError(f"taps is {tap_list(self.taps)}, and on {self.device} the text holds none: leave it out")
        if self.stage == START and self.kind != "standalone":
            raise UserError(f"--stage start writes a draft of the kind standalone, not {self.kind}")
        if self.tokens is None and self.budget is None and self.runs("text"):
            raise UserError("say how much to distil: a time (--budget 2h) or a number of tokens (--tokens 100000)")
        if not self.temperatures:
            raise UserError("temperatures is empty, at least one is needed")
        for temperature in self.temperatures:
            check_range("a temperature", temperature, 0.0, 10.0)

    def runs(self, stage: str) -> bool:
        return self.stage in (stage, "all")

    @property
    def stores_taps(self) -> bool:
        """Whether the text holds hidden states. On a GPU training computes them faster than a disk would be read."""
        return self.device.startswith("cpu")

    def taps_of(self, config: Mapping[str, Any], sizes: LlamaConfig) -> tuple[int, ...]:
        """Return the layers whose hidden states the draft reads: the named ones, those of the draft whose training
        continues, or those of the kind. UserError for layers that the target, with this config.json, does not have."""
        num_layers, taps, draft = sizes.num_layers, self.taps, self.shape.draft
        if taps is None and draft is not None and kind_of_head(draft) is not None:
            taps = read_head(open_head(draft), config, sizes.max_positions, num_layers).taps
        elif taps is None and draft is not None and self.kind == "steered" and (steering := open_steering(draft)):
            taps = steering.taps
        taps = KINDS[self.kind].default_taps(num_layers) if taps is None else taps
        for layer in taps:
            check_whole("a layer of taps", layer, 0, num_layers)
        if list(taps) != sorted(set(taps)):
            raise UserError(f"taps is {tap_list(taps)}, it must be different layers in ascending order")
        return taps

    @property
    def text_folder(self) -> Path:
        return self.out / TEXT if self.shards is None else self.shards

    @property
    def target_name(self) -> str:
        return shipped_model().stem if self.target is None else Path(self.target).name

    @property
    def draft(self) -> str:
        return self.evaluate if self.evaluate is not None else str(self.out / DRAFT)


def stage_lock(path: Path, work: str) -> AbstractContextManager[bool]:
    """Return a lock on `path`; UserError on entering if another process holds it, whose files it would overwrite."""

    def fail() -> None:
        raise UserError(f"another process is {work} in {path}: wait for it, end it, or choose another --out")

    return exclusive_lock(path, fail)
