"""The flags of `outpace distill`, by what they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

AMOUNT, SHAPE, TRAINING, JUDGING, STORING = "Amount", "Draft", "Training", "Evaluation", "Packing"


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
class Draft:
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
