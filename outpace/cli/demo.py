"""`outpace demo`: the same prompt by plain decoding and by CARD, side by side in time, text and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.options import Draft, Drafter, Json, Loading, Target, flags
from outpace.cli.writing import MaxTokens, Seed, Temperature, Writing
from outpace.core.errors import check_range

if TYPE_CHECKING:
    from outpace.library import LLM, Result

PROMPT = (
    "Correct the spelling of this letter:\n\nDear Mrs Miller,\n\nThank you for your letter of 3 May. We are sory that"
    " the lamp arived broken. We will send you a new lamp this week, and you do not need to send the old lamp back."
    " Please write to us if the new lamp has not arived by 20 May.\n\nKind regards,\nJohn Smith"
)
STORY = "Tell me a short story about a lighthouse keeper."
CAPTION = (
    "Each figure: {runs} on this machine, prefill not counted. The gain depends on the prompt: drafts are accepted"
    " where the answer repeats what was said before, and seldom where it is new, as in the story ('{story}'). Accepted"
    " tokens are green above."
)
DISTURBED = (
    "Other work on this machine disturbed these times: take none of them for granted, run it again when it is idle."
)
UNEVEN = 1.5  # rounds of plain decoding that differ by more than this were disturbed
DIFFERENT = 1  # the exit status when the two texts differ


@dataclass(frozen=True)
class Showing:
    """The demo's own few options."""

    target: Target = None
    draft: Draft = None
    drafter: Drafter = None
    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    seed: Seed = 0


@dataclass(frozen=True)
class Comparison:
    """One prompt's answers by plain decoding and by CARD, a round each."""

    title: str
    plain: list[Result]
    card: list[Result]

    @property
    def differs_at(self) -> int | None:
        """The first token at which a CARD answer left the plain one's text; None if all are equal."""
        expected = self.plain[0].tokens
        for result in (*self.plain, *self.card):
            if result.tokens != expected:
                pairs = zip(expected, result.tokens, strict=False)
                shorter = min(len(expected), len(result.tokens))
                return next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
        return None

    @property
    def is_disturbed(self) -> bool:
        """Whether the times cannot be right: plain runs differ widely, or a gain exceeds the mean accepted length."""
        plain = [result.tokens_per_second for result in self.plain]
        bound = 1.1 * max(result.figures.mean_accepted_length for result in self.card)
        card = median(result.tokens_per_second for result in self.card)
        return max(plain) > UNEVEN * min(plain) or card > bound * median(plain)


@flags
def demo(
    ctx: typer.Context,
    showing: Showing,
    prompt: Annotated[str, typer.Option(help="What both answer.", show_default=False)] = PROMPT,
    rounds: Annotated[int, typer.Option(help="Runs of each method; the table shows their medians.")] = 3,
    as_json: Json = False,
) -> None:
    """See plain decoding and CARD answer the same prompt, and whether the text is the same."""
    writing = Writing(max_tokens=showing.max_tokens, temperature=showing.temperature, seed=showing.seed)
    writing.check()
    check_range("rounds", rounds, 1, 1000)
    drafter = showing.drafter or ("model" if showing.draft else "ngram")
    loading = Loading(target=showing.target, draft=showing.draft, drafter=drafter, method="card")
    with loading.open(ctx.obj, quiet=as_json, bar_after=0.0) as llm:
        show = Show(llm, writing, drafter, rounds, as_json)
        found = [show.stream(prompt), show.time("a story", STORY)]
    if as_json:
        display.print_json(_record(found, drafter))
    else:
        _report(found, drafter)
    if any(comparison.differs_at is not None for comparison in found):
        raise typer.Exit(DIFFERENT)


