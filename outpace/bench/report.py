"""Shows a bench's results: tables for a terminal, rows for JSON, and facts about the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.api.llm import LLM
from outpace.bench.contenders import PLAIN, is_lossy_label
from outpace.bench.figures import ALL, TableRow
from outpace.core import machine
from outpace.core.stats import percent

POSITIONS = 8  # columns of the table of acceptance by position
GREY = "bright_black"
BUSY = 0.5  # load per core, at the start, above which the report warns
CAPTION = (
    "tokens/s: decoding only, all tokens over all time; quartiles: of the prompts' medians. Speedup: over plain"
    " decoding of the same prompts; worst: of one prompt. First: to the first token (median); p50, p99: between two"
    " rounds' arrivals. Same text: as plain decoding at the same"
    " temperature and precision, answers compared."
)
SHORT_COLUMNS = ("tokens/s", "speedup", "worst", "accepted\nlength", "same\ntext")  # without --wide
SHORT_CAPTION = (
    "tokens/s: decoding only. Speedup: over plain decoding of the same prompts; worst: of one prompt. Accepted length:"
    " tokens per target pass. --wide shows more."
)
COST_CAPTION = (
    " Peak: memory of a process with this method and its workers alone. Experts: mean number that a pass applied in a"
    " layer."
)
BATCH_CAPTION = (
    "Several at once: all tokens over the time from the call to the end of the last answer, prefill included."
)
QUALITY_CAPTION = (
    "Relaxed: tokens that a lossy rule accepted and the exact rule would have rejected. Perplexity: of the text, by the"
    " target at temperature 1; a good text has plain decoding's. Right: of the answers whose reference is known."
)


def about(llm: LLM, command: str, device: str) -> dict[str, Any]:
    """Describe the models, machine, versions and command, with the lower bound on a target pass's time.

    The bound, on a CPU only, is the bytes of weights divided by the measured memory bandwidth.
    """
    size = llm.target.model.weight_bytes
    facts = {"target": llm.target.name, "draft": llm.draft.name if llm.draft else None}
    facts |= {"command": command, **machine.describe(device), "weight_bytes": size}
    if size is None or device != "cpu":
        return facts | {"gigabytes_per_second": None, "floor_seconds": None}
    rate = machine.memory_bandwidth()
    return facts | {"gigabytes_per_second": round(rate / 1e9, 2), "floor_seconds": round(size / rate, 6)}


def tables(rows: Sequence[TableRow], facts: Mapping[str, Any], is_wide: bool = False) -> RenderableType:
    """Build what is shown at the end of a bench: the rows over all tasks and what they show; with `is_wide` also those
    of each task, all columns, acceptance by position, and the machine."""
    single = [row for row in rows if row.batch == 1]
    whole = rows[-1].task if rows and rows[0].task == rows[-1].task else ALL
    costs, quality = _columns_in_use(COST_COLUMNS, single), _columns_in_use(QUALITY_COLUMNS, single)
    parts: list[RenderableType] = [_title(facts)]
    if is_wide:
        caption = CAPTION + COST_CAPTION if costs else CAPTION
        parts.append(table((*SPEED_COLUMNS, *costs), single, caption))
        parts += [table(quality, single, QUALITY_CAPTION)] if quality else []
    else:
        columns = [column for column in SPEED_COLUMNS if column[0] in SHORT_COLUMNS]
        shown = [row for row in single if row.task == whole]
        parts.append(table((*columns, *quality, *costs), shown, SHORT_CAPTION))
    batches = sorted({row.batch for row in rows if row.batch > 1})
    for count in batches:
        parts += [Text(f"{count} at once", style="bold")]
        parts += [table(BATCH_COLUMNS, [row for row in rows if row.batch == count], sections=False)]
    parts += [Text(BATCH_CAPTION, style=GREY)] if batches else []
    drafting = [row for row in single if row.task == whole and row.acceptance_by_position]
    if drafting and is_wide:
        longest = min(POSITIONS, max(len(row.acceptance_by_position) for row in drafting))
        by_position = table([(str(1 + at), partial(_rate, at)) for at in range(longest)], drafting, sections=False)
        by_position.title, by_position.title_justify = "accepted by position, where all before it were accepted", "left"
        parts.append(by_position)
    parts += [Text(line, style="yellow") for line in _remarks(rows, facts)]
    parts += [_footer(facts)] if is_wide else []
    return Group(*parts, Text(conclusion([row for row in single if row.task == whole]), style="bold"))


def conclusion(rows: Sequence[TableRow]) -> str:
    """Return a sentence with the fastest of the rows of one task, and whether the texts are plain decoding's."""
    timed = sorted((row for row in rows if row.tokens_per_second), key=lambda row: -(row.tokens_per_second or 0.0))
    if not timed:
        return "nothing was measured"
    best = timed[0]
    if best.label == PLAIN:
        others = f"; {timed[1].label} has {number(timed[1].speedup, 2, 'x')} its speed" if len(timed) > 1 else ""
        said = f"plain decoding is fastest{others}"
    else:
        said = f"{best.label} is fastest: {number(best.speedup, 2, 'x')} plain decoding"
    judged = [row for row in rows if row.label != PLAIN]
    compared, different = sum(row.compared for row in judged), sum(row.different for row in judged)
    texts = f"all {compared} texts equal" if not different else f"{different} of {compared} texts differ"
    return said + (f", {texts}" if compared else "")


