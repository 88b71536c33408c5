"""Sampling parameters: the options of one answer, the same for library, command line and server."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from outpace.core.arrays import to_python
from outpace.core.errors import UserError, check_whole, unknown
from outpace.core.options import CheckedOptions, switch, whole
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments, LogprobsOptions, Request, Rule

if TYPE_CHECKING:
    from outpace.core.constraints import BannedText, Constraint
    from outpace.grammar.structure import Structure

LOGPROBS_MODES = ("raw", "processed")


@dataclass(frozen=True)
class SamplingParams(CheckedOptions):
    """Options of one answer. The text depends on these, on the target and on the prompt, and on nothing else.

    Names are those of vLLM; defaults are our own, notably `temperature` 0, whatever the model's files recommend. A
    value out of range raises UserError when the object is created.

    Length and end:
        max_tokens: maximum number of tokens to generate, at least 1.
        min_tokens: neither a stop token nor a stop string ends the text before this many tokens, 0 to `max_tokens`. A
            stop string completed within these tokens stays in the text; one completed by a later token ends it.
        stop: a string or a list of strings; the text ends where the first of them appears, and it is cut off.
        include_stop_str_in_output: keep the stop string, or the text of a stop token, in the text.
        stop_token_ids: tokens that end the text, in addition to the model's own.
        ignore_eos: the model's own stop tokens do not end the text.

    Sampling:
        temperature: 0 is greedy, up to 100.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all of them.
        top_p: keep the likeliest tokens whose probabilities add up to this, above 0 up to 1.
        min_p: keep tokens at least this likely relative to the likeliest, 0 to 1.
        seed: the same seed gives the same text, 0 to 2**63 - 1.
        n: answers per prompt, 1 to 1024; more than one needs a temperature above 0.

    Penalties and bans, applied to each token given the text before it:
        repetition_penalty: 0.01 to 100; above 1 makes tokens of prompt and answer less likely.
        presence_penalty: -2 to 2, subtracted from the logit of tokens that the answer contains.
        frequency_penalty: -2 to 2, subtracted once per occurrence in the answer.
        logit_bias: map of token id to a value added to its logit, -100 to 100.
        allowed_token_ids: only these tokens are generated, stop tokens included; None for all. Cannot be combined with
            bad_words.
        bad_words: strings that the answer never contains, however they are tokenized, and even inside longer words:
            "art" bans "party". Upper and lower case differ. The prompt may contain them.

    Predicted output:
        prediction: the expected answer, a text or token ids. The drafter `prediction` copies from it while it matches.
            It changes only the speed.

    Structure (see `outpace.grammar`):
        response_format: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}, as in the
            OpenAI API: the text is JSON of this form.
        structured_outputs: one of {"json": schema}, {"json_object": True}, {"regex": ...}, {"choice": [...]} and
            {"grammar": ...} (Lark's syntax), as in vLLM. An additional {"disable_any_whitespace": True} fixes the
            spacing of JSON.

    Reporting:
        logprobs: number of most likely tokens, with log-probabilities, reported for each generated token, 0 to 1024;
            None for no report.
        logprobs_mode: "raw" for the model's own log-probabilities, "processed" for those after penalties, temperature
            and filters.
        skip_special_tokens: leave special tokens out of the text; if False they are shown, except those that end the
            answer, and a thought stays in the text with its marks.
        echo: the text begins with the prompt, and `logprobs` cover the prompt's tokens too.
    """

    max_tokens: int = whole(256, 1)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = whole(0, 0, 2**63 - 1)
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = switch(False)
    ignore_eos: bool = switch(False)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    min_tokens: int = whole(0, 0)
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = whole(None, 0, 1024)
    logprobs_mode: str = "raw"
    echo: bool = switch(False)
    n: int = whole(1, 1, 1024)
    stop_token_ids: Sequence[int] = ()
    prediction: str | Sequence[int] = ()
    skip_special_tokens: bool = switch(True)
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | Structure | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value, read = getattr(self, option.name), _READ.get(option.name)
            object.__setattr__(self, option.name, read(option.name, value) if read else to_python(value))
        super().__post_init__()
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, it must be at most max_tokens {self.max_tokens}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise UserError(f"logprobs_mode is {self.logprobs_mode!r}, it must be {' or '.join(LOGPROBS_MODES)}")
        if self.logprobs is None and self.logprobs_mode != "raw":
            raise UserError("logprobs_mode has no effect without logprobs, give both or neither")
        if self.n > 1 and self.sampling.is_greedy:
            alike = "greedy answers are all alike: ask for a temperature above 0 or for one answer"
            raise UserError(f"n is {self.n}, {alike}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError("allowed_token_ids has no token, at least one is needed, or None for all")
        if self.allowed_token_ids and self.bad_words:
            raise UserError("allowed_token_ids and bad_words may leave nothing to write, give one of them")
        _ = self.sampling, self.structure, self._adjustments(None)  # which check their values

    @property
    def structure(self) -> Structure | None:
        """The grammar that the text must follow, None for free text."""
        if self.response_format is None and self.structured_outputs is None:
            return None
        from outpace.grammar.structure import read_structure

        return read_structure(self.response_format, self.structured_outputs)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def logprobs_options(self) -> LogprobsOptions | None:
        """The log-probabilities to report, None for none."""
        if self.logprobs is None:
            return None
        return LogprobsOptions(self.logprobs, self.logprobs_mode == "processed", self.echo)

    def predicted(self, tokenizer: Any) -> tuple[int, ...]:
        given = self.prediction
        return tuple(tokenizer.continuation(given) if isinstance(given, str) else given)

    def adjustments(self, tokenizer: Any) -> Adjustments | None:
        """Return penalties, biases and bans in terms of tokens; None if there are none."""
        made = self._adjustments(tokenizer.texts.ban(self.bad_words) if self.bad_words else None)
        return None if made == Adjustments() else made

    def request(
        self, prompt: Sequence[int], rule: Rule, tokenizer: Any, choice: int = 0, constraint: Constraint | None = None
    ) -> Request:
        """Return the request for an answer to these tokens."""
        own_ends = frozenset() if self.ignore_eos else tokenizer.stop_ids
        return Request(
            prompt=tuple(prompt),
            rule=rule,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            seed=self.seed,
            choice=choice,
            stop_ids=own_ends.union(self.stop_token_ids),
            adjustments=self.adjustments(tokenizer),
            logprobs=self.logprobs_options,
            constraint=constraint,
            prediction=self.predicted(tokenizer),
        )

    def _adjustments(self, banned: BannedText | None) -> Adjustments:
        return Adjustments(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            banned=banned,
            min_tokens=self.min_tokens,
            allowed=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        )


def read_params(given: Any, options: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that a caller gave as one object or as options by name; UserError for both or neither."""
    if given is not None and options:
        raise UserError(f"give SamplingParams or options by name, not both: {', '.join(options)}")
    if isinstance(given, SamplingParams):
        return given
    if given is not None:
        shown = reprlib.repr(given)
        raise UserError(f"sampling_params is {shown}, it must be SamplingParams; or give options by name")
    known = [option.name for option in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise unknown("sampling parameter", name, known)
    return SamplingParams(**options)


def read_params_each(given: Any, options: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts; one object may serve all of them."""
    if not isinstance(given, (list, tuple)):
        return [read_params(given, options)] * count
    if len(given) != count:
        raise UserError(f"there are {len(given)} sampling_params for {count} prompts, give one for all or one for each")
    return [read_params(params, options) for params in given]


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise UserError(f"{name} is {value!r}, it must be a list of strings")
    if not all(value):
        raise UserError(f"{name} has an empty string, each needs at least one character")
    if any("\ud800" <= sign <= "\udfff" for text in value for sign in text):
        raise UserError(f"{name} is {value!r}, it has half a character (a lone surrogate)")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    given = () if value is None else to_python(value)
    if not isinstance(given, (list, tuple, set, frozenset)):
        raise UserError(f"{name} is {value!r}, it must be a list of token ids")
    tokens = tuple(to_python(token) for token in given)
    for token in tokens:
        check_whole(f"a token of {name}", token, 0)
    return tokens


def _prediction(name: str, value: Any) -> str | tuple[int, ...]:
    """Read a text, or token ids in order: sets are refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, (set, frozenset)):
        raise UserError(f"{name} is {value!r}, it must be a string or a list of token ids")
    return _token_ids(name, value)


def _bias(name: str, value: Any) -> dict[int, float]:
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise UserError(f"{name} is {value!r}, it must map token ids to numbers")
    bias = {_token(name, token): to_python(amount) for token, amount in given.items()}
    if len(bias) < len(given):
        raise UserError(f"{name} names a token twice, as a number and as text")
    return bias


def _token(name: str, given: Any) -> int:
    """Read a token id; JSON has them as strings."""
    token = to_python(given)
    try:
        number = int(token)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 0 or str(number) != str(token):  # 1.5 is no token, nor is True
        raise UserError(f"a token of {name} is {token!r}, it must be a whole number, at least 0")
    return number


_READ: dict[str, Callable[[str, Any], Any]] = {
    "top_k": lambda name, value: 0 if to_python(value) == -1 else to_python(value),
    "stop": lambda name, value: _strings(name, [value] if isinstance(value, str) else value),
    "bad_words": _strings,
    "stop_token_ids": _token_ids,
    "allowed_token_ids": lambda name, value: None if value is None else _token_ids(name, value),
    "logit_bias": _bias,
    "prediction": _prediction,
}
