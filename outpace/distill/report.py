"""What a distillation shows at its end: a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError, install_command
from outpace.distill.evaluate import CHAIN, POSITIONS, TREE, Judgement
from outpace.models.files.checkpoint import read_json
from outpace.models.files.find import resolve, shipped_model
from outpace.models.llama.config.llama_config import from_dict

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
    made.caption = times(judgement)
    made.caption_justify = "left"
    return made


def times(judgement: Judgement) -> str:
    """Both models' times, and the speedup that they and the acceptance predict."""
    speed = judgement.speed
    text = (
        f"draft step {speed.draft_step * 1e3:.2f} ms, target pass {speed.passes[1] * 1e3:.2f} ms: c = {speed.cost:.3f}"
    )
    if judgement.predicted:
        length, best = max(judgement.predicted.items(), key=lambda item: item[1])
        text += f"; predicted speedup at temperature 0: {best:.2f} by chains of {length}"
    return text + ("; other work disturbed these times: judge again on an idle machine" if speed.is_disturbed else "")


def plot(judgement: Judgement, curve: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Three panels: acceptance by position, predicted speedup over draft length, the learning curve."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"the plot needs `{install_command('distill')}`; all else is written") from None
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for row in judgement.rows:
        style = "-" if row.temperature == 0 else "--"
        places = range(1, len(row.by_position) + 1)
        left.plot(places, row.by_position, style, marker="o", label=f"{row.task}, T = {row.temperature:g}")
    left.set(title="acceptance by position", xlabel="position in the chain", ylim=(0, 1), xlim=(0.8, POSITIONS + 0.2))
    left.legend(fontsize=7, loc="upper left", ncols=2)
    middle.plot(list(judgement.predicted), list(judgement.predicted.values()), marker="o")
    middle.axhline(1.0, color="grey", linewidth=0.8)
    middle.set(title="predicted speedup, temperature 0", xlabel="draft length")
    right.plot([point["tokens"] / 1e6 for point in curve], [point["top1"] for point in curve], marker=".")
    right.set(title="held-out answers", xlabel="million answer tokens trained on", ylim=(0, 1))
    right.set_ylabel("top-1 agreement", color="C0")
    _plot_lengths(right.twinx(), curve)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UserError(f"the plot cannot be written to {file} ({error.strerror})") from error


def _plot_lengths(axes: Any, curve: Sequence[Mapping[str, Any]]) -> None:
    """The learning curve's mean accepted lengths, on an axis of their own."""
    found = [(point["tokens"] / 1e6, point["chain"]) for point in curve if point.get("chain") is not None]
    axes.plot(*zip(*found, strict=True) if found else ((), ()), color="C1", marker=".")
    axes.set_ylim(1, CHAIN + 1)
    axes.set_ylabel(f"tokens a pass, chain {CHAIN}", color="C1")


def read_curve(file: Path) -> list[dict[str, Any]]:
    """The learning curve's points; none where there was no training."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


STATE, NOTES = "run.json", "notes.md"


def read_state(folder: Path) -> dict[str, Any]:
    """What is recorded of a run; empty where nothing is."""
    return read_json(folder / STATE) if (folder / STATE).exists() else {}


def record(folder: Path, command: str, **changes: Any) -> None:
    """Adds to what is recorded of a run, and the command that did it, once."""
    state = read_state(folder)
    commands = [*state.get("commands", []), command]
    state |= changes | {"commands": list(dict.fromkeys(filter(None, commands)))}
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def facts(folder: Path, draft: Path, curve: Path) -> dict[str, str]:
    """The draft's shape, its text and its training, for the model card."""
    config, points, state = read_json(draft / "config.json"), read_curve(curve), read_state(folder)
    ours = config.get("outpace", {})
    found = {"layers": str(config["num_hidden_layers"]), "width": str(config["hidden_size"])}
    found |= {"from the target's layers": str(ours.get("target_layers") or "none, fresh weights")}
    if state.get("draft"):
        found["training went on from"] = state["draft"]
    if "draft_vocab_size" in ours:
        found["tokens that it writes"] = f"{ours['draft_vocab_size']:,} of {from_dict(config).vocab_size:,}"
    found |= _text(state, points)
    if points:
        last = points[-1]
        minutes = last["seconds"] / 60
        found["trained on"] = f"{last['tokens']:,} answer tokens, {last['step']:,} steps, {minutes:.0f} min"
        found["held-out agreement"] = f"{last['top1']:.3f} (likeliest token, the target's own text before it)"
    if "training" in state:
        found["training"] = _named(state["training"])
    return found


def _text(state: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    if "prompts" in state:
        found["prompts"] = ", ".join(Path(name).name for name in state["prompts"])
    if points:
        answered = f"{points[-1]['text_tokens']:,} answer tokens"
        temperatures = ", ".join(f"{value:g}" for value in state.get("temperatures", []))
        found["the target's text"] = answered + (f", at temperatures {temperatures}" if temperatures else "")
    return found


def _named(values: Mapping[str, Any]) -> str:
    """`name value` of all that is set, one level deep."""
    flat = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    for value in values.values():
        flat |= value if isinstance(value, Mapping) else {}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in flat.items() if value is not None)


def notes(folder: Path) -> str:
    """What somebody wrote about the data, in the run's folder."""
    file = folder / NOTES
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def licence(target: str | None) -> str | None:
    """As the target's own files name it: the .gguf file's header, or the front matter of its card."""
    path = shipped_model() if target is None else Path(target).expanduser()
    if path.is_file():
        from outpace.models.files.gguf.header import open_gguf

        with open_gguf(path) as header:
            found = header.metadata.get("general.license")
        return found if isinstance(found, str) else None
    card = resolve(target) / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:40] if card.is_file() else []
    named = [line.split(":", 1)[1].strip().strip("\"'") for line in lines if line.startswith("license:")]
    return named[0] if named and named[0] else None
