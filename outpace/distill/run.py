"""The stages of a distillation in one folder, each to be gone on with by itself: text, training, judgement."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from outpace.core.errors import UserError
from outpace.distill.alone import alone
from outpace.distill.batches import frequent_tokens, read_samples
from outpace.distill.card import Making, model_card
from outpace.distill.check import check
from outpace.distill.evaluate import Judgement, judge
from outpace.distill.export import VOCAB_FILE, read_ids, save_ids, settled_ids, write_draft
from outpace.distill.options import DRAFT, TEXT, TRAINING, DistillOptions
from outpace.distill.progress import StageProgress
from outpace.distill.prompts import to_judge
from outpace.distill.report import PLOT, facts, licence, notes, plot, read_curve, read_state, record
from outpace.distill.start import draft_config, new_student
from outpace.distill.student import Student
from outpace.distill.text import TextPlan, write_text
from outpace.distill.train import CURVE, Trainer
from outpace.models.files.find import open_folder, resolve, shipped_model
from outpace.models.files.packed import pack
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer

TEXT_SHARE, TRAIN_SHARE = 0.45, 0.5  # of a time budget; judging takes the rest
JUDGEMENT = "judgement.json"

UNSAID = ("save_every", "seconds", "part_bytes")  # options that leave the weights alone


def distill(options: DistillOptions, progress: StageProgress) -> Judgement | None:
    """Runs the stages that `options.stage` means and keeps what they found; the judgement, where there is one."""
    found = run_stages(options, progress)
    if found is not None:
        save_evaluation(options, found)
    return found


def run_stages(options: DistillOptions, progress: StageProgress) -> Judgement | None:
    """As `distill`; the judgement is not kept yet."""
    target = resolve(options.target) if options.writes or options.trains else None
    check(options, target)
    if target is not None and options.writes:
        name = shipped_model().stem if options.target is None else Path(options.target).name
        text_stage(options, target, name, progress)
    if target is not None and options.trains:
        train_stage(options, target, progress)
    return judge_stage(options, progress) if options.judges else None


def text_stage(options: DistillOptions, target: Path, name: str, progress: StageProgress) -> None:
    """Writes the target's text, until there is enough of it or its share of the time is over."""
    spent = read_state(options.out).get("text_seconds", 0.0)
    seconds = None if options.seconds is None else max(options.seconds * TEXT_SHARE - spent, 0.0)
    plan = TextPlan(
        options.prompts, options.writer, options.tokens, seconds, options.device, temperatures=options.temperatures
    )
    started = time.monotonic()
    with alone(options.out / TEXT, "writing text"):
        try:
            write_text(target, name, options.out / TEXT, plan, lambda figures: progress("text", figures))
        finally:
            spent += time.monotonic() - started
            made = {"prompts": list(options.prompts), "temperatures": list(options.temperatures)}
            record(options.out, options.command, text_seconds=round(spent, 1), **made)


def train_stage(options: DistillOptions, target: Path, progress: StageProgress) -> Path:
    """Trains the draft from the start or from its last checkpoint, and writes it. Its folder."""
    with alone(options.out / TRAINING, "training a draft"):
        return _trained(options, target, progress)


def _trained(options: DistillOptions, target: Path, progress: StageProgress) -> Path:
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
        draft=None if options.shape.draft is None else options.shape.draft.name,
    )
    ids = None if student.ids is None else student.ids.tolist()
    with open_folder(target) as source:
        config = draft_config(source.config, options.shape, ids)
    draft = options.out / DRAFT
    trainer.run(
        lambda figures: progress("training", figures),
        save=lambda student: write_draft(draft, student, config, target, part_bytes=train.part_bytes),
    )
    return draft


def judge_stage(options: DistillOptions, progress: StageProgress) -> Judgement:
    """Judges the run's draft, or the one that is named."""
    from outpace.models.load import load_draft, load_model

    loading = LoadOptions(device=options.device, runtime=options.runtime)
    target = load_model(options.target, loading)
    small = load_draft(options.draft, target, loading)
    tasks = to_judge(options.tasks, options.prompts)
    return judge(target, small, tasks, options.judge, lambda figures: progress("judgement", figures))


def save_evaluation(options: DistillOptions, found: Judgement) -> None:
    """Writes a judgement's figures, and the model card where the draft was made here."""
    try:
        (options.out / JUDGEMENT).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
        if Path(options.draft) == options.out / DRAFT:
            write_card(options, found)
    except OSError as error:
        raise UserError(f"the judgement cannot be written to {options.out} ({error.strerror})") from error


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
    shape = options.shape
    ids = settled_ids(folder, shape.vocab)
    if ids is None and shape.vocab:
        ids = read_ids(shape.draft / VOCAB_FILE) if shape.draft is not None else _frequent(options, target)
        folder.mkdir(parents=True, exist_ok=True)
        save_ids(folder / VOCAB_FILE, ids)
    return new_student(target, shape, ids, options.train.seed, options.device)


def _frequent(options: DistillOptions, target: Path) -> Tensor:
    samples, _ = read_samples(options.out / TEXT, options.train.length)
    with open_folder(target) as source:
        size = from_dict(source.config).vocab_size
    return frequent_tokens(samples, size, options.shape.vocab, sorted(Tokenizer.from_folder(target).stop_ids))
