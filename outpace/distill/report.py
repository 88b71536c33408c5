"""Reports on a distillation: the table and plot of an evaluation, and the draft's model card with its provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.api.plot import figure_for
from outpace.distill.evaluate import CHAIN, POSITIONS, TREE, Evaluation
from outpace.distill.options import DRAFT, TRAINING
from outpace.distill.train import CURVE, read_curve
from outpace.models.files.checkpoint import read_json
from outpace.models.files.find import resolve, shipped_model
from outpace.models.files.reading import read_optional_json
from outpace.models.heads.reader import LAYER_IDS, TAPS
from outpace.models.llama.config.llama_config import from_dict

if TYPE_CHECKING:
    from rich.table import Table

PLOT = "distill.png"
STATE, NOTES = "run.json", "notes.md"
CARD_POINTS = 12  # points of the learning curve in the model card
CARD = """\
# A draft for {target}

A small model that proposes tokens for {target} to verify. It was made by `outpace distill`
from nothing but the target: its weights and its own answers. By itself it writes poor text; it only helps
as a draft, which does not change the target's text.

{provenance}

## Use

    outpace generate --target TARGET --draft THIS_FOLDER ...

transformers loads it as `assistant_model`.

## Attribution

Embeddings, output layer and initial weights are those of {target}, which also wrote the training
text. The target's licence ({licence}) therefore applies to this draft as well. What was changed: the
number of layers, and their weights by training.
"""
MEASURED = """\

## Measured

| task | temperature | prompts | tokens | acceptance by position | chain {chain} | tree {tree} |
|---|---|---|---|---|---|---|
{rows}

Real decoding. Lengths are emitted tokens per target pass; a position's acceptance is that of a token whose
predecessors in its chain were accepted. On the machine of the measurement{where}: {times}.
"""
LEARNING_CURVE = """\

## Learning curve

| tokens seen | of text | held-out top-1 | chain {chain} |
|---|---|---|---|
{rows}

Held-out answers, with the target's own text before each token.
"""


def table(found: Evaluation) -> Table:
    """Build the table of acceptance and lengths by task, with the measured times as its caption."""
    from rich.table import Table

    made = Table(title=f"{found.draft} for {found.target}", title_justify="left")
    for name in ("task", "temperature", "1st", "2nd", "3rd", f"chain {CHAIN}", f"tree {TREE}", "tokens"):
        made.add_column(name, justify="left" if name == "task" else "right")
    for row in found.rows:
        rates = [f"{rate:.2f}" for rate in row.by_position[:3]]
        lengths = (f"{row.chain:.2f}", f"{row.tree:.2f}", str(row.tokens))
        made.add_row(row.task, f"{row.temperature:g}", *(rates + ["-"] * 3)[:3], *lengths)
    made.caption = _times(found)
    made.caption_justify = "left"
    return made


def _times(found: Evaluation) -> str:
    """Describe both models' times and the speedup predicted from them."""
    speed = found.speed
    unit = "block" if speed.drafts_blocks else "step"
    text = (
        f"draft {unit} {speed.draft_step * 1e3:.2f} ms, target pass {1e3 * speed.passes[1]:.2f} ms: c {speed.cost:.3f}"
    )
    if found.predicted:
        length, best = max(found.predicted.items(), key=lambda item: item[1])
        text += f"; predicted speedup at temperature 0: {best:.2f} by chains of {length}"
    return text + ("; other work disturbed these times: judge again on an idle machine" if speed.is_disturbed else "")


