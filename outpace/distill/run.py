"""Runs the stages of a distillation in one folder: text, train and judge; a stopped stage can be continued."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

from outpace.core.errors import UserError
from outpace.distill.batches import Sample, frequent_tokens, read_samples
from outpace.distill.draft_shape import VOCAB_FILE, DraftShape, chosen_vocab_ids, draft_config, save_vocab_ids
from outpace.distill.evaluate import STEERED_DRAFT, TRAINED, Evaluation, evaluate, tokens_per_second
from outpace.distill.kinds import KINDS
from outpace.distill.options import DRAFT, START, STEERED, TEXT, TRAINING, DistillOptions, stage_lock
from outpace.distill.progress_display import StageProgress
from outpace.distill.prompts import collect, evaluation_prompts
from outpace.distill.report import PLOT, plot, read_state, record, write_card
from outpace.distill.shards import read_shards
from outpace.distill.student import PackedTarget, Student
from outpace.distill.text import max_prompt_length, write_text
from outpace.distill.train import CURVE, Trainer, check_state, operations_per_second, read_curve
from outpace.models.files.cache import new_file
from outpace.models.files.find import is_packed, open_folder, open_source, resolve
from outpace.models.files.gguf.writer import TABLE_KIND, read_fields, write_file
from outpace.models.files.pairs import shipped_draft
from outpace.models.heads.config import STEERING
from outpace.models.heads.files import kind_of_head
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded
from outpace.models.text.tokenizer import Tokenizer, tokenizer_of

TEXT_SHARE, TRAIN_SHARE = 0.45, 0.5  # of a time budget; the evaluation takes the rest
STEERED_SHARE = 0.3  # part of the time for training that a steering gets, if one is trained too
# For targets with more than LARGE_VOCAB tokens, a standalone draft without options of its shape scores only the
# REDUCED_VOCAB most frequent ones: on a CPU the logits of rare tokens would take most of a training step.
LARGE_VOCAB, REDUCED_VOCAB = 65_536, 16_384
EVALUATION = "judgement.json"
UNRECORDED = ("save_every", "seconds")  # training options that do not affect the weights


class KindChoice(NamedTuple):
    """The kind of draft to train, whether to train a steering of it too, and the reason: "" if there was no choice."""

    kind: str
    steers: bool
    why: str


def choose_kind(out: Path, device: str, target_name: str, is_open: bool = True, is_shaped: bool = False) -> KindChoice:
    """Choose what to train for the target of this name into the folder `out`.

    `is_open`: whether the kind of a new training is to be chosen; otherwise it is standalone. `is_shaped`: whether
    flags shape the draft.
    """
    state = read_state(out)
    if (known := state.get("kind")) is not None:
        return KindChoice(
            str(known), not is_shaped and state.get("steers") is True, f"{out} holds a training of this kind"
        )
    if not is_open:
        return KindChoice("standalone", False, "")
    if not device.startswith("cpu"):
        return KindChoice(
            "eagle3", False, "a GPU writes enough text for a head, whose draft step is cheap next to a target pass"
        )
    if shipped_draft(target_name) is not None:
        return KindChoice(
            "steered", False, f"a draft comes with outpace for {target_name}, and steering starts from it"
        )
    why = "on a CPU a small model learns most from little text; the target's hidden states may steer it"
    return KindChoice("standalone", True, why)


def distill(options: DistillOptions, progress: StageProgress) -> Evaluation | None:
    """Run the stages selected by `options.stage`; return the evaluation, which is not saved, if there is one."""
    target = None if options.stage == "judge" else resolve(options.target)
    options = check(options, target)
    if target is not None and options.stage == START:
        with stage_lock(options.out / TRAINING, "training a draft"):  # this stage writes a draft too
            start_stage(options, target)
    if target is not None and options.runs("text"):
        text_stage(options, target, progress)
    if target is not None and options.runs("train"):
        with stage_lock(options.out / TRAINING, "training a draft"):
            train_stage(options, target, progress)
            if options.steers:
                train_stage(_steering(options), target, progress)
    return evaluation_stage(options, progress) if options.runs("judge") else None


def check(options: DistillOptions, target: Path | None) -> DistillOptions:
    """Raise UserError for what would stop any of the selected stages; create the run's folder. Return the options with
    the layers whose hidden states the draft reads, and which the text holds.

    `target` is the target's folder; None if no text is written and nothing is trained.
    """
    texts = collect(options.prompts) if options.runs("text") else []
    if target is not None:
        with open_folder(target) as checkpoint:
            sizes = checkpoint.read_config()
            if options.runs("text"):
                max_prompt_length(options.writer, sizes.max_positions)
            taps = options.taps_of(checkpoint.config, sizes)
            read = KINDS["steered"].default_taps(sizes.num_layers) if options.steers else taps
            stored = read if options.stores_taps else ()
            options = replace(options, taps=taps, writer=replace(options.writer, taps=stored))
            if options.steers and options.shape == DraftShape() and sizes.vocab_size > LARGE_VOCAB:
                options = replace(options, shape=DraftShape(vocab=REDUCED_VOCAB))
            if options.runs("train") or options.stage == START:
                shape, folder = options.shape, options.out / TRAINING
                if shape.vocab > sizes.vocab_size:
                    raise UserError(f"vocab is {shape.vocab}, the target has {sizes.vocab_size} tokens")
                trained = KINDS[options.kind].trained_shapes(checkpoint, shape, taps)
                chosen_vocab_ids(folder, shape.vocab)
                check_state(folder, trained)
                if options.kind == "steered":  # steps run the draft too, which is not trained
                    trained |= Student.trained_shapes(checkpoint, shape)
                if options.runs("train") and options.budget is not None and not (folder / CURVE).exists():
                    weights = sum(map(prod, trained.values())) + (shape.vocab or sizes.vocab_size) * sizes.hidden_size
                    _check_budget(options, options.budget, weights)
        if options.runs("text"):
            _check_lengths(options, texts, Tokenizer.from_folder(target), sizes.max_positions)
    if options.runs("judge"):
        evaluation_prompts(options.tasks, options.prompts)
        if options.evaluate is None and not options.runs("train") and not (options.out / DRAFT).is_dir():
            raise UserError(f"{options.out} holds no draft yet: run `outpace distill --stage train` first")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{options.out} cannot be made ({error.strerror})") from error
    return options


def _check_budget(options: DistillOptions, seconds: float, weights: int) -> None:
    """Raise UserError if the budget of a new training is too short for its warm-up steps. Their time is estimated from
    the number of operations, of as many weights, and the measured speed of a matrix product."""
    train = options.train
    operations = 6.0 * weights * train.rows * train.length  # forward and backward
    share = TRAIN_SHARE * (1.0 - STEERED_SHARE if options.steers else 1.0)
    min_seconds = train.warmup * operations / operations_per_second(options.device) / share
    if seconds < min_seconds:
        raise UserError(
            f"the budget is {seconds:g} s, it must be at least about {min_seconds:.0f} s: a training step takes about"
            f" {min_seconds * share / train.warmup:.2g} s, and the first {train.warmup} only raise the learning rate;"
            " give a longer --budget, a smaller --vocab or fewer --layers"
        )


def _check_lengths(options: DistillOptions, texts: Sequence[str], tokenizer: Tokenizer, context: int) -> None:
    """Check that some answers fit into a training row, and all evaluation prompts into the target's context."""
    encode = tokenizer.encode_prompt
    if options.runs("train") and not any(len(encode(text)) < options.train.length for text in texts):
        raise UserError(f"length is {options.train.length}, no prompt and first token of an answer fit into so few")
    tasks = evaluation_prompts(options.tasks, options.prompts) if options.runs("judge") else {}
    for task, prompts in tasks.items():
        for text in prompts[: options.evaluation.prompts]:
            count = len(encode(text))
            if count >= context:
                raise UserError(
                    f"the task {task} has a prompt of {count} tokens, the target's context holds {context}:"
                    f" {text[:40]!r}..."
                )


