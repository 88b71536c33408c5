"""What a distillation shows at its end: a table, a plot, and the draft's model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError
from outpace.distill.judge import CHAIN, POSITIONS, TREE, Judgement

if TYPE_CHECKING:
    from rich.table import Table

PLOT = "distill.png"


def table(judgement: Judgement) -> Table:
    """Acceptance and lengths by task, then the machine's times."""
    from rich.table import Table

    made = Table(title=f"{judgement.draft} for {judgement.target}", title_justify="left")
    for name in ("task", "temperature", "1st", "2nd", "3rd", f"chain {CHAIN}", f"tree {TREE}", "tokens"):
        made.add_column(name, justify="left" if name == "task" else "right")
    for row in judgement.rows:
        rates = [f"{rate:.2f}" for rate in row.by_position[:3]]
        lengths = (f"{row.chain:.2f}", f"{row.tree:.2f}", str(row.tokens))
        made.add_row(row.task, f"{row.temperature:g}", *(rates + ["-"] * 3)[:3], *lengths)
    made.caption = _times(judgement)
    made.caption_justify = "left"
    return made


def _times(judgement: Judgement) -> str:
    speed = judgement.speed
    text = (
        f"draft step {speed.draft_step * 1e3:.2f} ms, target pass {speed.passes[1] * 1e3:.2f} ms: c = {speed.cost:.3f}"
    )
    if judgement.predicted:
        length, best = max(judgement.predicted.items(), key=lambda item: item[1])
        text += f"; predicted speedup at temperature 0: {best:.2f} by chains of {length}"
    return text


def plot(judgement: Judgement, curve: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Three panels: acceptance by position, predicted speedup over draft length, the learning curve."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the plot needs `pip install 'outpace[distill]'`; all else is written") from None
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for row in judgement.rows:
        style = "-" if row.temperature == 0 else "--"
        places = range(1, len(row.by_position) + 1)
        left.plot(places, row.by_position, style, marker="o", label=f"{row.task}, T = {row.temperature:g}")
    left.set(title="acceptance by position", xlabel="position in the chain", ylim=(0, 1), xlim=(0.8, POSITIONS + 0.2))
    left.legend(fontsize=7)
    middle.plot(list(judgement.predicted), list(judgement.predicted.values()), marker="o")
    middle.axhline(1.0, color="grey", linewidth=0.8)
    middle.set(title="predicted speedup, temperature 0", xlabel="draft length")
    right.plot([point["tokens"] / 1e6 for point in curve], [point["top1"] for point in curve], marker=".")
    right.set(title="held-out top-1 agreement", xlabel="million answer tokens trained on", ylim=(0, 1))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def model_card(judgement: Judgement, facts: Mapping[str, str], licence: str | None) -> str:
    """README.md of the draft. `facts` are shown as a list; `licence` is the target's, by its name on the hub."""
    head = ["---", f"license: {licence}"] if licence else ["---"]
    lines = [*head, "library_name: transformers", "tags: [speculative-decoding, draft]", "---", ""]
    lines += [f"# A draft for {judgement.target}", ""]
    lines += [
        f"A small model that proposes tokens for {judgement.target} to verify. It was made by `outpace distill` from",
        "nothing but the target: its weights and its own answers. Alone it writes poor text; it is of use beside its",
        "target only, whose text it does not change.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    terms = f"`{licence}`" if licence else "not named in its files: look it up before you pass this draft on"
    lines += ["", "## Attribution", ""]
    lines += [
        f"Embeddings, output layer and starting weights are those of {judgement.target}, and the training text was",
        f"written by it. The target's licence ({terms}) therefore applies to this draft as well.",
        "",
        "## Measured",
        "",
        f"| task | temperature | acceptance by position | chain {CHAIN} | tree {TREE} |",
        "|---|---|---|---|---|",
    ]
    for row in judgement.rows:
        rates = ", ".join(f"{rate:.2f}" for rate in row.by_position)
        lines.append(f"| {row.task} | {row.temperature:g} | {rates} | {row.chain:.2f} | {row.tree:.2f} |")
    lines += ["", f"Lengths are emitted tokens a target pass. On this machine: {_times(judgement)}.", ""]
    return "\n".join(lines)


def read_curve(file: Path) -> list[dict[str, Any]]:
    """The learning curve's points; none where there was no training."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
