"""`outpace distill`: trains a draft for a target from nothing but the target, or judges one."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli import display
from outpace.cli.options import Json, Target, flags
from outpace.cli.writing import Seed
from outpace.core.errors import UserError

AMOUNT, SHAPE, TRAINING, JUDGING = "Amount", "Draft", "Training", "Judging"
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Amount:
    """How much text, from which prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(help="A .jsonl file, hub:NAME or builtin; may be repeated.", rich_help_panel=AMOUNT),
    ] = None
    budget: Annotated[str | None, typer.Option(help="Time for all of it: 90s, 30m, 2h.", rich_help_panel=AMOUNT)] = None
    tokens: Annotated[
        int | None, typer.Option(help="Or: so many tokens of the target's text.", rich_help_panel=AMOUNT)
    ] = None
    epochs: Annotated[float, typer.Option(help="How often training sees them.", rich_help_panel=AMOUNT)] = 3.0
    answer_tokens: Annotated[int, typer.Option(help="The longest answer.", rich_help_panel=AMOUNT)] = 256
    rows: Annotated[int, typer.Option(help="Answers written at once.", rich_help_panel=AMOUNT)] = 128
    stage: Annotated[str, typer.Option(help="text, train, judge or all.", rich_help_panel=AMOUNT)] = "all"


@dataclass(frozen=True)
class Draft:
    """The draft's shape."""

    layers: Annotated[str, typer.Option(help="How many, or which of the target's: 0,14,29", rich_help_panel=SHAPE)] = (
        "3"
    )
    hidden: Annotated[int | None, typer.Option(help="A smaller width.", rich_help_panel=SHAPE)] = None
    init: Annotated[str, typer.Option(help="layers: start from the target's; or fresh.", rich_help_panel=SHAPE)] = (
        "layers"
    )
    vocab: Annotated[
        int, typer.Option(help="Write only so many tokens, the most frequent; 0: all.", rich_help_panel=SHAPE)
    ] = 0


@dataclass(frozen=True)
class Training:
    """How it learns."""

    learning_rate: Annotated[float, typer.Option(help="At its highest.", rich_help_panel=TRAINING)] = 1e-3
    cooldown: Annotated[
        float, typer.Option(help="Share of training over which it falls.", rich_help_panel=TRAINING)
    ] = 1.0
    batch_rows: Annotated[int, typer.Option(help="Rows of --length tokens a step.", rich_help_panel=TRAINING)] = 8
    length: Annotated[int, typer.Option(help="Tokens a row.", rich_help_panel=TRAINING)] = 512
    divergence: Annotated[
        str, typer.Option(help="forward_kl, reverse_kl or total_variation.", rich_help_panel=TRAINING)
    ] = "forward_kl"
    token_weight: Annotated[float, typer.Option(help="Of the cross-entropy.", rich_help_panel=TRAINING)] = 0.2
    distribution_weight: Annotated[float, typer.Option(help="Of the divergence.", rich_help_panel=TRAINING)] = 0.8
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=TRAINING)] = 180.0


@dataclass(frozen=True)
class Judging:
    """What it is judged on."""

    evaluate: Annotated[str | None, typer.Option(help="Only judge this draft.", rich_help_panel=JUDGING)] = None
    tasks: Annotated[
        list[str] | None, typer.Option(help="A .jsonl file of prompts; may be repeated.", rich_help_panel=JUDGING)
    ] = None
    judged: Annotated[int, typer.Option(help="Prompts of each task.", rich_help_panel=JUDGING)] = 20


@flags
def distill(
    amount: Amount,
    draft: Draft,
    training: Training,
    judging: Judging,
    target: Target = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; it goes on with what is there.")] = Path("distilled"),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a draft for a target from the target's own text, or judge one."""
    options = _options(amount, draft, training, judging, target, out, device, seed)
    from outpace.distill import report, run
    from outpace.distill.screen import Screen

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is finished is kept, as after Ctrl-C
    with Screen(as_json) as screen:
        if judging.evaluate is None:
            found = run.distill(options, screen.report)
        else:
            found = run.judge_stage(options, judging.evaluate, screen.report)
    if found is None:
        return
    if as_json:
        display.print_json(found.as_dict())
    else:
        display.stdout().print(report.table(found))
    try:
        display.say(f"plot: {run.write_plot(options, found)}")
    except UserError as error:  # all that was measured is there without it
        display.say(f"warning: {error}", "yellow")


def _options(
    amount: Amount,
    draft: Draft,
    training: Training,
    judging: Judging,
    target: str | None,
    out: Path,
    device: str,
    seed: int,
) -> Any:
    """The `DistillOptions` that the flags mean."""
    from outpace.distill.judge import JudgeOptions
    from outpace.distill.losses import LossOptions
    from outpace.distill.prompts import BUILT_IN
    from outpace.distill.run import DistillOptions
    from outpace.distill.start import Shape
    from outpace.distill.train import TrainOptions
    from outpace.distill.writer import WriterOptions

    losses = LossOptions(training.token_weight, training.distribution_weight, training.divergence)
    return DistillOptions(
        target=target,
        out=out,
        prompts=tuple(amount.prompts or (BUILT_IN,)),
        stage="judge" if judging.evaluate is not None else amount.stage,
        tokens=amount.tokens,
        seconds=None if amount.budget is None else seconds(amount.budget),
        epochs=amount.epochs,
        device=device,
        tasks=tuple(judging.tasks or ()),
        shape=Shape(draft.layers, draft.hidden, draft.init, draft.vocab),
        writer=WriterOptions(rows=amount.rows, max_tokens=amount.answer_tokens, seed=seed),
        train=TrainOptions(
            learning_rate=training.learning_rate,
            cooldown=training.cooldown,
            rows=training.batch_rows,
            length=training.length,
            seed=seed,
            save_every=training.save_every,
            loss=losses,
        ),
        judge=JudgeOptions(judging.judged, seed=seed),
        command=shlex.join(["outpace", *sys.argv[1:]]),
    )


def seconds(text: str) -> float:
    """A time such as 90s, 30m or 1.5h, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise UserError(f"budget is {text!r}, it must be a time such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2]]
