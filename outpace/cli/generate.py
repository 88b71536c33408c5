"""`outpace generate`: one answer to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import display, process
from outpace.cli.options import Json, ModelFlags, System, flags
from outpace.cli.sampling_options import TEXT, SamplingFlags
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.api.llm import Prompt, Result, Stream


@dataclass(frozen=True)
class Asked:
    """How many answers, and what beside their text."""

    n: Annotated[int, typer.Option(help="Answers to write, each sampled independently.", rich_help_panel=TEXT)] = 1
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt before the answer.", rich_help_panel=TEXT)] = (
        False
    )
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities of this many best tokens at each position.", rich_help_panel=TEXT
        ),
    ] = None
    logprobs_mode: Annotated[
        str,
        typer.Option(
            help="Log-probabilities before (raw) or after (processed) penalties, temperature and filters.",
            rich_help_panel=TEXT,
        ),
    ] = "raw"
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a guess of the answer: where it is right, the answer is written faster.",
            rich_help_panel=TEXT,
        ),
    ] = None

    def options(self, as_json: bool) -> dict[str, Any]:
        """The options of `SamplingParams` by name."""
        if self.logprobs is not None and not as_json:
            raise UserError("--logprobs needs --json, add it")
        told = {"echo": self.echo, "logprobs": self.logprobs, "logprobs_mode": self.logprobs_mode}
        return {"n": self.n, "prediction": _guess(self.prediction), **told}


@flags
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")],
    loading: ModelFlags,
    writing: SamplingFlags,
    wanted: Asked,
    system: System = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, without the chat template.", rich_help_panel=TEXT),
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt.

    The options of methods, drafters and rules (see outpace methods NAME) are flags too, as in --method speculative
    --draft-length 6.
    """
    from outpace.api.params import SamplingParams

    params = SamplingParams(**writing.options(), **wanted.options(as_json))
    asked = _asked(prompt, system, raw)
    with process.at_safe_points(), loading.open(ctx.obj, quiet=as_json) as llm:
        streams = [llm.stream(asked, replace(params, n=1), choice=choice) for choice in range(params.n)]
        precision = llm.target.precision
        whole = all(_write(stream, as_json, streams[-1], precision) for stream in streams)
    if not whole:
        raise typer.Exit(process.INTERRUPTED)


def _write(stream: Stream, as_json: bool, last: Stream, precision: str) -> bool:
    """Shows one answer as it comes, with its grey line; or one line of JSON. False if Ctrl-C ended it."""
    page = display.Page()
    whole = display.write_answer(stream, page.show if not as_json else lambda piece: None)
    page.end()
    result = stream.finish()
    if as_json:
        display.print_json(_record(result, precision, several=last.choice > 0))
    else:
        display.say(display.summary(result, f"first token {result.time_to_first_token:.2f} s"))
        if stream is not last:
            typer.echo()
    return whole


def _asked(prompt: str, system: str | None, raw: bool) -> Prompt:
    if prompt == "-":
        prompt = _from_stdin()
    if raw:
        if system is not None:
            raise UserError("--system needs the chat template, leave out --raw or --system")
        return prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def _guess(file: Path | None) -> str:
    """The text of a file; UserError where it has none."""
    if file is None:
        return ""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prediction is {file}, which cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prediction is {file}, which is not UTF-8 text ({error.reason})") from error
    if not text:
        raise UserError(f"--prediction is {file}, which is empty")
    return text


def _from_stdin() -> str:
    """All of standard input; the newline that ends its last line is the file's, not the prompt's."""
    with process.reading() as stream:
        return stream.read().removesuffix("\n")


def _record(result: Result, precision: str, several: bool) -> dict[str, object]:
    record: dict[str, object] = {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "precision": precision,
        "seed": result.seed,
        **display.figures(result),
    }
    if result.figures.predicted:
        record["accepted_prediction_tokens"] = result.figures.predicted_accepted
        record["rejected_prediction_tokens"] = result.figures.predicted_rejected
    if several:
        record["choice"] = result.choice
    if not result.lossless:
        record["lossless"] = False
        record["relaxed_tokens"] = result.figures.relaxed
    for name, records in (("logprobs", result.logprobs), ("prompt_logprobs", result.prompt_logprobs)):
        if records:
            record[name] = [
                {"token": token, "logprob": logprob, "top": [list(other) for other in top]}
                for token, logprob, top in records
            ]
    return record
