"""The flags of `SamplingParams`, shared by the commands that write text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.core.errors import UserError
from outpace.models.files.reading import read_text

TEXT = "Text"
PENALTIES = "Penalties and bans"
STRUCTURE = "Structured output"

Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=TEXT)]
Seed = Annotated[int, typer.Option(help="Seed of the sampling: the same seed, the same text.", rich_help_panel=TEXT)]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of an answer.", rich_help_panel=TEXT)]


def _flag(text: str, panel: str = PENALTIES, **options: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **options)


def _text_in(option: str, file: str) -> str:
    try:
        return read_text(Path(file))
    except UserError as error:
        raise UserError(f"{option} names a file: {error}") from error


@dataclass(frozen=True)
class Structured:
    """What an answer has to be."""

    json_schema: Annotated[str | None, _flag("Answer with JSON that follows the schema in this file.", STRUCTURE)] = (
        None
    )
    regex: Annotated[str | None, _flag("Answer with text that this regex matches as a whole.", STRUCTURE)] = None
    grammar: Annotated[str | None, _flag("Answer with text of the Lark grammar in this file.", STRUCTURE)] = None

    def asked(self) -> dict[str, str] | None:
        """The field `structured_outputs` of `SamplingParams`; UserError for more than one, or a file that is none."""
        files = (("json", "--json-schema", self.json_schema), ("grammar", "--grammar", self.grammar))
        asked = {name: _text_in(option, file) for name, option, file in files if file is not None}
        asked |= {} if self.regex is None else {"regex": self.regex}
        if len(asked) > 1:
            raise UserError("--json-schema, --regex and --grammar exclude each other, give one of them")
        return asked or None


@dataclass(frozen=True)
class SamplingFlags:
    """How an answer is sampled, and where it ends."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_p: Annotated[float, _flag("Sample from the likeliest tokens up to this probability mass.", TEXT)] = 1.0
    top_k: Annotated[int, _flag("Sample from the k likeliest tokens; 0: all.", TEXT)] = 0
    min_p: Annotated[
        float, _flag("Sample from tokens with at least this share of the likeliest token's probability.", TEXT)
    ] = 0.0
    seed: Seed = 0
    stop: Annotated[
        list[str] | None, _flag("A string that ends the text before it appears; may be repeated.", TEXT)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the model's stop tokens.", rich_help_panel=TEXT)
    ] = False
    repetition_penalty: Annotated[float, _flag("Above 1: tokens of the prompt and the answer become less likely.")] = (
        1.0
    )
    presence_penalty: Annotated[float, _flag("Subtracted from the logits of tokens that the answer contains.")] = 0.0
    frequency_penalty: Annotated[
        float, _flag("Subtracted from a token's logit for each time that the answer contains it.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, _flag("TOKEN=BIAS: added to the logit of a token id, -100 to 100; may be repeated.")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        _flag("A string that the answer never contains, not even inside a longer word; may be repeated."),
    ] = None
    min_tokens: Annotated[int, _flag("The fewest tokens of an answer.")] = 0
    structured_outputs: Structured = field(default_factory=Structured)

    def options(self) -> dict[str, Any]:
        """The options of `SamplingParams` by name."""
        given = asdict(self)
        given["structured_outputs"] = self.structured_outputs.asked()
        for name in ("stop", "bad_words"):
            given[name] = tuple(given[name] or ())
        return given | {"logit_bias": _bias(self.logit_bias or ())}

    def check(self) -> None:
        """UserError for a value out of range, before a model is loaded."""
        from outpace.api.params import SamplingParams

        SamplingParams(**self.options())


def _bias(given: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in given:
        token, _, value = entry.partition("=")
        try:
            number, amount = int(token), float(value)
        except ValueError:
            raise UserError(f"--logit-bias is {entry!r}, it must be a token id and a number, as in 198=-5") from None
        if number in bias:
            raise UserError(f"--logit-bias names token {number} twice")
        bias[number] = amount
    return bias
