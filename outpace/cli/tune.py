"""`outpace tune`: measure a pair on this machine and store the times, from which the planner starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from outpace.cli import display
from outpace.cli.flags import check_file, flag, flags
from outpace.cli.options import JSON, ModelFlags
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.bench.tune import TuneResult


@flags
def tune(
    model: ModelFlags,
    max_tokens: int = flag(96, "Tokens of each timed answer."),
    rounds: int = flag(2, "Answers of each method to each prompt."),
    corpus: list[Path] | None = flag(
        None,
        "Make the file of --drafter cacheback or retrieval, or find what --drafter layer_skip leaves out, from"
        " this text file, or .jsonl file with text or turns in each line; may be repeated.",
    ),
    to: Path | None = flag(None, "With --corpus: the file to write; the default is in the cache folder."),
    trials: int = flag(200, "Sets of sublayers that are tried for --drafter layer_skip."),
    as_json: bool = JSON,
) -> None:
    """Time a pair of models on this machine and keep the times for method auto; with several drafts, rank them.

    With --corpus: make the file of drafter cacheback or retrieval from your own texts. With --drafter
    layer_skip: find the sublayers that a draft made of the target should leave out.
    """
    if model.build.drafter == "layer_skip":
        _search(model, corpus or [], to, trials, max_tokens, as_json)
        return
    if corpus or to is not None:
        _make(model, corpus or [], to, as_json)
        return
    from outpace.bench.tune import TuneOptions, tune

    options = TuneOptions(max_tokens=max_tokens, rounds=rounds)
    with (
        display.saying_what_is_kept(None),
        model.open({}, quiet=as_json) as llm,
        display.loading_bar(as_json, 0.0) as progress,
    ):
        found = tune(llm.target, llm.draft, options, progress)
    if as_json:
        record = asdict(found) | {"path": str(found.path) if found.path else None}
        display.print_json(record)
        return
    display.stdout().print(_table(found))
    if found.path is None:
        display.say("method auto cannot use these times: they could not be stored")
        return
    effect = "plans with these times" if found.chosen == "auto" else f"is method {found.chosen}, which was faster,"
    display.say(f"from now on method auto {effect} for this pair; kept in {found.path}")


def _make(model: ModelFlags, corpus: list[Path], to: Path | None, as_json: bool) -> None:
    if not corpus:
        raise UserError(f"--to is {to}, it needs a --corpus to make that file from")
    check_file("--to", to)
    from outpace.bench.tune import make_table

    with display.loading_bar(as_json, 0.0) as progress:
        made = make_table(model.build.drafter, corpus, model.target, to, progress)
    if as_json:
        display.print_json(made._asdict() | {"path": str(made.path)})
        return
    texts = "1 text" if made.texts == 1 else f"{made.texts} texts"
    large = made.bytes >= 1e6
    size = f"{made.tokens} tokens of {texts}, {made.bytes / (1e6 if large else 1e3):.1f} {'MB' if large else 'KB'}"
    display.say(f"{made.path}: {size}, for --drafter {made.drafter}")


def _search(
    model: ModelFlags, corpus: list[Path], to: Path | None, trials: int, max_tokens: int, as_json: bool
) -> None:
    """Find the sublayers that a draft made of the target should leave out, and describe the result."""
    if to is not None:
        raise UserError(f"--to is {to}, but --drafter layer_skip has no file: the results are options")
    from outpace.bench.skip_search import SearchOptions, calibration_texts, find_sublayers
    from outpace.models.load import load_model

    texts = calibration_texts(corpus)
    options = SearchOptions(max_tokens=max_tokens, trials=trials)
    with display.loading_bar(as_json, 0.0) as progress:
        found = find_sublayers(load_model(model.target, model.options, progress=progress), texts, options, progress)
    if as_json:
        sets = {f"skip_{kind}": list(layers) for kind, layers in found.sublayers._asdict().items()}
        figures = {"speed": found.speed, "draft_length": found.draft_length, "agreement": found.agreement}
        display.print_json(sets | figures | {"trials": found.trials, "tokens": found.tokens})
        return
    flags_ = f"--drafter layer_skip {found.sublayers} --draft-length {found.draft_length}"
    display.stdout().print(f"--method speculative {flags_}", highlight=False)
    what = f"the best of {found.trials} sets agrees with {found.agreement:.0%} of {found.tokens} tokens"
    loss = "" if found.speed > 1 else ": plain decoding is faster here"
    display.say(f"{what} and is predicted to write {found.speed:.2f} times as fast as plain decoding{loss}")


def _table(found: TuneResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title="measured on this machine", title_justify="left")
    table.add_column("", style="cyan")
    table.add_column("", justify="right")
    plain = found.rates.get("autoregressive", 0.0)
    rates = {f"by {name}": rate for name, rate in found.rates.items()}
    rates |= {f"draft {place}: {name}": rate for place, (name, rate) in enumerate(found.drafts.items(), 1)}
    for what, times in (("round", found.rounds), ("draft step", found.draft_steps)):
        for rows, seconds in times.items():
            table.add_row(f"{what} of {rows} row{'s' if rows > 1 else ''}", f"{seconds * 1e3:.2f} ms")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f} tokens/s" + (f"  {rate / plain:.2f}x" if plain else ""))
    return table
