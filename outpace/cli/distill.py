"""`outpace distill`: trains a draft for a target from the target alone; writes prompts, judges, packs or unpacks."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli import display
from outpace.cli.options import Json, Target, flags
from outpace.cli.process import as_interrupt
from outpace.cli.sampling_options import Seed
from outpace.core.errors import UserError, check_range, check_whole

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """A time such as 90s, 30m or 1.5h, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise UserError(f"budget is {text!r}, it must be a time such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2]]


AMOUNT, SHAPE, TRAINING, JUDGING, STORING = "Amount", "DraftFlags", "Training", "Evaluation", "Packing"


@dataclass(frozen=True)
class Amount:
    """How much text, from which prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Prompts: a .jsonl file, hub:NAME or builtin; may be repeated.", rich_help_panel=AMOUNT),
    ] = None
    write_prompts: Annotated[
        int | None,
        typer.Option(
            help="Let the target write so many prompts of its own to prompts.jsonl in --out, and do nothing else.",
            rich_help_panel=AMOUNT,
        ),
    ] = None
    begin: Annotated[
        list[str] | None,
        typer.Option(
            help="With --write-prompts, how they begin: 'Write a Python function'; several are taken in turn.",
            rich_help_panel=AMOUNT,
        ),
    ] = None
    budget: Annotated[
        str | None, typer.Option(help="Time for text and training together: 90s, 30m, 2h.", rich_help_panel=AMOUNT)
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Instead of a budget: tokens of text that the target writes; answers that were begun are finished.",
            rich_help_panel=AMOUNT,
        ),
    ] = None
    epochs: Annotated[float, typer.Option(help="How often training goes through the text.", rich_help_panel=AMOUNT)] = (
        3.0
    )
    answer_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.", rich_help_panel=AMOUNT)] = 256
    rows: Annotated[
        int | None,
        typer.Option(
            help="Answers that the target writes at once; the default is 128 on a CPU and at most 1,024 on a GPU.",
            rich_help_panel=AMOUNT,
        ),
    ] = None
    temperatures: Annotated[
        str,
        typer.Option(
            help="Temperatures of the answers, in turn; one that is named twice gets twice the share.",
            rich_help_panel=AMOUNT,
        ),
    ] = "0,0.8,1"
    stage: Annotated[str, typer.Option(help="The stage to run: text, train, judge or all.", rich_help_panel=AMOUNT)] = (
        "all"
    )


@dataclass(frozen=True)
class DraftFlags:
    """The draft's shape."""

    layers: Annotated[
        str,
        typer.Option(
            help="Layers of the draft: how many, or which of the target's, as in 0,14,29.", rich_help_panel=SHAPE
        ),
    ] = "3"
    hidden: Annotated[
        int | None, typer.Option(help="Width of the draft; the default is the target's.", rich_help_panel=SHAPE)
    ] = None
    init: Annotated[
        str,
        typer.Option(
            help="Start from the target's layers (layers), random weights (fresh) or a draft (folder, or shipped).",
            rich_help_panel=SHAPE,
        ),
    ] = "layers"
    vocab: Annotated[
        int,
        typer.Option(
            help="Size of a reduced vocabulary, the most frequent tokens; 0: all tokens.", rich_help_panel=SHAPE
        ),
    ] = 0


@dataclass(frozen=True)
class Training:
    """How it learns."""

    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.", rich_help_panel=TRAINING)] = 1e-3
    cooldown: Annotated[
        float, typer.Option(help="Share of training over which the learning rate falls.", rich_help_panel=TRAINING)
    ] = 1.0
    warmup: Annotated[int, typer.Option(help="Steps over which the learning rate rises.", rich_help_panel=TRAINING)] = (
        40
    )
    batch_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of --length tokens in a step; the default is 1 on a CPU and 8 elsewhere.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    length: Annotated[int, typer.Option(help="Tokens in a row.", rich_help_panel=TRAINING)] = 512
    divergence: Annotated[
        str,
        typer.Option(
            help="Divergence from the target: forward_kl, reverse_kl or total_variation.", rich_help_panel=TRAINING
        ),
    ] = "forward_kl"
    token_weight: Annotated[
        float, typer.Option(help="Weight of the cross-entropy in the loss.", rich_help_panel=TRAINING)
    ] = 0.2
    distribution_weight: Annotated[
        float, typer.Option(help="Weight of the divergence in the loss.", rich_help_panel=TRAINING)
    ] = 0.8
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=TRAINING)] = 180.0
    part_size: Annotated[
        float | None,
        typer.Option(
            help="MB of the largest file of a checkpoint and of the draft; what is larger is written in parts.",
            rich_help_panel=TRAINING,
        ),
    ] = None


@dataclass(frozen=True)
class Judging:
    """What it is judged on."""

    evaluate: Annotated[
        str | None,
        typer.Option(help="Evaluate this draft (a folder, or shipped), and do nothing else.", rich_help_panel=JUDGING),
    ] = None
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="A .jsonl file of prompts to evaluate on; may be repeated.", rich_help_panel=JUDGING),
    ] = None
    judged: Annotated[int, typer.Option(help="Prompts of each task that are evaluated.", rich_help_panel=JUDGING)] = 20
    runtime: Annotated[
        str,
        typer.Option(
            help="Runtime of both models in the evaluation: auto, llama, native or transformers.",
            rich_help_panel=JUDGING,
        ),
    ] = "auto"


@dataclass(frozen=True)
class Storing:
    """A draft without what its target has too, and the way back; both write to `--out`."""

    pack: Annotated[
        str | None,
        typer.Option(
            help="Store this run's draft without its target's embeddings; with --tasks it is evaluated first.",
            rich_help_panel=STORING,
        ),
    ] = None
    unpack: Annotated[
        str | None,
        typer.Option(
            help="Give this packed draft its embeddings back, for transformers and other engines.",
            rich_help_panel=STORING,
        ),
    ] = None


