"""What a run's folder tells about a draft: how it was made, of what, and under which licence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.distill.report import read_curve
from outpace.models.files.checkpoint import read_json
from outpace.models.files.find import resolve, shipped_model
from outpace.models.llama.config.llama_config import from_dict

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