def plot(found: Evaluation, curve: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot acceptance by position, the predicted speedup over the draft length, and the learning curve."""
    with figure_for(file, 13, 3.8) as figure:
        left, middle, right = figure.subplots(1, 3)
        for row in found.rows:
            style = "-" if row.temperature == 0 else "--"
            places = range(1, len(row.by_position) + 1)
            left.plot(places, row.by_position, style, marker="o", label=f"{row.task}, T = {row.temperature:g}")
        left.set(
            title="acceptance by position", xlabel="position in the chain", ylim=(0, 1), xlim=(0.8, POSITIONS + 0.2)
        )
        left.legend(fontsize=7, loc="upper left", ncols=2)
        middle.plot(list(found.predicted), list(found.predicted.values()), marker="o")
        middle.axhline(1.0, color="grey", linewidth=0.8)
        middle.set(title="predicted speedup, temperature 0", xlabel="draft length")
        right.plot([point["tokens"] / 1e6 for point in curve], [point["top1"] for point in curve], marker=".")
        right.set(title="held-out answers", xlabel="million answer tokens trained on", ylim=(0, 1))
        right.set_ylabel("top-1 agreement", color="C0")
        measured = [point for point in curve if point["chain"] is not None]
        twin = right.twinx()
        millions = [point["tokens"] / 1e6 for point in measured]
        twin.plot(millions, [point["chain"] for point in measured], color="C1", marker=".")
        twin.set_ylim(1, CHAIN + 1)
        twin.set_ylabel(f"tokens per pass, chain {CHAIN}", color="C1")


def read_state(folder: Path) -> dict[str, Any]:
    """Read the record of a run; empty if there is none."""
    return read_optional_json(folder / STATE)


def record(folder: Path, command: str, **changes: Any) -> None:
    """Update the record of a run, and add the command to its list of distinct commands."""
    state = read_state(folder)
    commands = [*state.get("commands", []), command]
    state |= changes | {"commands": list(dict.fromkeys(filter(None, commands)))}
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def provenance(state: Mapping[str, Any], draft: Path, points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Describe the draft's shape, text and training, from a run's record and learning curve."""
    config = read_json(draft / "config.json")
    ours, sizes = config.get("outpace", {}), config.get("transformer_layer_config", config)
    facts = {"layers": str(sizes["num_hidden_layers"]), "width": str(sizes["hidden_size"])}
    if "target_layers" in ours:
        facts["from the target's layers"] = str(ours["target_layers"])
    for name in (TAPS, LAYER_IDS):
        if name in config:
            facts["reads the target's hidden states after layers"] = str(config[name])
    if state.get("draft"):
        facts["training continued from"] = state["draft"]
    if "draft_vocab_size" in ours:
        facts["tokens that it writes"] = f"{ours['draft_vocab_size']:,} of {from_dict(config).vocab_size:,}"
    if "prompts" in state:
        facts["prompts"] = ", ".join(Path(name).name for name in state["prompts"])
    if points:
        last = points[-1]
        temperatures = ", ".join(f"{value:g}" for value in state.get("temperatures", []))
        at = f", at temperatures {temperatures}" if temperatures else ""
        minutes = last["seconds"] / 60
        facts["the target's text"] = f"{last['text_tokens']:,} answer tokens{at}"
        facts["trained on"] = f"{last['tokens']:,} answer tokens, {last['step']:,} steps, {minutes:.0f} min"
        facts["held-out agreement"] = f"{last['top1']:.3f} (likeliest token, the target's own text before it)"
    if "training" in state:
        options = state["training"] | state["training"]["loss"] | {"loss": None}
        named = (f"{name.replace('_', ' ')} {value}" for name, value in options.items() if value is not None)
        facts["training"] = ", ".join(named)
    return facts


def licence(target: str | None) -> str | None:
    """Return the licence named in the target's .gguf header, or in the front matter of its model card."""
    path = shipped_model() if target is None else Path(target).expanduser()
    if path.is_file():
        from outpace.models.files.gguf.header import open_gguf

        found = open_gguf(path).metadata.get("general.license")
        return found if isinstance(found, str) else None
    card = resolve(target) / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:40] if card.is_file() else []
    named = [line.split(":", 1)[1].strip().strip("\"'") for line in lines if line.startswith("license:")]
    return named[0] if named and named[0] else None


def write_card(folder: Path, found: Evaluation, target: str | None) -> None:
    """Write the model card of a run's draft from its evaluation; `folder` is the run's."""
    draft, terms, state = folder / DRAFT, licence(target), read_state(folder)
    points = read_curve(folder / TRAINING / CURVE)
    facts = [f"- {name}: {value}" for name, value in provenance(state, draft, points).items()]
    if state.get("commands"):
        facts += ["", "Made by", "", *(f"    {command}" for command in state["commands"])]
    named_terms = f"`{terms}`" if terms else "not named in its files: look it up before you pass this on"
    text = f"---\nlicense: {terms}\n" if terms else "---\n"
    text += "library_name: transformers\ntags: [speculative-decoding, draft]\n---\n\n"
    text += CARD.format(target=found.target, provenance="\n".join(facts), licence=named_terms)
    notes = folder / NOTES
    if notes.is_file() and (data := notes.read_text(encoding="utf-8").strip()):
        text += f"\n## Data\n\n{data}\n"
    where = f" ({found.where})" if found.where else ""
    rows = "\n".join(
        f"| {row.task} | {row.temperature:g} | {row.prompts} | {row.tokens:,} |"
        f" {', '.join(f'{rate:.2f}' for rate in row.by_position)} | {row.chain:.2f} | {row.tree:.2f} |"
        for row in found.rows
    )
    text += MEASURED.format(chain=CHAIN, tree=TREE, rows=rows, where=where, times=_times(found))
    if points:
        every = -(-len(points) // CARD_POINTS)
        rows = "\n".join(
            f"| {point['tokens']:,} | {point['text_tokens']:,} | {point['top1']:.3f} |"
            f" {'-' if point['chain'] is None else format(point['chain'], '.2f')} |"
            for point in points[::-1][::every][::-1]
        )
        text += LEARNING_CURVE.format(chain=CHAIN, rows=rows)
    if (draft / PLOT).is_file():
        text += f"\n![acceptance by position, predicted speedup and learning curve]({PLOT})\n"
    (draft / "README.md").write_text(text, encoding="utf-8")