CPU_ANSWERS, GPU_ANSWERS = 128, 1024  # written at once; a GPU takes fewer where its memory does
CPU_ROWS, GPU_ROWS = 1, 8  # on a CPU many small steps learn more than few large ones


@flags
def distill(
    amount: Amount,
    draft: DraftFlags,
    training: Training,
    judging: Judging,
    storing: Storing,
    target: Target = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; a run that stopped is continued.")] = Path("distilled"),
    device: Annotated[str, typer.Option(help="Device of both models: cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a draft for a target on the target's own text; or write prompts, or evaluate, pack or unpack a draft."""
    verbs = (amount.write_prompts, judging.evaluate, storing.pack, storing.unpack)
    if (named := len(verbs) - verbs.count(None)) > 1:
        raise UserError("--write-prompts, --evaluate, --pack and --unpack exclude one another, choose one")
    if amount.begin and amount.write_prompts is None:
        raise UserError("--begin is for --write-prompts: it says how the prompts begin")
    if named:
        amount = replace(amount, stage="judge")  # no text is written, and nothing trained
    options = _options(amount, draft, training, judging, target, out, device, seed)
    if amount.write_prompts is not None:
        with as_interrupt():
            _write_prompts(amount.write_prompts, options, tuple(amount.begin or ("",)))
    elif storing.unpack is not None:
        _unpack(Path(storing.unpack), target, out)
    elif storing.pack is not None:
        _pack(Path(storing.pack), options, as_json)
    else:
        with as_interrupt():  # what is finished is kept
            _run(options, as_json)


def _write_prompts(count: int, options: Any, begins: tuple[str, ...]) -> None:
    from outpace.distill import magpie
    from outpace.distill.progress_display import ProgressDisplay
    from outpace.models.files.find import resolve

    with ProgressDisplay() as screen:
        file = magpie.write_prompts(
            resolve(options.target), count, options.out, options.writer, options.device, screen.show, begins
        )
    display.say(f"written: {file}; read some of them, then train with --prompts {file}")


def _unpack(draft: Path, target: str | None, out: Path) -> None:
    from outpace.models.files.find import resolve
    from outpace.models.files.packed import unpack

    unpack(draft, resolve(target), out)
    display.say(f"unpacked: {out}")


def _pack(folder: Path, options: Any, as_json: bool) -> None:
    """Where there are tasks, the run's draft is judged on them first."""
    from outpace.distill.run import pack_run
    from outpace.models.files.find import resolve

    if options.out.exists():
        raise UserError(f"{options.out} already exists")
    if options.tasks:
        _run(replace(options, out=folder, stage="judge"), as_json)
    pack_run(folder, resolve(options.target), options.out)
    display.say(f"packed: {options.out}, {sum(file.stat().st_size for file in options.out.iterdir()) / 1e6:.1f} MB")


def _run(options: Any, as_json: bool) -> None:
    """The stages that were asked for, or the judgement of a draft; shows what was measured."""
    from outpace.distill import report, run
    from outpace.distill.progress_display import ProgressDisplay

    with ProgressDisplay(as_json) as screen:
        found = run.run_stages(options, screen.show)
    if found is None:
        return
    if as_json:
        display.print_json(found.as_dict())
    else:
        display.stdout().print(report.table(found))
    run.save_evaluation(options, found)
    try:
        display.say(f"plot: {run.write_plot(options, found)}")
    except UserError as error:  # all that was measured is there without it
        display.say(f"warning: {error}", "yellow")


def _options(
    amount: Amount,
    draft: DraftFlags,
    training: Training,
    judging: Judging,
    target: str | None,
    out: Path,
    device: str,
    seed: int,
) -> Any:
    """The `DistillOptions` that the flags mean."""
    from outpace.distill.evaluate import EvaluationOptions
    from outpace.distill.losses import LossOptions
    from outpace.distill.options import DistillOptions
    from outpace.distill.prompts import BUILT_IN
    from outpace.distill.start import resolve_draft, shape_from_options
    from outpace.distill.train import TrainOptions
    from outpace.distill.writer import WriterOptions

    for name, value in (("answer_tokens", amount.answer_tokens), ("judged", judging.judged)):
        check_whole(name, value, 1)
    if training.batch_rows is not None:
        check_whole("batch_rows", training.batch_rows, 1)
    if training.part_size is not None:
        check_range("part_size", training.part_size, 0.1, 1e6)
    has_gpu = not device.startswith("cpu")
    answers = amount.rows if amount.rows is not None else GPU_ANSWERS if device.startswith("cuda") else CPU_ANSWERS
    losses = LossOptions(training.token_weight, training.distribution_weight, training.divergence)
    return DistillOptions(
        target=target,
        out=out,
        prompts=tuple(amount.prompts or (BUILT_IN,)),
        stage=amount.stage,
        temperatures=_temperatures(amount.temperatures),
        runtime=judging.runtime,
        tokens=amount.tokens,
        seconds=None if amount.budget is None else seconds(amount.budget),
        epochs=amount.epochs,
        device=device,
        evaluate=None if judging.evaluate is None else resolve_draft("evaluate", judging.evaluate, target),
        tasks=tuple(judging.tasks or ()),
        shape=shape_from_options(draft.layers, draft.hidden, draft.init, draft.vocab, target),
        writer=WriterOptions(rows=answers, max_tokens=amount.answer_tokens, seed=seed),
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
        judge=EvaluationOptions(judging.judged, seed=seed),
        command=shlex.join(["outpace", *sys.argv[1:]]),
    )


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"temperatures is {text!r}, it must be numbers as in 0,0.8,1") from None
