"""`outpace distill`: train a draft for a target on the target's own text; or write prompts, evaluate, pack, unpack."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import Json, Target
from outpace.cli.process import sigterm_as_interrupt
from outpace.cli.sampling_options import Seed
from outpace.core.errors import UserError, check_range, check_whole

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Convert a time such as 90s, 30m or 1.5h to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise UserError(f"budget is {text!r}, it must be a time such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2]]


AMOUNT, SHAPE, TRAINING, EVALUATION, PACKING = "Amount", "Draft", "Training", "Evaluation", "Packing"


@dataclass(frozen=True)
class TextFlags:
    """The text to train on."""

    prompts: Annotated[
        list[str] | None, flag("Prompts: a .jsonl file, hub:NAME or builtin; may be repeated.", AMOUNT)
    ] = None
    write_prompts: Annotated[
        int | None,
        flag("Let the target write this many prompts to prompts.jsonl in --out, and do nothing else.", AMOUNT),
    ] = None
    begin: Annotated[
        list[str] | None,
        flag("With --write-prompts, how they begin: 'Write a Python function'; several are used alternately.", AMOUNT),
    ] = None
    budget: Annotated[str | None, flag("Time for text and training together: 90s, 30m, 2h.", AMOUNT)] = None
    tokens: Annotated[
        int | None,
        flag("Instead of a budget: tokens of text that the target writes; started answers are finished.", AMOUNT),
    ] = None
    epochs: Annotated[float, flag("How often training goes through the text.", AMOUNT)] = 3.0
    answer_tokens: Annotated[int, flag("The longest answer, in tokens.", AMOUNT)] = 256
    rows: Annotated[
        int | None,
        flag("Answers that the target writes at once; the default is 128 on a CPU and at most 1,024 on a GPU.", AMOUNT),
    ] = None
    temperatures: Annotated[
        str,
        flag("Temperatures of the answers, used alternately; one that is named twice gets twice the share.", AMOUNT),
    ] = "0,0.8,1"
    stage: Annotated[str, flag("The stage to run: text, train, judge or all.", AMOUNT)] = "all"


@dataclass(frozen=True)
class ShapeFlags:
    """The shape of the draft."""

    layers: Annotated[
        str, flag("Layers of the draft: a number, or the indices of target layers, as in 0,14,29.", SHAPE)
    ] = "3"
    hidden: Annotated[int | None, flag("Width of the draft; the default is the target's.", SHAPE)] = None
    init: Annotated[
        str,
        flag("Start from the target's layers (layers), random weights (fresh) or a draft (folder, or shipped).", SHAPE),
    ] = "layers"
    vocab: Annotated[int, flag("Size of a reduced vocabulary, the most frequent tokens; 0: all tokens.", SHAPE)] = 0


@dataclass(frozen=True)
class TrainingFlags:
    """The training."""

    learning_rate: Annotated[float, flag("The highest learning rate.", TRAINING)] = 1e-3
    cooldown: Annotated[float, flag("Share of training over which the learning rate falls.", TRAINING)] = 1.0
    warmup: Annotated[int, flag("Steps over which the learning rate rises.", TRAINING)] = 40
    batch_rows: Annotated[
        int | None, flag("Rows of --length tokens in a step; the default is 1 on a CPU and 8 elsewhere.", TRAINING)
    ] = None
    length: Annotated[int, flag("Tokens in a row.", TRAINING)] = 512
    divergence: Annotated[
        str, flag("Divergence from the target: forward_kl, reverse_kl or total_variation.", TRAINING)
    ] = "forward_kl"
    token_weight: Annotated[float, flag("Weight of the cross-entropy in the loss.", TRAINING)] = 0.2
    distribution_weight: Annotated[float, flag("Weight of the divergence in the loss.", TRAINING)] = 0.8
    save_every: Annotated[float, flag("Seconds between checkpoints.", TRAINING)] = 180.0
    part_size: Annotated[
        float | None,
        flag("Maximum size of a file of a checkpoint and of the draft, in MB; larger ones are split.", TRAINING),
    ] = None


@dataclass(frozen=True)
class EvaluationFlags:
    """The evaluation."""

    evaluate: Annotated[
        str | None, flag("Evaluate this draft (a folder, or shipped), and do nothing else.", EVALUATION)
    ] = None
    tasks: Annotated[
        list[str] | None, flag("A .jsonl file of prompts to evaluate on; may be repeated.", EVALUATION)
    ] = None
    judged: Annotated[int, flag("Prompts of each task that are evaluated.", EVALUATION)] = 20
    runtime: Annotated[
        str, flag("Runtime of both models in the evaluation: auto, llama, native or transformers.", EVALUATION)
    ] = "auto"


@dataclass(frozen=True)
class PackingFlags:
    """Packing removes the parts of a draft that its target has too; both directions write to `--out`."""

    pack: Annotated[
        str | None,
        flag("Store this run's draft without its target's embeddings; with --tasks it is evaluated first.", PACKING),
    ] = None
    unpack: Annotated[
        str | None, flag("Give this packed draft its embeddings back, for transformers and other engines.", PACKING)
    ] = None


CPU_ANSWERS, GPU_ANSWERS = 128, 1024  # written at once, at most; a GPU's memory may allow fewer
CPU_ROWS, GPU_ROWS = 1, 8  # on a CPU, many small steps learn more than a few large ones


@flags
def distill(
    text: TextFlags,
    shape: ShapeFlags,
    training: TrainingFlags,
    evaluation: EvaluationFlags,
    packing: PackingFlags,
    target: Target = None,
    out: Annotated[Path, flag("Folder of the run; a run that stopped is continued.")] = Path("distilled"),
    device: Annotated[str, flag("Device of both models: cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a draft for a target on the target's own text; or write prompts, or evaluate, pack or unpack a draft."""
    actions = (text.write_prompts, evaluation.evaluate, packing.pack, packing.unpack)
    if (named := len(actions) - actions.count(None)) > 1:
        raise UserError("--write-prompts, --evaluate, --pack and --unpack exclude one another, choose one")
    if text.begin and text.write_prompts is None:
        raise UserError("--begin is for --write-prompts: it says how the prompts begin")
    if named:
        text = replace(text, stage="judge")  # evaluate only
    options = _options(text, shape, training, evaluation, target, out, device, seed)
    if text.write_prompts is not None:
        with sigterm_as_interrupt():
            _write_prompts(text.write_prompts, options, tuple(text.begin or ("",)))
    elif packing.unpack is not None:
        _unpack(Path(packing.unpack), target, out)
    elif packing.pack is not None:
        _pack(Path(packing.pack), options, as_json)
    else:
        with sigterm_as_interrupt():  # finished work is kept
            _run(options, as_json)