def _columns_in_use(columns: Columns, rows: Sequence[TableRow]) -> Columns:
    """Return the columns that have a value in some row."""
    return [(name, show) for name, show in columns if any(show(row) != "-" for row in rows)]


def _title(facts: Mapping[str, Any]) -> Text:
    text = Text(f"{facts['target']}", style="bold")
    text.append(f", draft {facts['draft']}" if facts.get("draft") else "", style="bold")
    return text


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Format a number with a fixed count of decimals; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _megabytes(count: int | None) -> str:
    return number(count and count / 1e6, 0)


def _same_text(row: TableRow) -> Text:
    if row.failed and not row.prompts:
        return Text("failed", style="red")
    if row.equal_text is None:
        return Text("-", style=GREY)
    if row.equal_text:
        return Text(f"yes, {row.compared}", style="green")
    return Text(f"no, {row.different} of {row.compared}", style="red")


Columns = Sequence[tuple[str, Callable[[TableRow], str | Text]]]
SPEED_COLUMNS: Columns = (
    ("tokens/s", lambda row: number(row.tokens_per_second, 1)),
    ("quartiles", lambda row: f"{row.quartiles[0]:.0f}-{row.quartiles[2]:.0f}" if row.quartiles else "-"),
    ("speedup", lambda row: number(row.speedup, 2, "x")),
    ("worst", lambda row: number(row.worst_speedup, 2, "x")),
    ("accepted\nlength", lambda row: number(row.mean_accepted_length, 2)),
    ("hit\nrate", lambda row: percent(row.hit_rate)),
    ("first\nms", lambda row: _milliseconds(row.time_to_first_token)),
    ("p50\nms", lambda row: _milliseconds(row.inter_token_p50)),
    ("p99\nms", lambda row: _milliseconds(row.inter_token_p99)),
    ("same\ntext", _same_text),
)
COST_COLUMNS: Columns = (
    ("experts\nper pass", lambda row: number(row.experts_per_pass, 1)),
    ("peak\nMB", lambda row: _megabytes(row.peak_memory and row.peak_memory.host)),
    ("GPU\nMB", lambda row: _megabytes(row.peak_memory and row.peak_memory.gpu)),
)
BATCH_COLUMNS: Columns = (
    ("tokens/s\nin all", lambda row: number(row.tokens_per_second, 1)),
    ("speedup", lambda row: number(row.speedup, 2, "x")),
    ("same\ntext", _same_text),
)
QUALITY_COLUMNS: Columns = (
    ("relaxed", lambda row: percent(row.relaxed)),
    ("perplexity", lambda row: number(row.perplexity, 2)),
    ("right", lambda row: percent(row.accuracy, f" of {row.scored}")),
)


