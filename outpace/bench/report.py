"""What a bench shows: a table for people, rows for machines, and what they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.api.llm import LLM
from outpace.bench import quality
from outpace.bench.contenders import is_lossy, parse_methods
from outpace.bench.figures import ALL, TableRow
from outpace.core import machine
from outpace.core.errors import UserError

POSITIONS = 8  # of acceptance by position, in the table
GREY = "bright_black"
BUSY = 0.5  # of the cores at work when a bench begins
HEADS = (
    "tokens/s",
    "quartiles",
    "speedup",
    "worst",
    "accepted\nlength",
    "hit\nrate",
    "first\nms",
    "p50\nms",
    "p99\nms",
    "same\ntext",
)
CAPTION = (
    "tokens/s: decoding only, all tokens over all time; quartiles: of the prompts' medians. Speedup: over plain"
    " decoding of the same prompts; worst: of one prompt. First: to the first token (median); p50, p99: between two"
    " rounds' arrivals. Same text: as plain decoding in the same precision, answers compared."
)
BATCHED = (
    "Several at once: all answers' tokens over the time from the call to the last one's end, prompts read included."
)


def about(llm: LLM, inflate: int, command: str, device: str) -> dict[str, Any]:
    """The machine, the versions, the command, and the floor of a pass."""
    found = {"target": llm.target.name, "draft": llm.draft.name if llm.draft else None, "inflate": inflate}
    size = llm.target.model.weight_bytes
    return found | {"command": command, **machine.describe(device), **_floor(size, device)}


def _floor(size: int | None, device: str) -> dict[str, Any]:
    """Bytes of weights over measured bandwidth; of a CPU only."""
    if size is None or device != "cpu":
        return {"weight_bytes": size, "gigabytes_per_second": None, "floor_seconds": None}
    rate = machine.memory_bandwidth()
    return {"weight_bytes": size, "gigabytes_per_second": round(rate / 1e9, 2), "floor_seconds": round(size / rate, 6)}


def tables(found: Sequence[TableRow], facts: Mapping[str, Any]) -> RenderableType:
    """All that is shown at the end."""
    parts: list[RenderableType] = [_title(facts), _speeds([row for row in found if row.batch == 1])]
    beside = quality.table([row for row in found if row.batch == 1])
    parts += [beside] if beside is not None else []
    for count in sorted({row.batch for row in found if row.batch > 1}):
        parts += [Text(f"{count} at once", style="bold"), _batched([row for row in found if row.batch == count])]
    if any(row.batch > 1 for row in found):
        parts.append(Text(BATCHED, style=GREY))
    whole = found[-1].task if found and found[0].task == found[-1].task else ALL
    drafting = [row for row in found if row.batch == 1 and row.task == whole and row.acceptance_by_position]
    parts += [_positions(drafting)] if drafting else []
    parts += [Text(line, style="yellow") for line in [*_busy(facts), *_remarks(found)]]
    return Group(*parts, _footer(facts))


def _title(facts: Mapping[str, Any]) -> Text:
    text = Text(f"{facts['target']}", style="bold")
    text.append(f", draft {facts['draft']}" if facts.get("draft") else "", style="bold")
    if facts.get("inflate", 1) > 1:
        text.append(f"\nINFLATED {facts['inflate']} times: ", style="bold magenta")
        text.append(
            "added layers write nothing; the text is the target's, the cost that of a larger one", style="magenta"
        )
    return text


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    table.add_column("method", overflow="fold", min_width=14, max_width=40)
    return table


def _speeds(found: Sequence[TableRow]) -> Table:
    table = _table()
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    most = 0
    for row, is_new in _with_heads(found):
        if is_new:
            most = row.prompts
            table.add_section()
            table.add_row(Text(f"{row.task}, {row.prompts} prompt{'' if row.prompts == 1 else 's'}", style=GREY))
        spread = f"{row.quartiles[0]:.0f}-{row.quartiles[2]:.0f}" if row.quartiles else "-"
        table.add_row(
            _name(row, most),
            _number(row.tokens_per_second, 1),
            spread,
            _times(row.speedup),
            _times(row.worst_speedup),
            _number(row.mean_accepted_length, 2),
            "-" if row.hit_rate is None else f"{row.hit_rate:.0%}",
            *(_milliseconds(time) for time in (row.time_to_first_token, row.inter_token_p50, row.inter_token_p99)),
            _same(row),
        )
    table.caption = Text(CAPTION, style=GREY)
    return table


def _batched(found: Sequence[TableRow]) -> Table:
    table = _table()
    for name in ("tokens/s\nin all", "speedup", "same\ntext"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(_name(row), _number(row.tokens_per_second, 1), _times(row.speedup), _same(row))
    return table


def _positions(found: Sequence[TableRow]) -> Table:
    table = _table()
    table.title, table.title_justify = "accepted by position, where all before it were accepted", "left"
    for place in range(1, 1 + min(POSITIONS, max(len(row.acceptance_by_position) for row in found))):
        table.add_column(str(place), justify="right", no_wrap=True)
    for row in found:
        table.add_row(_name(row), *(f"{rate:.2f}" for rate in row.acceptance_by_position[:POSITIONS]))
    return table


def _with_heads(found: Sequence[TableRow]) -> list[tuple[TableRow, bool]]:
    """Each row, and whether it is the first of its task."""
    return [(row, place == 0 or row.task != found[place - 1].task) for place, row in enumerate(found)]


def _name(row: TableRow, prompts: int | None = None) -> Text:
    """A peer with its precision; and how many prompts it has, where the others have `prompts`."""
    name = Text("  " + row.label)
    if row.is_peer:
        name.append(f" {row.precision}", style=GREY)
    return name if prompts in (None, row.prompts) else name.append(f" ({row.prompts} prompts)", style="yellow")


def _same(row: TableRow) -> Text:
    if row.failed and not row.prompts:
        return Text("failed", style="red")
    if row.equal_text is None:
        return Text("-", style=GREY)
    if row.equal_text:
        return Text(f"yes, {row.compared}", style="green")
    return Text(f"no, {row.different} of {row.compared}", style="red")


def _busy(facts: Mapping[str, Any]) -> list[str]:
    """Others' work disturbs all that is measured here, the floor too."""
    load, cores = facts.get("load") or 0.0, facts["cores"]
    busy = f"The machine was busy when this began (load {load:.1f} on {cores} cores): take no time here for granted."
    return [busy] if load >= BUSY * cores else []


