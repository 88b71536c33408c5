"""`outpace distill`: train a draft for a target on the target's own text; or write prompts, evaluate, convert."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outpace.cli import display
from outpace.cli.flags import common_fields, flag, flags, numbers
from outpace.cli.options import JSON, SEED, TARGET, TARGET_NAMES, TEXT
from outpace.cli.process import sigterm_as_interrupt
from outpace.core.errors import UserError, require, unknown
from outpace.core.options import CheckedOptions, whole

if TYPE_CHECKING:
    from outpace.distill.options import DistillOptions

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Convert a time such as 90s, 30m or 1.5h to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise UserError(f"budget is {text!r}, it must be a time such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class RunFlags:
    """The target, and the folder of the run."""

    target: str | None = flag(None, TARGET, *TARGET_NAMES, panel="Model")
    out: Path = flag(Path("distilled"), "Folder of the run; a run that stopped is continued.")
    gguf: Path | None = flag(
        None, "Write the draft of --out (a run's folder, a draft, or shipped) to this GGUF file, for llama.cpp."
    )
    device: str = flag("cpu", "Device of both models: cpu, cuda, cuda:1, ...")
    seed: int = flag(0, SEED, panel=TEXT)
    as_json: bool = JSON


@dataclass(frozen=True)
class TextFlags(CheckedOptions):
    """The text to train on."""

    panel: ClassVar[str] = "Amount"
    prompts: list[str] | None = flag(None, "Prompts: a .jsonl file, hub:NAME or builtin; may be repeated.")
    write_prompts: int | None = flag(
        None, "Let the target write this many prompts to prompts.jsonl, and do nothing else."
    )
    begin: list[str] | None = flag(None, "With --write-prompts, how they begin; several are used alternately.")
    budget: str | None = flag(None, "Time for text and training: 90s, 30m, 2h. The evaluation takes minutes more.")
    tokens: int | None = flag(None, "Instead of a budget: tokens that the target writes; started answers are finished.")
    epochs: float = flag(3.0, "How often training goes through the text.")
    answer_tokens: int = whole(256, 1, help="The longest answer, in tokens.")
    taps: str | None = flag(
        None,
        "Layers after which the draft reads the target's hidden states, as in 2,15,27; default: by --kind or --init.",
    )
    rows: int | None = flag(None, "Answers written at once; the default is 128 on a CPU and at most 1,024 on a GPU.")
    temperatures: str = flag(
        "0,0.8,1", "Temperatures of the answers, alternately; one named twice gets twice the share."
    )
    stage: str = flag(
        "all",
        "The stage to run: text, train, judge or all; start: only write the draft that training would begin with.",
    )


@dataclass(frozen=True)
class ShapeFlags:
    """The shape of the draft."""

    panel: ClassVar[str] = "Draft"
    kind: str | None = flag(
        None,
        "Kind of draft: standalone, a small model; eagle3, dspark or specformer, a head that reads the target's hidden"
        " states; steered, a draft whose MLPs these states bias. The default is chosen by device and target.",
    )
    layers: str = flag("3", "Layers of the draft: a number, or the target's layers, as in 0,14,29 or 0-24,26-29.")
    init: str = flag(
        "layers", "Start from the target's layers (layers) or a draft (folder, or shipped; steered: shipped)."
    )
    vocab: int = flag(0, "Size of a reduced vocabulary, the most frequent tokens; 0: all tokens.")


@dataclass(frozen=True)
class TrainingFlags(CheckedOptions):
    """The training."""

    panel: ClassVar[str] = "Training"
    learning_rate: float | None = flag(None, "The highest learning rate; the default depends on --kind.")
    cooldown: float = flag(1.0, "Share of training over which the learning rate falls.")
    warmup: int = flag(40, "Steps over which the learning rate rises.")
    batch_rows: int | None = whole(
        None, 1, help="Rows of --length tokens in a step; the default is 1 on a CPU and 8 elsewhere."
    )
    length: int = flag(512, "Tokens in a row.")
    token_weight: float = flag(0.2, "Weight of the cross-entropy in the loss.")
    distribution_weight: float = flag(0.8, "Weight of the KL divergence in the loss.")
    save_every: float = flag(180.0, "Seconds between checkpoints.")


@dataclass(frozen=True)
class EvaluationFlags(CheckedOptions):
    """The evaluation."""

    panel: ClassVar[str] = "Evaluation"
    evaluate: str | None = flag(None, "Evaluate this draft (a folder, or shipped), and do nothing else.")
    tasks: list[str] | None = flag(None, "A .jsonl file of prompts to evaluate on; may be repeated.")
    judged: int = whole(20, 1, help="Prompts of each task that are evaluated.")
    runtime: str = flag("auto", "Runtime of both models in the evaluation: auto, llama, native or transformers.")


CPU_ANSWERS, GPU_ANSWERS = 128, 1024  # written at once, at most; a GPU's memory may allow fewer
CPU_ROWS, GPU_ROWS = 1, 8  # on a CPU, many small steps learn more than a few large ones


@flags
def distill(
    run: RunFlags, text: TextFlags, shape: ShapeFlags, training: TrainingFlags, evaluation: EvaluationFlags
) -> None:
    """Train a draft for a target on the target's own text; or write prompts, or evaluate or convert a draft."""
    actions = (text.write_prompts, evaluation.evaluate, run.gguf)
    if (named := len(actions) - actions.count(None)) > 1:
        raise UserError("--write-prompts, --evaluate and --gguf exclude one another, choose one")
    if text.begin and text.write_prompts is None:
        raise UserError("--begin is for --write-prompts: it says how the prompts begin")
    if named:
        text = replace(text, stage="judge")  # evaluate only
    if text.budget is not None:
        seconds(text.budget)  # refused before anything is imported
    require("outpace distill", "torch")
    if run.gguf is not None:
        _write_gguf(run.out, run.target, run.gguf)
        return
    options = _options(run, text, shape, training, evaluation)
    with sigterm_as_interrupt(), display.saying_what_is_kept(run.out):
        if text.write_prompts is None:
            _run(options, run.as_json)
        else:
            _write_prompts(text.write_prompts, options, tuple(text.begin or ("",)))


