"""`outpace demo`: compare speed and text of plain decoding and three methods on two prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import DRAFT, JSON, METHOD, TARGET, TARGET_NAMES, BasicSamplingFlags, ModelFlags
from outpace.core.errors import check_range
from outpace.core.options import help_of
from outpace.engine.options import BuildOptions

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.api.params import SamplingParams

PROMPT = (
    "Correct the spelling of this letter:\n\nDear Mrs Miller,\n\nThank you for your letter of 3 May. We are sory that"
    " the lamp arived broken. We will send you a new lamp this week, and you do not need to send the old lamp back."
    " Please write to us if the new lamp has not arived by 20 May.\n\nKind regards,\nJohn Smith"
)
STORY = "Tell me a short story about a lighthouse keeper."
CAPTION = (
    "tokens/s: on this machine, prefill not counted. The gain depends on the prompt: drafts are accepted where the"
    f" answer repeats what was said before, and seldom where it is new, as in the story ('{STORY}')."
)
GREEN = " Accepted tokens are green above."
METHODS = "auto,card,speculative"
COLUMNS = ("tokens/s", "speedup", "accepted\nlength", "hit\nrate", "same\ntext")
DIFFERENT = 1  # the exit status if the texts differ


@flags
def demo(
    sampling: BasicSamplingFlags,
    target: str | None = flag(None, TARGET, *TARGET_NAMES, panel="Model"),
    draft: list[str] | None = flag(None, DRAFT, panel="Model"),
    drafter: str | None = flag(None, help_of(BuildOptions)["drafter"], panel=METHOD),
    prompt: str = flag(PROMPT, "A prompt of your own instead of the first of the two.", show_default=False),
    rounds: int = flag(3, "Answers of each method to each prompt; the table shows all tokens over all time."),
    as_json: bool = JSON,
) -> None:
    """Compare four methods on two prompts: their speed, and whether their texts are equal."""
    from outpace.api.params import SamplingParams
    from outpace.bench import report
    from outpace.bench.contenders import parse_methods
    from outpace.bench.figures import ALL
    from outpace.bench.run import Bench, BenchOptions
    from outpace.bench.store import Store

    params = SamplingParams(**asdict(sampling))
    check_range("rounds", rounds, 1, 1000)
    model = ModelFlags(target, draft, build=BuildOptions(drafter=drafter))
    with TemporaryDirectory() as folder, model.open({}, quiet=as_json, bar_after=0.0) as llm:
        drafter = drafter or (f"{llm.draft.drafter}+ngram" if llm.draft else "ngram")
        if not as_json:
            _stream(llm, prompt, params, drafter)
        file = Path(folder) / "demo.jsonl"
        tasks = {"your prompt" if as_json else "the prompt above": prompt, "a story": STORY}
        file.write_text("".join(json.dumps({"task": name, "turns": [text]}) + "\n" for name, text in tasks.items()))
        methods = tuple(parse_methods(METHODS, {"drafter": drafter}))
        options = BenchOptions((str(file),), methods, rounds=rounds, sampling_params=params)
        with Bench(llm, options, Store(None, {}), display.say) as bench, display.loading_bar(as_json, after=0.0) as bar:
            bench.measure(lambda what, done, total: bar("timing", done / total))
            rows = [row for row in bench.rows() if row.task != ALL]
            failure = bench.failure
    is_equal = failure is None and all(row.equal_text for row in rows)
    if as_json:
        found = {"equal_text": is_equal, "drafter": drafter, "rounds": rounds}
        display.print_json({**found, "rows": report.plain_rows(rows, {})})
    else:
        console = display.stdout()
        columns = [column for column in report.SPEED_COLUMNS if column[0] in COLUMNS]
        console.print(report.table(columns, rows))
        equal = "Same text by all methods: all tokens are equal."
        said, style = (equal, "bold green") if is_equal else ("DIFFERENT TEXT by some methods.", "bold red")
        console.print(said, style=style)
        console.print(CAPTION + (GREEN if console.color_system else ""), style=display.GREY)
    if not is_equal:
        raise typer.Exit(DIFFERENT)


def _stream(llm: LLM, prompt: str, params: SamplingParams, drafter: str) -> None:
    """Stream the answers of plain decoding and of the default method."""
    console = display.stdout()
    console.print("Prompt", style="bold")
    console.print(prompt, style=display.GREY)
    for title, plain in (("Plain decoding", True), (f"the default method: {drafter}, as much as pays", False)):
        console.print(f"\n{title}", style="bold")
        printer = display.TextPrinter(color=True)
        stream = llm.stream([{"role": "user", "content": prompt}], params, plain=plain)
        if not display.write_answer(stream, printer.show):
            raise KeyboardInterrupt
        printer.end()
