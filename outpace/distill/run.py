"""The stages of a distillation in one folder, each to be gone on with by itself: text, training, judgement."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.distill import prompts
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.card import Making, model_card
from outpace.distill.export import VOCAB_FILE, read_ids, save_ids, write_draft
from outpace.distill.facts import facts, licence, notes, read_state, record
from outpace.distill.judge import Judgement, JudgeOptions, judge
from outpace.distill.numbering import is_held_out, number
from outpace.distill.progress import StageProgress
from outpace.distill.report import PLOT, plot, read_curve
from outpace.distill.start import Shape, draft_config, new_student
from outpace.distill.student import Student
from outpace.distill.text import TEMPERATURES, TextPlan, write_text
from outpace.distill.train import CURVE, Trainer, TrainOptions
from outpace.distill.writer import WriterOptions
from outpace.models.files.checkpoint import read_json
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.packed import pack
from outpace.models.options import LoadOptions
from outpace.models.runtimes import RUNTIMES
from outpace.models.text.tokenizer import Tokenizer

STAGES = ("text", "train", "judge", "all")
TEXT_SHARE, TRAIN_SHARE = 0.45, 0.5  # of a time budget; judging takes the rest
TEXT, TRAINING, DRAFT = "text", "training", "draft"  # folders
JUDGEMENT = "judgement.json"

UNSAID = ("save_every", "seconds")  # options that leave the weights alone


@dataclass(frozen=True)
class DistillOptions:
    """What to distil, where to, and how much of it: `tokens` of the target's text, or `seconds` for all stages."""

    target: str | None
    out: Path
    prompts: Sequence[str] = (prompts.BUILT_IN,)
    stage: str = "all"
    tokens: int | None = None
    seconds: float | None = None
    epochs: float = 3.0  # how often training sees the text, where `tokens` says how much there is
    temperatures: Sequence[float] = TEMPERATURES  # at which a prompt is answered, in turn
    device: str = "cpu"
    runtime: str = "auto"  # by which the draft is judged
    tasks: Sequence[str] = ()  # files of prompts to judge on; none: the held-out prompts
    shape: Shape = field(default_factory=Shape)
    writer: WriterOptions = field(default_factory=WriterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    judge: JudgeOptions = field(default_factory=JudgeOptions)
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
            raise UserError("say how much to distil: a budget such as 2h, or a number of tokens")
        check_range("epochs", self.epochs, 0.001, 10000.0)


def distill(options: DistillOptions, progress: StageProgress) -> Judgement | None:
    """Runs the stages that `options.stage` means; the judgement, where there is one."""
    target = resolve(options.target)
    name = shipped_model().stem if options.target is None else Path(options.target).name
    if options.stage in ("text", "all"):
        text_stage(options, target, name, progress)
    if options.stage in ("train", "all"):
        train_stage(options, target, progress)
    if options.stage in ("judge", "all"):
        return judge_stage(options, options.out / DRAFT, progress)
    return None


def text_stage(options: DistillOptions, target: Path, name: str, progress: StageProgress) -> None:
    """Writes the target's text, until there is enough of it or its share of the time is over."""
    spent = read_state(options.out).get("text_seconds", 0.0)
    seconds = None if options.seconds is None else max(options.seconds * TEXT_SHARE - spent, 0.0)
    plan = TextPlan(
        options.prompts, options.writer, options.tokens, seconds, options.device, temperatures=options.temperatures
    )
    started = time.monotonic()
    try:
        write_text(target, name, options.out / TEXT, plan, lambda figures: progress("text", figures))
    finally:
        if options.out.is_dir():
            spent += time.monotonic() - started
            made = {"prompts": list(options.prompts), "temperatures": list(options.temperatures)}
            record(options.out, options.command, text_seconds=round(spent, 1), **made)


def train_stage(options: DistillOptions, target: Path, progress: StageProgress) -> Path:
    """Trains the draft from the start or from its last checkpoint, and writes it. Its folder."""
    text, folder = options.out / TEXT, options.out / TRAINING
    train = options.train
    if options.seconds is not None:
        train = replace(train, seconds=options.seconds * TRAIN_SHARE)
    samples, _ = read_samples(text, train.length)
    if train.seconds is None and train.tokens is None:
        train = replace(train, tokens=int(options.epochs * sum(len(sample.top_ids) for sample in samples)))
    student = _student(options, target, folder)
    trainer = Trainer(student, text, folder, train)
    trainer.resume()
    record(
        options.out,
        options.command,
        training={name: value for name, value in asdict(train).items() if name not in UNSAID},
    )
    ids = None if student.ids is None else student.ids.tolist()
    config = draft_config(read_json(target / "config.json"), options.shape, ids)
    draft = options.out / DRAFT
    trainer.run(
        lambda figures: progress("training", figures), save=lambda student: write_draft(draft, student, config, target)
    )
    return draft


def judge_stage(options: DistillOptions, draft: Path | str, progress: StageProgress) -> Judgement:
    """Judges a draft; writes figures, plot and model card where it was made here."""
    from outpace.models.load import load_draft, load_model

    loading = LoadOptions(device=options.device, runtime=options.runtime)
    target = load_model(options.target, loading)
    small = load_draft(str(draft), target, loading)
    found = judge(target, small, _tasks(options), options.judge, lambda figures: progress("judgement", figures))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / JUDGEMENT).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if Path(draft) == options.out / DRAFT:
        write_card(options, found)
    return found