class Show:
    """Runs the two methods in turn on one engine, and shows the first round."""

    def __init__(self, llm: LLM, writing: Writing, drafter: str, rounds: int, quiet: bool) -> None:
        self._llm, self._drafter, self._rounds, self._quiet = llm, drafter, rounds, quiet
        self._options = writing.options()

    def stream(self, prompt: str) -> Comparison:
        """The first answer of each is streamed where somebody looks on, the other rounds are silent."""
        self._warm_up()
        if self._quiet:
            return self.time("your prompt", prompt)
        console = display.stdout()
        console.print("Prompt", style="bold")
        console.print(prompt, style=display.GREY)
        answers = []
        for title, plain in (("Plain decoding", True), (f"CARD, {self._drafter} drafting beside it", False)):
            console.print(f"\n{title}", style="bold")
            answers.append([self._answer(prompt, plain, display.Page(color=True))])
        later = self._later("the same again", prompt, self._rounds - 1)
        return Comparison("the prompt above", answers[0] + later[0], answers[1] + later[1])

    def time(self, title: str, prompt: str) -> Comparison:
        """All rounds in silence."""
        return Comparison(title, *self._later(title, prompt, self._rounds))

    def _warm_up(self) -> None:
        for plain in (True, False):
            self._llm.generate(["one two three one two three"], max_tokens=8, plain=plain)

    def _answer(self, prompt: str, plain: bool, page: display.Page | None = None) -> Result:
        stream = self._llm.stream([{"role": "user", "content": prompt}], plain=plain, **self._options)
        whole = display.write_answer(stream, page.show if page else lambda piece: None)
        if page:
            page.end()
        if not whole:
            raise KeyboardInterrupt
        return stream.result

    def _later(self, title: str, prompt: str, rounds: int) -> tuple[list[Result], list[Result]]:
        console = display.stderr()
        plain: list[Result] = []
        card: list[Result] = []
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        hidden = self._quiet or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task("")
            for number in range(rounds):
                progress.update(task, description=f"timing {title}: round {number + 1} of {rounds}")
                plain.append(self._answer(prompt, plain=True))
                card.append(self._answer(prompt, plain=False))
        return plain, card


def _report(found: Sequence[Comparison], drafter: str) -> None:
    """Equal or not, the table, and what it does and does not say."""
    console = display.stdout()
    console.print()
    for comparison in found:
        count, place = len(comparison.plain[0].tokens), comparison.differs_at
        if place is None:
            console.print(f"Same text by both, {comparison.title}: all {count} tokens are equal.", style="bold green")
        else:
            console.print(f"DIFFERENT TEXT, {comparison.title}: from token {place + 1} on.", style="bold red")
    console.print(_table(found, drafter))
    rounds = len(found[0].plain)
    runs = "one run" if rounds == 1 else f"medians of {rounds} runs, taken in turn"
    if any(comparison.is_disturbed for comparison in found):
        console.print(DISTURBED, style="yellow")
    console.print(CAPTION.format(runs=runs, story=STORY), style=display.GREY)


def _table(found: Sequence[Comparison], drafter: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for name in ("tokens/s", "speedup", "mean\naccepted\nlength", "draft\nacceptance", "hit\nrate"):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in found:
        table.add_row(Text(comparison.title, style=display.GREY))
        for row in _rows(comparison, drafter):
            table.add_row(
                f"  {row['method']}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x" if row["speedup"] else "-",
                f"{row['mean_accepted_length']:.2f}",
                display.percent(row["draft_acceptance"]),
                display.percent(row["hit_rate"]),
            )
    return table


def _rows(comparison: Comparison, drafter: str) -> list[dict[str, Any]]:
    base = median(result.tokens_per_second for result in comparison.plain)
    rows = []
    for method, results in (("plain decoding", comparison.plain), (f"card, {drafter}", comparison.card)):
        rate = median(result.tokens_per_second for result in results)
        middle = sorted(results, key=lambda result: result.tokens_per_second)[len(results) // 2]
        shown = display.figures(middle) | {"tokens_per_second": round(rate, 3)}
        rows.append({"method": method, "speedup": round(rate / base, 4) if base else None, **shown})
    return rows


def _record(found: Sequence[Comparison], drafter: str) -> dict[str, Any]:
    return {
        "equal_text": all(comparison.differs_at is None for comparison in found),
        "rounds": len(found[0].plain),
        "prompts": [
            {
                "title": comparison.title,
                "text": comparison.plain[0].text,
                "tokens": len(comparison.plain[0].tokens),
                "differs_at": comparison.differs_at,
                "disturbed": comparison.is_disturbed,
                "methods": _rows(comparison, drafter),
            }
            for comparison in found
        ],
    }
