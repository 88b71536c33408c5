"""Flags of `SamplingParams`, shared by the commands that generate text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.flags import flag
from outpace.core.errors import UserError
from outpace.models.files.reading import read_text

TEXT = "Text"
PENALTIES = "Penalties and bans"
STRUCTURE = "Structured output"

Temperature = Annotated[float, flag("Sampling temperature; 0 is greedy.", TEXT)]
Seed = Annotated[int, flag("Seed of the sampling: the same seed gives the same text.", TEXT)]
MaxTokens = Annotated[int, flag("Maximum number of tokens of an answer.", TEXT)]


@dataclass(frozen=True)
class StructureFlags:
    """The structure of an answer."""

    json_schema: Annotated[str | None, flag("Answer with JSON that follows the schema in this file.", STRUCTURE)] = None
    regex: Annotated[str | None, flag("Answer with text that this regex matches as a whole.", STRUCTURE)] = None
    grammar: Annotated[str | None, flag("Answer with text of the Lark grammar in this file.", STRUCTURE)] = None

    def structured_outputs(self) -> dict[str, str] | None:
        """Return this field of SamplingParams; raise UserError for several flags or an unreadable file."""
        files = (("json", "--json-schema", self.json_schema), ("grammar", "--grammar", self.grammar))
        found = {name: _read(option, file) for name, option, file in files if file is not None}
        found |= {} if self.regex is None else {"regex": self.regex}
        if len(found) > 1:
            raise UserError("--json-schema, --regex and --grammar exclude each other, give one of them")
        return found or None


def _read(option: str, file: str) -> str:
    try:
        return read_text(Path(file))
    except UserError as error:
        raise UserError(f"{option} names a file: {error}") from error


@dataclass(frozen=True)
class SamplingFlags:
    """How an answer is sampled, and where it ends."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_p: Annotated[float, flag("Sample from the likeliest tokens up to this probability mass.", TEXT)] = 1.0
    top_k: Annotated[int, flag("Sample from the k likeliest tokens; 0: all.", TEXT)] = 0
    min_p: Annotated[
        float, flag("Sample from tokens with at least this share of the likeliest token's probability.", TEXT)
    ] = 0.0
    seed: Seed = 0
    stop: Annotated[list[str] | None, flag("A string that ends the text before it appears; may be repeated.", TEXT)] = (
        None
    )
    ignore_eos: Annotated[bool, flag("Do not stop at the model's stop tokens.", TEXT, "--ignore-eos")] = False
    repetition_penalty: Annotated[
        float, flag("Above 1: tokens of the prompt and the answer become less likely.", PENALTIES)
    ] = 1.0
    presence_penalty: Annotated[
        float, flag("Subtracted from the logits of tokens that the answer contains.", PENALTIES)
    ] = 0.0
    frequency_penalty: Annotated[
        float, flag("Subtracted from a token's logit for each time that the answer contains it.", PENALTIES)
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, flag("TOKEN=BIAS: added to the logit of a token id, -100 to 100; may be repeated.", PENALTIES)
    ] = None
    bad_words: Annotated[
        list[str] | None,
        flag("A string that the answer never contains, not even inside a longer word; may be repeated.", PENALTIES),
    ] = None
    min_tokens: Annotated[int, flag("Minimum number of tokens of an answer.", PENALTIES)] = 0
    structured_outputs: StructureFlags = field(default_factory=StructureFlags)

    def options(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams."""
        given = asdict(self)
        given["structured_outputs"] = self.structured_outputs.structured_outputs()
        for name in ("stop", "bad_words"):
            given[name] = tuple(given[name] or ())
        return given | {"logit_bias": _bias(self.logit_bias or ())}

    def check(self) -> None:
        """Raise UserError for a value out of range, before a model is loaded."""
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
