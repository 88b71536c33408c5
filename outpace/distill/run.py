"""The stages of a distillation in one folder, each to be gone on with by itself: text, training, judgement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.distill import prompts
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.export import VOCAB_FILE, read_ids, save_ids, write_draft
from outpace.distill.judge import Judgement, JudgeOptions, judge
from outpace.distill.report import PLOT, model_card, plot, read_curve
from outpace.distill.start import Shape, draft_config, new_student
from outpace.distill.student import Student
from outpace.distill.text import TextPlan, write_text
from outpace.distill.train import CURVE, Trainer, TrainOptions
from outpace.distill.writer import WriterOptions
from outpace.models.checkpoint import read_json
from outpace.models.find import resolve, shipped_model
from outpace.models.tokenizer import Tokenizer

STAGES = ("text", "train", "judge", "all")
TEXT_SHARE, TRAIN_SHARE = 0.45, 0.5  # of a time budget; judging takes the rest
TEXT, TRAINING, DRAFT = "text", "training", "draft"  # folders
JUDGEMENT, STATE = "judgement.json", "run.json"

Report = Callable[[str, dict[str, float]], None]


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
    device: str = "cpu"
    tasks: Sequence[str] = ()  # files of prompts to judge on; none: the held-out prompts
    shape: Shape = field(default_factory=Shape)
    writer: WriterOptions = field(default_factory=WriterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    judge: JudgeOptions = field(default_factory=JudgeOptions)
    command: str = ""  # for the model card

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise unknown("stage", self.stage, STAGES)
        if self.tokens is not None:
            check_whole("tokens", self.tokens, 1)
        if self.seconds is not None:
            check_range("budget", self.seconds, 1.0)
        if self.tokens is None and self.seconds is None and self.stage in ("text", "all"):
            raise UserError("say how much to distil: a budget such as 2h, or a number of tokens")
        check_range("epochs", self.epochs, 0.001, 10000.0)


def distill(options: DistillOptions, report: Report) -> Judgement | None:
    """Runs the stages that `options.stage` means; the judgement, where there is one."""
    target = resolve(options.target)
    name = shipped_model().stem if options.target is None else Path(options.target).name
    if options.stage in ("text", "all"):
        text_stage(options, target, name, report)
    if options.stage in ("train", "all"):
        train_stage(options, target, report)
    if options.stage in ("judge", "all"):
        return judge_stage(options, options.out / DRAFT, report)
    return None


def text_stage(options: DistillOptions, target: Path, name: str, report: Report) -> None:
    """Writes the target's text, until there is enough of it or its share of the time is over."""
    state_file = options.out / STATE
    spent = read_json(state_file).get("text_seconds", 0.0) if state_file.exists() else 0.0
    seconds = None if options.seconds is None else max(options.seconds * TEXT_SHARE - spent, 0.0)
    plan = TextPlan(options.prompts, options.writer, options.tokens, seconds, options.device)
    if options.device == "cpu" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        plan = replace(plan, dtype=torch.float32)
    started = time.monotonic()
    try:
        write_text(target, name, options.out / TEXT, plan, lambda figures: report("text", figures))
    finally:
        if options.out.is_dir():
            spent += time.monotonic() - started
            state_file.write_text(json.dumps({"text_seconds": round(spent, 1)}) + "\n", encoding="utf-8")


def train_stage(options: DistillOptions, target: Path, report: Report) -> Path:
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
    ids = None if student.ids is None else student.ids.tolist()
    config = draft_config(read_json(target / "config.json"), options.shape, ids)
    draft = options.out / DRAFT
    trainer.run(
        lambda figures: report("training", figures), save=lambda student: write_draft(draft, student, config, target)
    )
    return draft


def judge_stage(options: DistillOptions, draft: Path | str, report: Report) -> Judgement:
    """Judges a draft; writes figures, plot and model card where it was made here."""
    from outpace.assemble import load_draft, load_model

    target = load_model(options.target, device=options.device)
    small = load_draft(str(draft), target, device=options.device)
    found = judge(target, small, _tasks(options), options.judge, lambda figures: report("judgement", figures))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / JUDGEMENT).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if Path(draft) == options.out / DRAFT:
        card = model_card(found, _facts(options, Path(draft)), _licence(options.target))
        (Path(draft) / "README.md").write_text(card, encoding="utf-8")
    return found


def write_plot(options: DistillOptions, found: Judgement) -> Path:
    """The plot beside the other results; UserError where matplotlib is not installed."""
    file = options.out / PLOT
    plot(found, read_curve(options.out / TRAINING / CURVE), file)
    return file


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
    held_out = [text for text in prompts.collect(options.prompts) if prompts.is_held_out(text)]
    if not held_out:
        raise UserError("none of the prompts is held out, so there is nothing to judge on: name files with --tasks")
    return {"held out": sorted(held_out, key=prompts.number)}


def _facts(options: DistillOptions, draft: Path) -> dict[str, str]:
    config = read_json(draft / "config.json")
    curve = read_curve(options.out / TRAINING / CURVE)
    facts = {"layers": str(config["num_hidden_layers"]), "width": str(config["hidden_size"])}
    facts |= {"from the target's layers": str(config.get("outpace", {}).get("target_layers") or "none, fresh weights")}
    if "draft_vocab_size" in config.get("outpace", {}):
        facts["tokens that it writes"] = f"{config['outpace']['draft_vocab_size']} of {config['vocab_size']}"
    facts["prompts"] = ", ".join(Path(name).name for name in options.prompts)
    if curve:
        last = curve[-1]
        facts["the target's text"] = f"{last['text_tokens']:,} answer tokens, greedy and at temperatures 0.8 and 1"
        facts["trained on"] = (
            f"{last['tokens']:,} answer tokens, {last['step']:,} steps, {last['seconds'] / 60:.0f} min"
        )
        facts["held-out agreement"] = f"{last['top1']:.3f} (likeliest token, the target's own text before it)"
    facts["losses"] = str(asdict(options.train.loss))
    return facts | ({"made by": f"`{options.command}`"} if options.command else {})


def _licence(target: str | None) -> str | None:
    """As the target's own files name it: the .gguf file's header, or the front matter of its card."""
    path = shipped_model() if target is None else Path(target).expanduser()
    if path.is_file():
        from outpace.models.gguf_header import open_gguf

        with open_gguf(path) as header:
            found = header.metadata.get("general.license")
        return found if isinstance(found, str) else None
    card = resolve(target) / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:40] if card.is_file() else []
    named = [line.split(":", 1)[1].strip().strip("\"'") for line in lines if line.startswith("license:")]
    return named[0] if named and named[0] else None
