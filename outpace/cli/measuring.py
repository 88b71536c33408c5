"""The flags of `outpace bench`: what is measured, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.sampling_options import MaxTokens, Seed, Temperature

MEASURED, KEPT = "What is measured", "What is kept"


@dataclass(frozen=True)
class Measuring:
    """Who takes part, on what, and how often."""

    tasks: Annotated[
        str,
        typer.Option(
            help="Prompts, joined by commas: .jsonl files (a JSON object with turns in each line), builtin,"
            " repetition, summaries, answers, hub:NAME, or gsm8k, humaneval, mgsm, mt_bench from the hub.",
            rich_help_panel=MEASURED,
        ),
    ] = "builtin"
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, joined by commas, each with options of its own if needed, as in"
            " card:drafter=model+ngram,nodes=8,speculative. Plain decoding is always measured.",
            rich_help_panel=MEASURED,
        ),
    ] = "auto,card,speculative"
    rules: Annotated[
        str,
        typer.Option(
            help="Rules, joined by commas, each with options of its own if needed, as in block,lenience:lenience=0.4;"
            " each of the methods is measured with each of them. all: those that fit a method and the temperature.",
            rich_help_panel=MEASURED,
        ),
    ] = ""
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines, joined by commas, as in llama_cpp,transformers; or all.", rich_help_panel=MEASURED
        ),
    ] = ""
    prompts: Annotated[
        int, typer.Option(help="The number of prompts taken from the start of each task.", rich_help_panel=MEASURED)
    ] = 10
    turns: Annotated[
        int,
        typer.Option(
            help="The number of turns taken of each conversation, such as MT-bench's, with plain decoding's answers"
            " between them. Each later turn is a task of its own.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    rounds: Annotated[int, typer.Option(help="How often everything is measured.", rich_help_panel=MEASURED)] = 1
    batch: Annotated[
        str, typer.Option(help="Numbers of requests at once, as in 1,2,8,16; not for peers.", rich_help_panel=MEASURED)
    ] = "1"
    inflate: Annotated[
        int,
        typer.Option(
            help="Emulate a target that is this many times as large, by layers that do not change its text.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    run_tests: Annotated[
        bool,
        typer.Option(
            "--run-tests",
            help="Score programs that the models write by running their tests, each in a confined process.",
            rich_help_panel=MEASURED,
        ),
    ] = False
    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class Keeping:
    """Where results go."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to which each result is written at once; run again to continue a bench that stopped.",
            rich_help_panel=KEPT,
        ),
    ] = None
    json: Annotated[Path | None, typer.Option(help="File for the rows of the table.", rich_help_panel=KEPT)] = None
    plot: Annotated[Path | None, typer.Option(help="File for a plot: .png, .svg or .pdf.", rich_help_panel=KEPT)] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File for a trace of what the draft proposes, for outpace simulate; nothing is measured.",
            rich_help_panel=KEPT,
        ),
    ] = None