def start_stage(options: DistillOptions, target: Path) -> None:
    """Write the untrained draft: the target without some of its layers, and without a window."""
    if options.shape.vocab:
        raise UserError("vocab is chosen by the target's text, leave it out of --stage start")
    if (options.out / DRAFT).exists():
        raise UserError(f"{options.out / DRAFT} exists already, name another --out for the target's layers")
    with open_folder(target) as source:
        config = draft_config(source.config, options.shape)
    del config["outpace"]["draft_window"]
    Student.new(target, options.shape, None).save(options.out / DRAFT, config, target)


def text_stage(options: DistillOptions, target: Path, progress: StageProgress) -> None:
    """Write the target's text, until there is enough of it or its share of the time is used up."""
    spent = read_state(options.out).get("text_seconds", 0.0)
    seconds = None if options.budget is None else max(options.budget * TEXT_SHARE - spent, 0.0)
    started = time.monotonic()
    with stage_lock(options.out / TEXT, "writing text"):
        try:
            write_text(target, options, seconds, lambda figures: progress("text", figures))
        finally:
            spent += time.monotonic() - started
            changes = {"prompts": list(options.prompts), "temperatures": list(options.temperatures)}
            record(options.out, options.command, text_seconds=round(spent, 1), **changes)


def train_stage(options: DistillOptions, target: Path, progress: StageProgress) -> None:
    """Train the draft from the start or from its last checkpoint, and write it."""
    text, folder, train = options.text_folder, options.out / TRAINING, options.train
    if options.budget is not None:
        share = 1.0 - STEERED_SHARE if options.steers else 1.0
        train = replace(train, seconds=options.budget * TRAIN_SHARE * share)
    samples, _ = read_samples(text, train.length, options.taps or ())
    if train.seconds is None and train.tokens is None:
        train = replace(train, tokens=int(options.epochs * sum(len(sample.top_ids) for sample in samples)))
    student = _new_student(options, target, samples)
    target_taps = PackedTarget(target, options.taps, options.device).taps if options.taps else None
    trainer = Trainer(student, text, folder, train, target_taps)
    trainer.resume()
    record(
        options.out,
        options.command,
        training={name: value for name, value in asdict(train).items() if name not in UNRECORDED},
        draft=None if options.shape.draft is None else options.shape.draft.name,
        kind=options.kind,
        steers=options.steers,
    )
    origin = {**next(read_shards(text)).origin, **({"target": options.target} if options.target else {})}
    trainer.run(
        lambda figures: progress("steering" if options.kind == "steered" else "training", figures),
        save=lambda student: student.write(options.out / DRAFT, target, options.shape, origin),
    )