def _write_prompts(count: int, options: DistillOptions, begins: tuple[str, ...]) -> None:
    from outpace.distill.progress_display import ProgressDisplay
    from outpace.distill.text import write_prompts
    from outpace.models.files.find import resolve

    target = resolve(options.target)
    with ProgressDisplay() as progress:
        file = write_prompts(target, count, options.out, options.writer, options.device, progress.show, begins)
    display.say(f"written: {file}; read some of them, then train with --prompts {file}")


def _write_gguf(run: Path, target: str | None, file: Path) -> None:
    from outpace.distill.draft_shape import resolve_draft
    from outpace.distill.run import write_gguf
    from outpace.models.files.find import locate

    if file.suffix.lower() != ".gguf":
        raise UserError(f"--gguf is {str(file)!r:.200}, the file's name must end with .gguf")
    write_gguf(Path(resolve_draft("out", str(run), target)), locate(target), file)
    display.say(f"written: {file}, {file.stat().st_size / 1e6:.1f} MB")


def _run(options: DistillOptions, as_json: bool) -> None:
    """Run the requested stages, or the evaluation of a draft, and show the results."""
    from outpace.distill import evaluate, report, run
    from outpace.distill.options import DRAFT, START
    from outpace.distill.progress_display import ProgressDisplay

    with ProgressDisplay(as_json) as progress:
        found = run.distill(options, progress.show)
    if options.stage == START:
        display.say(f"written: {options.out / DRAFT}")
    if found is None:
        return
    if as_json:
        display.print_json(found.as_dict())
    else:
        display.stdout().print(report.table(found))
    if found.tokens_per_second:
        display.say(evaluate.verdict(found.tokens_per_second, options.draft))
    run.save_evaluation(options, found)
    try:
        display.say(f"plot: {run.write_plot(options, found)}")
    except UserError as error:  # the results are saved already
        display.say(f"warning: {error}", "yellow")


def _options(
    run: RunFlags, text: TextFlags, shape: ShapeFlags, training: TrainingFlags, evaluation: EvaluationFlags
) -> DistillOptions:
    from outpace.distill.draft_shape import resolve_draft
    from outpace.distill.evaluate import EvaluationOptions
    from outpace.distill.kinds import KINDS
    from outpace.distill.losses import LossOptions
    from outpace.distill.options import DistillOptions
    from outpace.distill.prompts import BUILT_IN
    from outpace.distill.run import choose_kind
    from outpace.distill.train import TrainOptions
    from outpace.distill.writer import WriterOptions
    from outpace.models.files.find import shipped_model

    has_gpu = not run.device.startswith("cpu")
    answers = text.rows if text.rows is not None else GPU_ANSWERS if run.device.startswith("cuda") else CPU_ANSWERS
    kind, steers = shape.kind or "standalone", False
    if shape.kind is None and text.stage in ("text", "train", "all"):
        is_shaped = shape != ShapeFlags() or text.taps is not None
        is_open = text.stage == "all" and not is_shaped
        name = shipped_model().stem if run.target is None else Path(run.target).name
        kind, steers, why = choose_kind(run.out, run.device, name, is_open, is_shaped)
        if why:
            more = " and a steering of it" if steers else ""
            display.say(f"kind: {kind}{more}, because {why}; --kind names another")
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    rate = KINDS[kind].learning_rate if training.learning_rate is None else training.learning_rate
    says = f"temperatures is {text.temperatures!r}, it must be numbers as in 0,0.8,1"
    taps_says = f"taps is {text.taps!r}, it must be numbers of layers as in 2,15,27"
    train = TrainOptions(
        rows=training.batch_rows if training.batch_rows is not None else GPU_ROWS if has_gpu else CPU_ROWS,
        seed=run.seed,
        loss=LossOptions(training.token_weight, training.distribution_weight),
        **common_fields(training, TrainOptions) | {"learning_rate": rate},
    )
    return DistillOptions(
        target=run.target,
        out=run.out,
        prompts=tuple(text.prompts or (BUILT_IN,)),
        stage=text.stage,
        temperatures=tuple(numbers(text.temperatures, float, says)),
        runtime=evaluation.runtime,
        tokens=text.tokens,
        budget=None if text.budget is None else seconds(text.budget),
        epochs=text.epochs,
        device=run.device,
        evaluate=None if evaluation.evaluate is None else resolve_draft("evaluate", evaluation.evaluate, run.target),
        tasks=tuple(evaluation.tasks or ()),
        kind=kind,
        steers=steers,
        taps=None if text.taps is None else tuple(numbers(text.taps, int, taps_says)),
        shape=KINDS[kind].shape_from_options(shape.layers, shape.init, shape.vocab, run.target),
        writer=WriterOptions(rows=answers, max_tokens=text.answer_tokens, seed=run.seed),
        train=train,
        evaluation=EvaluationOptions(evaluation.judged, seed=run.seed),
        command=shlex.join(["outpace", *sys.argv[1:]]),
    )