def table(columns: Columns, rows: Sequence[TableRow], caption: str = "", sections: bool = True) -> Table:
    """Build a table with a line per row; with `sections`, a heading precedes the rows of each task."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    made.caption = Text(caption, style=GREY) if caption else None
    made.add_column("method", overflow="fold", min_width=14, max_width=40)
    for name, _ in columns:
        made.add_column(name, justify="right", no_wrap=True)
    heading: TableRow | None = None
    for row in rows:
        if sections and (heading is None or heading.task != row.task):
            heading = row
            made.add_section()
            made.add_row(Text(f"{row.task}, {row.prompts} prompt{'' if row.prompts == 1 else 's'}", style=GREY))
        made.add_row(_name(row, heading), *(show(row) for _, show in columns))
    return made


def _name(row: TableRow, heading: TableRow | None) -> Text:
    """Return a row's label, with a peer's precision, and its number of prompts if it differs from the heading's."""
    name = Text("  " + row.label)
    if row.is_peer:
        name.append(f" {row.precision}", style=GREY)
    return (
        name.append(f" ({row.prompts} prompts)", style="yellow") if heading and heading.prompts != row.prompts else name
    )


def _rate(at: int, row: TableRow) -> str:
    return "".join(f"{rate:.2f}" for rate in row.acceptance_by_position[at : at + 1])


def _remarks(rows: Sequence[TableRow], facts: Mapping[str, Any]) -> list[str]:
    """Return the lines below the tables: a busy machine, lossy methods, divergences of texts, and failures."""
    load, cores = facts.get("load") or 0.0, facts["cores"]
    busy = f"The machine was busy when the bench began (load {load:.1f} on {cores} cores): the times may be wrong."
    labels = dict.fromkeys(row.label for row in rows if not row.is_peer)
    lines = [busy] if load >= BUSY * cores else []
    lines += [f"{one} is lossy: its text may differ from plain decoding's." for one in labels if is_lossy_label(one)]
    for row in rows:
        found = row.divergence
        if found is not None and row.task == found.task:
            gap = ""
            if found.score_gap:
                side = "higher" if found.score_gap > 0 else "lower"
                gap = f"; the target scores {_token(found.plain_token)} {side} by {abs(found.score_gap):.5g}"
            where = f"{found.task} {found.prompt}, token {found.position + 1}"
            lines.append(f"{row.label} wrote {_token(found.token)} at {where}{gap}")
        if row.failed and row.task != ALL:
            lines.append(f"{row.label} failed on {row.failed} answers of {row.task}: {row.reason}")
    return lines


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def _footer(facts: Mapping[str, Any]) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['processor']}, {facts['threads']} threads on {facts['cores']} cores, load {facts['load']}"]
    lines += [facts["gpu"]] if "gpu" in facts else []
    lines.append(f"{versions}, Python {facts['python']}, commit {facts['commit'] or 'unknown'}")
    if facts.get("floor_seconds"):
        seconds = facts["floor_seconds"]
        bytes_read = f"{facts['weight_bytes'] / 1e6:.0f} MB of weights at {facts['gigabytes_per_second']:.1f} GB/s"
        lines.append(
            f"floor of a pass: about {1e3 * seconds:.1f} ms, {bytes_read} (estimate): about {1 / seconds:.0f} tokens/s"
            " by plain decoding, if memory is the limit"
        )
    return Text("\n".join([*lines, facts["command"]]), style=GREY)


def plain_rows(rows: Sequence[TableRow], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows for JSON, each with the models, the processor and the commit."""
    known = {name: facts.get(name) for name in ("target", "draft", "processor", "commit")}
    return [_rounded(asdict(row)) | known for row in rows]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, tuple | list) else value
