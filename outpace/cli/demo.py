"""`outpace demo`: compare speed and text of plain decoding and three methods on two prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import DRAFT, JSON, METHOD, TARGET, TARGET_NAMES, BasicSamplingFlags, ModelFlags
from outpace.core.errors import check_range
from outpace.core.options import help_of
from outpace.core.stats import percent
from outpace.engine.options import BuildOptions

if TYPE_CHECKING:
    from outpace.api.llm import LLM, Result
    from outpace.api.params import SamplingParams
    from outpace.api.text import Piece

PROMPT = (
    "Correct the spelling of this letter:\n\nDear Mrs Miller,\n\nThank you for your letter of 3 May. We are sory that"
    " the lamp arived broken. We will send you a new lamp this week, and you do not need to send the old lamp back."
    " Please write to us if the new lamp has not arived by 20 May.\n\nKind regards,\nJohn Smith"
)
STORY = "Tell me a short story about a lighthouse keeper."
CAPTION = (
    "Each figure: {runs} on this machine, prefill not counted. The gain depends on the prompt: drafts are accepted"
    " where the answer repeats what was said before, and seldom where it is new, as in the story ('{story}')."
)
GREEN = " Accepted tokens are green above."
DISTURBED = "Other work on this machine disturbed these times: run the demo again when it is idle."
PLAIN = "plain decoding"
METHODS = ("auto", "card", "speculative")  # the first one's answer is streamed
TITLE = "the default method: {drafter}, as much as pays"
MAX_VARIATION = 1.5  # plain decoding's rounds that differ by a larger factor were disturbed
DIFFERENT = 1  # the exit status if the texts differ


@dataclass(frozen=True)
class Comparison:
    """Answers to one prompt by each method, plain decoding first, one for each round."""

    title: str
    answers: Mapping[str, Sequence[Result]]

    @property
    def plain(self) -> Sequence[Result]:
        return self.answers[PLAIN]

    @property
    def differs_at(self) -> int | None:
        """The first token at which an answer differs from the first plain one; None if all are equal."""
        expected, others = self.plain[0].tokens, [one.tokens for results in self.answers.values() for one in results]
        pairs = (pair for other in others for pair in enumerate(zip_longest(expected, other)))
        return min((place for place, (one, other) in pairs if one != other), default=None)

    @property
    def is_disturbed(self) -> bool:
        """Whether the times are implausible: plain runs differ widely, or a gain exceeds the mean accepted length."""
        plain = [result.tokens_per_second for result in self.plain]
        return max(plain) > MAX_VARIATION * min(plain) or any(
            _rate(results) > 1.1 * median(plain) * max(result.figures.mean_accepted_length for result in results)
            for method, results in self.answers.items()
            if method != PLAIN
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each method: of the answer with the median speed."""
        base, rows = _rate(self.plain), []
        for method, results in self.answers.items():
            middle = sorted(results, key=lambda result: result.tokens_per_second)[len(results) // 2]
            shown = display.figures(middle) | {"tokens_per_second": round(_rate(results), 3)}
            rows.append({"method": method, "speedup": round(_rate(results) / base, 4) if base else None, **shown})
        return rows

    def record(self) -> dict[str, Any]:
        """Return the comparison for `--json`."""
        first = self.plain[0]
        shown = {"title": self.title, "text": first.text, "tokens": len(first.tokens), "differs_at": self.differs_at}
        return {**shown, "disturbed": self.is_disturbed, "methods": self.rows()}


def _rate(results: Sequence[Result]) -> float:
    return median(result.tokens_per_second for result in results)


@flags
def demo(
    sampling: BasicSamplingFlags,
    target: str | None = flag(None, TARGET, *TARGET_NAMES, panel="Model"),
    draft: list[str] | None = flag(None, DRAFT, panel="Model"),
    drafter: str | None = flag(None, help_of(BuildOptions)["drafter"], panel=METHOD),
    prompt: str = flag(PROMPT, "A prompt of your own instead of the first of the two.", show_default=False),
    rounds: int = flag(3, "Runs of each method; the table shows their medians."),
    as_json: bool = JSON,
) -> None:
    """Compare four methods on two prompts: their speed, and whether their texts are equal."""
    from outpace.api.llm import LLM
    from outpace.api.params import SamplingParams

    params = SamplingParams(**asdict(sampling))
    check_range("rounds", rounds, 1, 1000)
    model = ModelFlags(target, draft, build=BuildOptions(METHODS[0], drafter))
    with ExitStack() as stack:
        llm = stack.enter_context(model.open({}, quiet=as_json, bar_after=0.0))
        drafter = drafter or (f"{llm.draft.drafter}+ngram" if llm.draft else "ngram")
        llms = {PLAIN: llm, METHODS[0]: llm}
        for name in METHODS[1:]:
            llms[name] = stack.enter_context(LLM(llm.target, llm.draft, method=name, drafter=drafter))
        runner = DemoRunner(llms, params, rounds, as_json)
        shown = {} if as_json else runner.stream(prompt, drafter)
        title = "your prompt" if as_json else "the prompt above"
        found = [runner.compare(title, prompt, shown), runner.compare("a story", STORY, {})]
    is_equal = all(comparison.differs_at is None for comparison in found)
    if as_json:
        prompts = [comparison.record() for comparison in found]
        display.print_json({"equal_text": is_equal, "drafter": drafter, "rounds": rounds, "prompts": prompts})
    else:
        _report(found, rounds)
    if not is_equal:
        raise typer.Exit(DIFFERENT)


class DemoRunner:
    """Runs the methods one after the other over the same models."""

    def __init__(self, llms: Mapping[str, LLM], params: SamplingParams, rounds: int, quiet: bool) -> None:
        """Open the runner and warm up all methods."""
        self._llms, self._params, self._rounds, self._quiet = llms, params, rounds, quiet
        for name, llm in llms.items():
            llm.generate(["one two three one two three"], max_tokens=8, plain=name == PLAIN)

    def stream(self, prompt: str, drafter: str) -> dict[str, Result]:
        """Stream the answers of plain decoding and the first method."""
        shown, console = {}, display.stdout()
        console.print("Prompt", style="bold")
        console.print(prompt, style=display.GREY)
        for title, method in ((PLAIN.capitalize(), PLAIN), (TITLE.format(drafter=drafter), METHODS[0])):
            console.print(f"\n{title}", style="bold")
            printer = display.TextPrinter(color=True)
            shown[method] = self._answer(prompt, method, printer.show)
            printer.end()
        return shown

    def compare(self, title: str, prompt: str, shown: Mapping[str, Result]) -> Comparison:
        """Run all rounds of all methods. Answers in `shown` count as the first round."""
        answers = {method: [shown[method]] if method in shown else [] for method in self._llms}
        with display.loading_bar(self._quiet, after=0.0) as bar:
            for number in range(self._rounds):
                bar(f"timing {title}", number / self._rounds)
                for method, results in answers.items():
                    if len(results) <= number:
                        results.append(self._answer(prompt, method))
        return Comparison(title, answers)

    def _answer(self, prompt: str, method: str, show: Callable[[Piece], None] = lambda piece: None) -> Result:
        stream = self._llms[method].stream([{"role": "user", "content": prompt}], self._params, plain=method == PLAIN)
        if not display.write_answer(stream, show):
            raise KeyboardInterrupt
        return stream.finish()


def _report(found: Sequence[Comparison], rounds: int) -> None:
    """Print whether the texts are equal, the table, and its caption."""
    console = display.stdout()
    console.print()
    for one in found:
        if one.differs_at is None:
            equal = f"all {len(one.plain[0].tokens)} tokens are equal"
            console.print(f"Same text by all, {one.title}: {equal}.", style="bold green")
        else:
            console.print(f"DIFFERENT TEXT, {one.title}: from token {one.differs_at + 1} on.", style="bold red")
    table = Table("method", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("tokens/s", "speedup", "mean\naccepted\nlength", "draft\nacceptance", "hit\nrate"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(Text(one.title, style=display.GREY))
        for row in one.rows():
            table.add_row(
                f"  {row['method']}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x" if row["speedup"] else "-",
                f"{row['mean_accepted_length']:.2f}",
                percent(row["draft_acceptance"]),
                percent(row["hit_rate"]),
            )
    console.print(table)
    if any(one.is_disturbed for one in found):
        console.print(DISTURBED, style="yellow")
    runs = "one run" if rounds == 1 else f"medians of {rounds} alternating runs"
    caption = CAPTION.format(runs=runs, story=STORY)
    console.print(caption + (GREEN if console.color_system else ""), style=display.GREY)
