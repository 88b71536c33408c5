"""`outpace judge`: train a judge for the rule of that name on a target's answers and a draft model's mismatches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outpace.cli import display
from outpace.cli.flags import flag, flags, flags_of
from outpace.cli.options import JSON, MAX_TOKENS, TARGET, TARGET_FLAGS, TARGET_NAMES, use_threads
from outpace.cli.process import sigterm_as_interrupt
from outpace.core.errors import UserError
from outpace.models.options import LoadOptions

if TYPE_CHECKING:
    from outpace.rules.judge import JudgeFile


@dataclass(frozen=True)
class JudgedPairFlags:
    """The models, and how they are loaded. A judge serves only the target, runtime and precision it was trained on."""

    panel: ClassVar[str] = "Model"
    target: str | None = flag(None, TARGET, *TARGET_NAMES)
    draft: str | None = flag(
        None,
        "Draft model: hub id, folder or .gguf file; auto (a known small model of the same family); or some of the"
        " target's layers, as in layers:0-24,26-29. The default is the shipped draft for the shipped model.",
    )
    options: LoadOptions = flags_of(LoadOptions, *TARGET_FLAGS)
    threads: int | None = flag(None, "CPU threads; the default is one for each core.")


@flags
def judge(
    pair: JudgedPairFlags,
    tasks: list[Path] | None = flag(
        None, "File of questions with right answers, as for outpace bench; may be repeated.", metavar="FILE"
    ),
    out: Path = flag(Path("judge"), "Folder for the judge; a stopped run continues in it."),
    max_tokens: int = flag(256, MAX_TOKENS),
    batch: int = flag(16, "Number of questions mined at once."),
    run_tests: bool = flag(
        False, "Run the tests of programs, each in a sandbox (needs bubblewrap), to compare answers."
    ),
    as_json: bool = JSON,
) -> None:
    """Train a judge for --rule judge (lossy): it predicts which mismatches of the draft change the final answer."""
    from outpace.api.pair import load_pair
    from outpace.distill.judge import JudgeOptions, make_judge
    from outpace.distill.mining import MiningOptions
    from outpace.distill.progress_display import ProgressDisplay
    from outpace.engine.options import BuildOptions

    if not tasks:
        raise UserError("outpace judge learns from questions: name a file of them with --tasks")
    use_threads(pair.threads)
    options = JudgeOptions(tasks, out, MiningOptions(max_tokens, batch, run_tests))
    with sigterm_as_interrupt(), display.saying_what_is_kept(out), ProgressDisplay(as_json) as progress:
        target, draft = load_pair(pair.target, pair.draft, pair.options, BuildOptions())
        if draft is None or draft.is_head:
            raise UserError("a judge learns from a draft model's mismatches: name one with --draft")
        found = make_judge(target, draft, options, progress.show)
    if as_json:
        display.print_json({"judge": str(out), "thresholds": found.thresholds, **found.facts})
    else:
        _say(found, out)


def _say(found: JudgeFile, out: Path) -> None:
    """Show the judge's figures on held-out prompts."""
    facts, curve = found.facts, found.curve
    display.say(
        f"{facts['mismatches']} mismatches, {facts['important']} of them important; ROC-AUC {facts['roc_auc']:.3f} on"
        f" the {facts['held_out_mismatches']} of held-out prompts"
    )
    for recall, threshold in found.thresholds.items():
        refused = curve[curve[:, 0] >= threshold][:1, 2]
        spared = 1.0 - float(refused[0]) if len(refused) else 1.0
        display.say(f"recall {recall:g}: threshold {threshold:.4f}, accepts {spared:.0%} of the unimportant mismatches")
    display.say(f"judge: {out}; use it with --rule judge --judge {out} --recall 0.9")
