"""Flags of `SamplingParams`, shared by the commands that generate text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from outpace.cli.flags import flag
from outpace.core.errors import UserError
from outpace.models.files.reading import read_text

TEXT, PENALTIES = "Text", "Penalties and bans"
SEED = "Seed of the sampling: the same seed gives the same text."
MAX_TOKENS = "Maximum number of tokens of an answer."


@dataclass(frozen=True)
class BasicSamplingFlags:
    """How short answers are sampled that are timed."""

    panel: ClassVar[str] = TEXT
    max_tokens: int = flag(128, MAX_TOKENS)
    temperature: float = flag(0.0, "Sampling temperature; 0 is greedy.")
    seed: int = flag(0, SEED)


@dataclass(frozen=True)
class StructureFlags:
    """The structure of an answer."""

    panel: ClassVar[str] = "Structured output"
    json_schema: str | None = flag(None, "Answer with JSON that follows the schema in this file.")
    regex: str | None = flag(None, "Answer with text that this regex matches as a whole.")
    grammar: str | None = flag(None, "Answer with text of the Lark grammar in this file.")

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
class SamplingFlags(BasicSamplingFlags):
    """How an answer is sampled, and where it ends."""

    max_tokens: int = flag(256, MAX_TOKENS)
    top_p: float = flag(1.0, "Sample from the likeliest tokens up to this probability mass.")
    top_k: int = flag(0, "Sample from the k likeliest tokens; 0: all.")
    min_p: float = flag(0.0, "Sample from tokens with at least this share of the likeliest token's probability.")
    stop: list[str] | None = flag(None, "A string that ends the text before it appears; may be repeated.")
    ignore_eos: bool = flag(False, "Do not stop at the model's stop tokens.")
    repetition_penalty: float = flag(
        1.0, "Above 1: tokens of the prompt and the answer become less likely.", panel=PENALTIES
    )
    presence_penalty: float = flag(
        0.0, "Subtracted from the logits of tokens that the answer contains.", panel=PENALTIES
    )
    frequency_penalty: float = flag(
        0.0, "Subtracted from a token's logit for each time that the answer contains it.", panel=PENALTIES
    )
    logit_bias: list[str] | None = flag(
        None, "TOKEN=BIAS: added to the logit of a token id, -100 to 100; may be repeated.", panel=PENALTIES
    )
    bad_words: list[str] | None = flag(
        None,
        "A string that the answer never contains, not even inside a longer word; may be repeated.",
        panel=PENALTIES,
    )
    min_tokens: int = flag(0, "Minimum number of tokens of an answer.", panel=PENALTIES)
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
