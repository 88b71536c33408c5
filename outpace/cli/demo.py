"""`outpace demo`: compare speed and text of plain decoding and three methods on two prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.flags import flag, flags
from outpace.cli.options import DRAFT, DRAFTER, JSON, METHOD, TARGET, BasicSamplingFlags, ModelFlags
from outpace.core.errors import check_range

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
METHODS = ("auto", "card", "speculative")  # the first one's answer is streamed
TITLE = "the default method: {drafter}, as much as pays"
MAX_VARIATION = 1.5  # plain decoding's rounds that differ by a larger factor were disturbed
DIFFERENT = 1  # the exit status if the texts differ


@dataclass(frozen=True)
class DemoFlags:
    """The models and the drafter."""

    target: str | None = flag(None, TARGET, panel="Model")
    draft: list[str] | None = flag(None, DRAFT, panel="Model")
    drafter: str | None = flag(None, DRAFTER, panel=METHOD)


@dataclass(frozen=True)
class Comparison:
    """Answers to one prompt by plain decoding and by each method, one for each round."""

    title: str
    plain: list[Result]
    fast: Mapping[str, list[Result]]

    @property
    def differs_at(self) -> int | None:
        """The first token at which an answer differs from the first plain one; None if all are equal."""
        expected = self.plain[0].tokens
        for result in (*self.plain, *(result for results in self.fast.values() for result in results)):
            if result.tokens != expected:
                pairs = zip(expected, result.tokens, strict=False)
                shorter = min(len(expected), len(result.tokens))
                return next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
        return None

    @property
    def is_disturbed(self) -> bool:
        """Whether the times are implausible: plain runs differ widely, or a gain exceeds the mean accepted length."""
        plain = [result.tokens_per_second for result in self.plain]
        return max(plain) > MAX_VARIATION * min(plain) or any(
            median(result.tokens_per_second for result in results)
            > 1.1 * median(plain) * max(result.figures.mean_accepted_length for result in results)
            for results in self.fast.values()
        )


@flags
def demo(
    ctx: typer.Context,
    pair: DemoFlags,
    sampling: BasicSamplingFlags,
    prompt: str = flag(PROMPT, "A prompt of your own instead of the first of the two.", show_default=False),
    rounds: int = flag(3, "Runs of each method; the table shows their medians."),
    as_json: bool = JSON,
) -> None:
    """Compare four methods on two prompts: their speed, and whether their texts are equal."""
    from outpace.api.params import SamplingParams

    params = SamplingParams(**asdict(sampling))
    check_range("rounds", rounds, 1, 1000)
    with ExitStack() as stack:
        drafter, llms = _open(pair, ctx.obj, as_json, stack)
        runner = DemoRunner(llms, params, rounds, as_json)
        shown = runner.stream(prompt, drafter)
        found = [
            runner.compare("your prompt" if as_json else "the prompt above", prompt, shown),
            runner.compare("a story", STORY, {}),
        ]
    if as_json:
        display.print_json(_record(found, drafter))
    else:
        _report(found, drafter)
    if any(comparison.differs_at is not None for comparison in found):
        raise typer.Exit(DIFFERENT)


def _open(pair: DemoFlags, extra: Mapping[str, Any], quiet: bool, stack: ExitStack) -> tuple[str, dict[str, LLM]]:
    """Return the drafter, and an LLM for each method over the same models. `extra` are passed-through options."""
    from outpace.api.llm import LLM

    first, *others = METHODS
    drafter = pair.drafter or ("model+ngram" if _has_draft(pair) else "ngram")
    model = ModelFlags(target=pair.target, draft=pair.draft, drafter=drafter, method=first)
    llm = stack.enter_context(model.open(_known(extra, first, drafter), quiet=quiet, bar_after=0.0))
    llms = {first: llm}
    for name in others:
        known = _known(extra, name, drafter)
        llms[name] = stack.enter_context(LLM(llm.target, llm.draft, method=name, drafter=drafter, **known))
    return drafter, llms


def _has_draft(pair: DemoFlags) -> bool:
    from outpace.models.files.find import shipped_model
    from outpace.models.files.pairs import NO_DRAFT, shipped_draft

    if pair.draft is not None or pair.target is not None:
        return bool(pair.draft) and pair.draft != [NO_DRAFT]
    return shipped_draft(shipped_model().stem) is not None


def _known(extra: Mapping[str, Any], method: str, drafter: str) -> dict[str, Any]:
    """Return the options of this method or the drafter, and those of no method, which it then refuses."""
    from outpace.core import registry

    def names(module: Any) -> set[str]:
        return {field.name for field in fields(module.Options)}

    others = set().union(*(names(registry.find("decoders", name)) for name in METHODS if name != method))
    own = names(registry.find("decoders", method))
    own |= {name for part in drafter.split("+") for name in names(registry.find("drafters", part))}
    return {name: value for name, value in extra.items() if name in own or name not in others}


class DemoRunner:
    """Runs the methods one after the other over the same models."""

    def __init__(self, llms: Mapping[str, LLM], params: SamplingParams, rounds: int, quiet: bool) -> None:
        """Open the runner and warm up all methods."""
        self._llms, self._params, self._rounds, self._quiet = llms, params, rounds, quiet
        for llm in llms.values():
            for plain in (True, False):
                llm.generate(["one two three one two three"], max_tokens=8, plain=plain)

    def stream(self, prompt: str, drafter: str) -> dict[str | None, Result]:
        """Stream the answers of plain decoding (None) and the first method; return none if quiet."""
        shown: dict[str | None, Result] = {}
        if self._quiet:
            return shown
        console = display.stdout()
        console.print("Prompt", style="bold")
        console.print(prompt, style=display.GREY)
        for title, method in (("Plain decoding", None), (TITLE.format(drafter=drafter), METHODS[0])):
            console.print(f"\n{title}", style="bold")
            printer = display.TextPrinter(color=True)
            try:
                shown[method] = self._answer(prompt, method, printer.show)
            finally:
                printer.end()
        return shown

    def compare(self, title: str, prompt: str, shown: Mapping[str | None, Result]) -> Comparison:
        """Run all rounds of all methods. Answers in `shown` count as the first round."""
        console = display.stderr()
        found: dict[str | None, list[Result]] = {method: [] for method in (None, *self._llms)}
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        hidden = self._quiet or not console.is_terminal
        doing = "the same again" if shown else title
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task("")
            for number in range(self._rounds):
                progress.update(task, description=f"timing {doing}: round {number + 1} of {self._rounds}")
                for method, results in found.items():
                    is_shown = number == 0 and method in shown
                    results.append(shown[method] if is_shown else self._answer(prompt, method))
        return Comparison(title, found.pop(None), {str(method): results for method, results in found.items()})

    def _answer(self, prompt: str, method: str | None, show: Callable[[Piece], None] | None = None) -> Result:
        llm = self._llms[method or METHODS[0]]
        stream = llm.stream([{"role": "user", "content": prompt}], self._params, plain=method is None)
        if not display.write_answer(stream, show or (lambda piece: None)):
            raise KeyboardInterrupt
        return stream.finish()


def _report(found: Sequence[Comparison], drafter: str) -> None:
    """Print whether the texts are equal, the table, and its caption."""
    console = display.stdout()
    console.print()
    for comparison in found:
        count, place = len(comparison.plain[0].tokens), comparison.differs_at
        if place is None:
            console.print(f"Same text by all, {comparison.title}: all {count} tokens are equal.", style="bold green")
        else:
            console.print(f"DIFFERENT TEXT, {comparison.title}: from token {place + 1} on.", style="bold red")
    console.print(_table(found, drafter))
    rounds = len(found[0].plain)
    runs = "one run" if rounds == 1 else f"medians of {rounds} alternating runs"
    if any(comparison.is_disturbed for comparison in found):
        console.print(DISTURBED, style="yellow")
    green = GREEN if console.color_system else ""
    console.print(CAPTION.format(runs=runs, story=STORY) + green, style=display.GREY)


def _table(found: Sequence[Comparison], drafter: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
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
    fast = {f"{method}, {drafter}": results for method, results in comparison.fast.items()}
    for method, results in ({"plain decoding": comparison.plain} | fast).items():
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