def _remarks(found: Sequence[TableRow]) -> list[str]:
    """What the table has no room for: where texts part, and what failed."""
    lines = [f"{name} is lossy: another text than plain decoding's is what it is for." for name in _lossy(found)]
    for row in found:
        left = row.divergence
        if left is not None and row.task == left.task:
            gap = (
                f"; the target scores {_token(left.plain_token)} {'higher' if left.score_gap > 0 else 'lower'} by"
                f" {abs(left.score_gap):.5g}"
                if left.score_gap
                else ""
            )
            where = f"{left.task} {left.prompt}, token {left.position + 1}"
            lines.append(f"{row.label} wrote {_token(left.token)} at {where}{gap}")
        if row.failed and row.task != ALL:
            lines.append(f"{row.label} failed on {row.failed} answers of {row.task}: {row.reason}")
    return lines


def _lossy(found: Sequence[TableRow]) -> list[str]:
    labels = dict.fromkeys(row.label for row in found if not row.is_peer)
    return [label for label in labels if is_lossy(parse_methods(label, {})[-1])]


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def _footer(facts: Mapping[str, Any]) -> Text:
    versions = ", ".join(f"{name} {at}" for name, at in facts["versions"].items())
    lines = [f"{facts['processor']}, {facts['threads']} threads on {facts['cores']} cores, load {facts['load']}"]
    lines += [facts["gpu"]] if "gpu" in facts else []
    lines.append(f"{versions}, Python {facts['python']}, commit {facts['commit'] or 'unknown'}")
    if facts.get("floor_seconds"):
        floor = facts["floor_seconds"]
        bytes_read = f"{facts['weight_bytes'] / 1e6:.0f} MB of weights at {facts['gigabytes_per_second']:.1f} GB/s"
        lines.append(
            f"floor of a pass: about {1e3 * floor:.1f} ms, {bytes_read} (estimate): about {1 / floor:.0f} tokens/s"
            " by plain decoding, if memory is the limit"
        )
    return Text("\n".join([*lines, facts["command"]]), style=GREY)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def plain_rows(found: Sequence[TableRow], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows as JSON has them; each says on what it was measured."""
    known = {name: facts.get(name) for name in ("target", "draft", "inflate", "processor", "commit")}
    return [_rounded(asdict(row)) | known for row in found]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, tuple | list) else value


def write_json(file: Path, value: Any) -> None:
    """A file of JSON, whole or not at all."""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror})") from error