def _steering(options: DistillOptions) -> DistillOptions:
    """Return the options of the training of a steering, on top of the finished draft of this run."""
    out, draft = options.out / STEERED, DraftShape.of_draft(options.out / DRAFT)
    out.mkdir(exist_ok=True)
    return replace(
        options,
        out=out,
        stage="train",
        budget=None if options.budget is None else options.budget * STEERED_SHARE,
        kind="steered",
        steers=False,
        shards=options.text_folder,
        taps=options.writer.taps,
        shape=draft,
        train=replace(options.train, learning_rate=KINDS["steered"].learning_rate),
    )


def _new_student(options: DistillOptions, target: Path, samples: Sequence[Sample]) -> Student:
    """Return an untrained draft; its reduced vocabulary is chosen once, from the text written so far."""
    shape, folder = options.shape, options.out / TRAINING
    ids = chosen_vocab_ids(folder, shape.vocab)
    if ids is None and shape.vocab:
        if shape.draft is not None:
            ids = KINDS[options.kind].vocab_ids(shape.draft)
        else:
            with open_folder(target) as source:
                size = from_dict(source.config).vocab_size
            ids = frequent_tokens(samples, size, shape.vocab, sorted(Tokenizer.from_folder(target).stop_ids))
        if ids is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_vocab_ids(folder / VOCAB_FILE, ids)
    return KINDS[options.kind].new(target, shape, ids, options.device, options.taps or ())


