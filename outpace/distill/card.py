"""The draft's model card: what it is, of what it was made, under which licence, and all that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.distill.evaluate import CHAIN, TREE, Judgement
from outpace.distill.report import PLOT, times

POINTS = 12  # of the learning curve
USE = (
    "## Use",
    "",
    "    outpace generate --target TARGET --draft THIS_FOLDER ...",
    "",
    'As `assistant_model` of transformers it loads as it is, unless its config.json says `"embedding": "target"`: then',
    "`outpace distill --unpack THIS_FOLDER --target TARGET --out WHOLE` writes the folder that does.",
    "",
)


@dataclass(frozen=True)
class Making:
    """How a draft was made. `facts` are shown as a list; `licence` is the target's, by its name on the hub; `data`
    says in Markdown where the prompts come from; `commands` are those that made it."""

    facts: Mapping[str, str]
    licence: str | None = None
    data: str = ""
    commands: Sequence[str] = ()
    curve: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    has_plot: bool = False


def model_card(judgement: Judgement, making: Making) -> str:
    """README.md of the draft."""
    head = ["---", *([f"license: {making.licence}"] if making.licence else [])]
    lines = [*head, "library_name: transformers", "tags: [speculative-decoding, draft]", "---", ""]
    lines += [f"# A draft for {judgement.target}", ""]
    lines += [
        f"A small model that proposes tokens for {judgement.target} to verify. It was made by `outpace distill` from",
        "nothing but the target: its weights and its own answers. Alone it writes poor text; it is of use beside its",
        "target only, whose text it does not change.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in making.facts.items()]
    if making.commands:
        lines += ["", "Made by", "", *(f"    {command}" for command in making.commands)]
    lines += ["", *USE, *_attribution(judgement, making), *_measured(judgement)]
    lines += _curve(making.curve)
    if making.has_plot:
        lines += [f"![acceptance by position, predicted speedup and learning curve]({PLOT})", ""]
    return "\n".join(lines)


def _attribution(judgement: Judgement, making: Making) -> list[str]:
    terms = f"`{making.licence}`" if making.licence else "not named in its files: look it up before you pass this on"
    lines = [
        "## Attribution",
        "",
        f"Embeddings, output layer and starting weights are those of {judgement.target}, and the training text was",
        f"written by it. The target's licence ({terms}) therefore applies to this draft as well; what was changed is",
        "the number of layers, and their weights by training.",
        "",
    ]
    return [*lines, "## Data", "", making.data, ""] if making.data else lines


def _measured(judgement: Judgement) -> list[str]:
    lines = [
        "## Measured",
        "",
        f"| task | temperature | prompts | tokens | acceptance by position | chain {CHAIN} | tree {TREE} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in judgement.rows:
        rates = ", ".join(f"{rate:.2f}" for rate in row.by_position)
        lines.append(
            f"| {row.task} | {row.temperature:g} | {row.prompts} | {row.tokens:,} | {rates} | {row.chain:.2f} |"
            f" {row.tree:.2f} |"
        )
    where = f" ({judgement.where})" if judgement.where else ""
    return [
        *lines,
        "",
        "Real decoding. Lengths are emitted tokens a target pass; a position's acceptance is that of a token whose",
        f"predecessors in its chain were accepted. Where it was measured{where}: {times(judgement)}.",
        "",
    ]


def _curve(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The learning curve, thinned out; its last point stays."""
    if not points:
        return []
    step = -(-len(points) // POINTS)
    kept = list(reversed(list(reversed(points))[::step]))
    lines = [
        "## Learning curve",
        "",
        f"| tokens seen | of text | held-out top-1 | chain {CHAIN} |",
        "|---|---|---|---|",
    ]
    for point in kept:
        length = f"{point['chain']:.2f}" if point.get("chain") is not None else "-"
        lines.append(f"| {point['tokens']:,} | {point['text_tokens']:,} | {point['top1']:.3f} | {length} |")
    return [*lines, "", "Held-out answers, with the target's own text before each token.", ""]