def _write_prompts(count: int, options: Any, begins: tuple[str, ...]) -> None:
    from outpace.distill import magpie
    from outpace.distill.progress_display import ProgressDisplay
    from outpace.models.files.find import resolve

    with ProgressDisplay() as progress:
        file = magpie.write_prompts(
            resolve(options.target), count, options.out, options.writer, options.device, progress.show, begins
        )
    display.say(f"written: {file}; read some of them, then train with --prompts {file}")


def _unpack(draft: Path, target: str | None, out: Path) -> None:
    from outpace.models.files.find import resolve
    from outpace.models.files.packed import unpack

    unpack(draft, resolve(target), out)
    display.say(f"unpacked: {out}")


def _pack(folder: Path, options: Any, as_json: bool) -> None:
    """Pack the draft of a run; evaluate it first if there are tasks."""
    from outpace.distill.run import pack_run
    from outpace.models.files.find import resolve

    if options.out.exists():
        raise UserError(f"{options.out} already exists")
    if options.tasks:
        _run(replace(options, out=folder, stage="judge"), as_json)
    pack_run(folder, resolve(options.target), options.out)
    display.say(f"packed: {options.out}, {sum(file.stat().st_size for file in options.out.iterdir()) / 1e6:.1f} MB")


def _run(options: Any, as_json: bool) -> None:
    """Run the requested stages, or the evaluation of a draft, and show the results."""
    from outpace.distill import report, run
    from outpace.distill.progress_display import ProgressDisplay

    with ProgressDisplay(as_json) as progress:
        found = run.run_stages(options, progress.show)
    if found is None:
        return
    if as_json:
        display.print_json(found.as_dict())
    else:
        display.stdout().print(report.table(found))
    run.save_evaluation(options, found)
    try:
        display.say(f"plot: {run.write_plot(options, found)}")
    except UserError as error:  # the results are saved already
        display.say(f"warning: {error}", "yellow")


def _options(
    text: TextFlags,
    shape: ShapeFlags,
    training: TrainingFlags,
    evaluation: EvaluationFlags,
    target: str | None,
    out: Path,
    device: str,
    seed: int,
) -> Any:
    """Convert the flags to DistillOptions."""
    from outpace.distill.evaluate import EvaluationOptions
    from outpace.distill.losses import LossOptions
    from outpace.distill.options import DistillOptions
    from outpace.distill.prompts import BUILT_IN
    from outpace.distill.start import resolve_draft, shape_from_options
    from outpace.distill.train import TrainOptions
    from outpace.distill.writer import WriterOptions

    for name, value in (("answer_tokens", text.answer_tokens), ("judged", evaluation.judged)):
        check_whole(name, value, 1)
    if training.batch_rows is not None:
        check_whole("batch_rows", training.batch_rows, 1)
    if training.part_size is not None:
        check_range("part_size", training.part_size, 0.1, 1e6)
    has_gpu = not device.startswith("cpu")
    answers = text.rows if text.rows is not None else GPU_ANSWERS if device.startswith("cuda") else CPU_ANSWERS
    losses = LossOptions(training.token_weight, training.distribution_weight, training.divergence)
    return DistillOptions(
        target=target,
        out=out,
        prompts=tuple(text.prompts or (BUILT_IN,)),
        stage=text.stage,
        temperatures=_temperatures(text.temperatures),
        runtime=evaluation.runtime,
        tokens=text.tokens,
        seconds=None if text.budget is None else seconds(text.budget),
        epochs=text.epochs,
        device=device,
        evaluate=None if evaluation.evaluate is None else resolve_draft("evaluate", evaluation.evaluate, target),
        tasks=tuple(evaluation.tasks or ()),
        shape=shape_from_options(shape.layers, shape.hidden, shape.init, shape.vocab, target),
        writer=WriterOptions(rows=answers, max_tokens=text.answer_tokens, seed=seed),
        train=TrainOptions(
            learning_rate=training.learning_rate,
            cooldown=training.cooldown,
            warmup=training.warmup,
            rows=training.batch_rows if training.batch_rows is not None else GPU_ROWS if has_gpu else CPU_ROWS,
            length=training.length,
            seed=seed,
            save_every=training.save_every,
            part_bytes=None if training.part_size is None else int(training.part_size * 1e6),
            loss=losses,
        ),
        evaluation=EvaluationOptions(evaluation.judged, seed=seed),
        command=shlex.join(["outpace", *sys.argv[1:]]),
    )


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"temperatures is {text!r}, it must be numbers as in 0,0.8,1") from None
