"""`outpace generate`: answer one prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from outpace.cli import display, process
from outpace.cli.flags import flag, flags
from outpace.cli.options import JSON, SYSTEM, TEXT, ModelFlags, SamplingFlags, open_any
from outpace.core.errors import UserError
from outpace.models.files.reading import read_named_text

if TYPE_CHECKING:
    from outpace.api.llm import Prompt, Result, Stream
    from outpace.api.params import SamplingParams
    from outpace.cluster.remote_target import RemoteStream

SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # parameters that --json shows


@dataclass(frozen=True)
class AnswerFlags:
    """The number of answers, and what is written besides their text."""

    panel: ClassVar[str] = TEXT
    n: int = flag(1, "Answers to write, each sampled independently.")
    echo: bool = flag(False, "Write the prompt before the answer.")
    logprobs: int | None = flag(None, "With --json: log-probabilities of this many best tokens at each position.")
    logprobs_mode: str = flag("raw", "Log-probabilities before (raw) or after (processed) penalties and filters.")
    prediction: Path | None = flag(
        None, "File with a guess of the answer: where it is right, the answer is written faster.", metavar="FILE"
    )

    def options(self, as_json: bool) -> dict[str, Any]:
        """Return the arguments of SamplingParams."""
        if self.logprobs is not None and not as_json:
            raise UserError("--logprobs needs --json, add it")
        prediction = "" if self.prediction is None else read_named_text("--prediction", self.prediction)
        if self.prediction is not None and not prediction:
            raise UserError(f"--prediction is {self.prediction}, which is empty")
        return asdict(self) | {"prediction": prediction}


@flags
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input.")],
    model: ModelFlags,
    sampling: SamplingFlags,
    answer: AnswerFlags,
    system: str | None = SYSTEM,
    prefill: str | None = flag(None, "Beginning of the answer, which the model continues.", metavar="TEXT", panel=TEXT),
    raw: bool = flag(False, "Continue the text as it is, without the chat template.", panel=TEXT),
    explain: bool = flag(False, "After the answer, show what the planner chose in each round, and why.", panel=TEXT),
    as_json: bool = JSON,
) -> None:
    """Answer one prompt.

    The options of methods, drafters and rules (see outpace methods NAME) are flags too, as in --method speculative
    --draft-length 6.
    """
    from outpace.api.params import SamplingParams

    options = answer.options(as_json)
    sampling.check(**options)
    text = _text(prompt)
    conversation = _conversation(text, system, prefill, raw)
    with process.at_safe_points(), open_any(model, ctx.obj, quiet=as_json, is_chat=not raw) as llm:
        if getattr(llm, "reads_source", False):  # not of a target on another machine
            conversation = _conversation(text, system, prefill, raw=True)
        params = SamplingParams(**sampling.options(sampling.recommended(llm, quiet=as_json)), **options)
        streams = [llm.stream(conversation, replace(params, n=1), choice=choice) for choice in range(params.n)]
        precision = llm.target.precision
        is_complete = all(_write(stream, as_json, explain, streams[-1], params, precision) for stream in streams)
        if explain and not as_json and llm.draft and (kept := llm.draft.model.reduced_output):
            display.say(f"the draft scored {kept} (--draft-vocab)")
    if not is_complete:
        raise typer.Exit(process.INTERRUPTED)


def _write(
    stream: Stream | RemoteStream,
    as_json: bool,
    explain: bool,
    last: Stream | RemoteStream,
    params: SamplingParams,
    precision: str,
) -> bool:
    """Write one answer with its summary, or as one line of JSON. Return False if Ctrl-C ended it."""
    printer = display.TextPrinter()
    is_complete = display.write_answer(stream, printer.show if not as_json else lambda piece: None)
    printer.end()
    result = stream.finish()
    if as_json:
        rounds = {"rounds": [one._asdict() | {"plan": one.plan and one.plan.to_dict()} for one in result.rounds]}
        display.print_json(_record(result, params, precision, several=last.choice > 0) | (rounds if explain else {}))
    else:
        display.say(display.summary(result, f"first token {result.time_to_first_token:.2f} s"))
        if explain:
            display.show_rounds(result.rounds)
        if stream is not last:
            typer.echo()
    return is_complete


def _text(prompt: str) -> str:
    if prompt != "-":
        return prompt
    with process.standard_input() as stream:
        return stream.read().removesuffix("\n")  # the end of the last line is not part of the prompt


def _conversation(prompt: str, system: str | None, prefill: str | None, raw: bool) -> Prompt:
    if raw:
        for name, value in (("--system", system), ("--prefill", prefill)):
            if value is not None:
                raise UserError(f"{name} needs the chat template, leave out {name}, or --raw if the model has one")
        return prompt
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill, "prefix": True})
    return messages


def _record(result: Result, params: SamplingParams, precision: str, several: bool) -> dict[str, object]:
    record: dict[str, object] = {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "precision": precision,
        "seed": result.seed,
        "sampling_params": {name: getattr(params, name) for name in SHOWN},
        **display.figures(result),
    }
    if result.reasoning:
        record["reasoning"] = result.reasoning
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