def write_card(options: DistillOptions, found: Judgement) -> None:
    """The model card of the draft that was made here; it shows the plot if that is there."""
    draft, curve = options.out / DRAFT, options.out / TRAINING / CURVE
    making = Making(
        facts(options.out, draft, curve),
        licence(options.target),
        notes(options.out),
        read_state(options.out).get("commands", ()),
        read_curve(curve),
        (draft / PLOT).is_file(),
    )
    (draft / "README.md").write_text(model_card(found, making), encoding="utf-8")


def write_plot(options: DistillOptions, found: Judgement) -> Path:
    """The plot beside the other results, and in the draft's folder where that is the one that was judged; UserError
    where matplotlib is not installed."""
    file, draft = options.out / PLOT, options.out / DRAFT
    plot(found, read_curve(options.out / TRAINING / CURVE), file)
    if found.draft == str(draft):
        shutil.copyfile(file, draft / PLOT)
        write_card(options, found)
    return file


def pack_run(run: Path, target: Path, out: Path) -> None:
    """Packs a run's draft with its card, plot, figures and learning curve; `run` may also be a draft's own folder."""
    draft = run / DRAFT if (run / DRAFT).is_dir() else run
    pack(draft, target, out, [run / name for name in (JUDGEMENT, PLOT, f"{TRAINING}/{CURVE}")])


def _student(options: DistillOptions, target: Path, folder: Path) -> Student:
    """An untrained draft; the tokens that it writes are settled once, from the text that is there."""
    ids: Tensor | None = None
    if options.shape.vocab:
        file = folder / VOCAB_FILE
        if file.exists():
            ids = read_ids(file)
            if len(ids) != options.shape.vocab:
                raise UserError(
                    f"{folder} holds a draft of {len(ids)} tokens, not {options.shape.vocab}; choose another"
                )
        else:
            ids = _frequent(options, target)
            folder.mkdir(parents=True, exist_ok=True)
            save_ids(file, ids)
    return new_student(target, options.shape, ids, options.train.seed, options.device)


def _frequent(options: DistillOptions, target: Path) -> Tensor:
    samples, _ = read_samples(options.out / TEXT, options.train.length)
    size = read_json(target / "config.json")["vocab_size"]
    if options.shape.vocab > size:
        raise UserError(f"vocab is {options.shape.vocab}, the target has {size} tokens")
    return frequent_tokens(samples, size, options.shape.vocab, sorted(Tokenizer.from_folder(target).stop_ids))


def _tasks(options: DistillOptions) -> dict[str, list[str]]:
    """Prompts by task: one a file, or those that were held out."""
    if options.tasks:
        return {Path(file).stem: prompts.read_prompts(Path(file)) for file in options.tasks}
    held_out = [text for text in prompts.collect(options.prompts) if is_held_out(text)]
    if not held_out:
        raise UserError("none of the prompts is held out, so there is nothing to judge on: name files with --tasks")
    return {"held out": sorted(held_out, key=number)}