def evaluation_stage(options: DistillOptions, progress: StageProgress) -> Evaluation:
    """Evaluate the run's draft, or the one named by the options."""
    from outpace.models.load import load_draft, load_model

    loading = LoadOptions(device=options.device, runtime=options.runtime)
    target, tasks = load_model(options.target, loading), evaluation_prompts(options.tasks, options.prompts)
    drafts, speeds = dict[str, Loaded](), dict[str, float]()
    if options.stage == "all":
        folders, before = {TRAINED: options.draft}, options.shape.draft or shipped_draft(options.target_name)
        if options.steers:
            folders[STEERED_DRAFT] = str(options.out / STEERED / DRAFT)
        if before is not None:
            folders[f"the draft {before if Path(before).name == DRAFT else Path(before).name}"] = str(before)
        drafts = {name: load_draft(folder, target, loading) for name, folder in folders.items()}
        prompts = [text for row in zip_longest(*tasks.values()) for text in row if text]  # the tasks take turns
        speeds = tokens_per_second(target, drafts, prompts, options.evaluation.seed)
        if speeds.get(STEERED_DRAFT, 0.0) > speeds[TRAINED]:
            with new_file(options.out / DRAFT / STEERING, "the draft stays as it is, without the steering") as part:
                shutil.copyfile(options.out / STEERED / DRAFT / STEERING, part)
            del drafts[TRAINED]  # it has a steering now
    draft = drafts[TRAINED] if TRAINED in drafts else load_draft(options.draft, target, loading)
    found = evaluate(target, draft, tasks, options.evaluation, lambda figures: progress("judgement", figures))
    return replace(found, tokens_per_second=speeds)


def save_evaluation(options: DistillOptions, found: Evaluation) -> None:
    """Write an evaluation's figures, and the model card if the draft was made by this run."""
    try:
        (options.out / EVALUATION).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
        if Path(options.draft) == options.out / DRAFT:
            write_card(options.out, found, options.target)
    except OSError as error:
        raise UserError(f"the judgement cannot be written to {options.out} ({error.strerror})") from error


def write_plot(options: DistillOptions, found: Evaluation) -> Path:
    """Write the plot; for the draft made by this run, also to its folder and model card. UserError if that fails."""
    file, draft = options.out / PLOT, options.out / DRAFT
    plot(found, read_curve(options.out / TRAINING / CURVE), file)
    if found.draft == str(draft):
        shutil.copyfile(file, draft / PLOT)
        write_card(options.out, found, options.target)
    return file


def write_gguf(run: Path, target: Path, file: Path) -> None:
    """Write a run's draft, or a draft of its own folder, as a GGUF file for llama.cpp, with 8-bit weights.

    `target`: the target's folder or .gguf file; the tokenizer of a .gguf file is copied. UserError if the draft is not
    the target's, or if `file` exists.
    """
    if file.exists():
        raise UserError(f"{file} already exists")
    draft = run / DRAFT if (run / DRAFT).is_dir() else run
    if not (draft / "config.json").is_file():
        raise UserError(f"{run} holds no draft: --out must be the folder of a run or of a draft")
    if kind_of_head(draft) is not None:
        raise UserError(f"{draft} is a head, which llama.cpp cannot run as a draft model")
    with open_source(target) as source, open_folder(draft, target) as checkpoint:
        if differs := tokenizer_of(source).tokens_differ(tokenizer_of(checkpoint)):
            raise UserError(f"the draft {draft} does not fit the target {target}: {differs}")
        tokenizer_files = target if target.is_file() or is_packed(draft) else draft
        fields = read_fields(tokenizer_files, int(checkpoint.config["vocab_size"]))
        write_file(checkpoint, TABLE_KIND, file, {"general.name": draft.resolve().name} | fields)
