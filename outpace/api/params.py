"""What may be asked of one answer: one frozen record, the same for library, command line and server."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outpace.core.errors import UserError, check_whole
from outpace.core.sampling import Sampling
from outpace.core.types import Adjustments, LogprobsOptions

LOGPROBS_MODES = ("raw", "processed")


@dataclass(frozen=True)
class Asking:
    """Options of one answer. The text depends on them, on the target and on the prompt, and on nothing else.

    Temperature 0 is greedy. `stop` strings end the text and are left out unless `include_stop`. `bad_words` are not
    written, as they are or after a space. `logprobs`: how many of the best tokens to report beside each written one
    (0: the written one alone); `logprobs_mode` "raw" as the model gave them, "processed" after penalties, temperature
    and filters. `echo` puts the prompt before the answer, with its log-probabilities if those are asked for.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: Sequence[str] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    echo: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("seed", self.seed, 0, 2**63 - 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, it must be at most max_tokens {self.max_tokens}")
        for name, strings in (("stop", self.stop), ("bad_words", self.bad_words)):
            _check_strings(name, strings)
        self._check_logprobs()
        _ = self.sampling
        self._adjustments(())

    @property
    def sampling(self) -> Sampling:
        """Temperature and filters."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def logprobs_options(self) -> LogprobsOptions | None:
        """What is to be reported, None for nothing."""
        if self.logprobs is None:
            return None
        return LogprobsOptions(self.logprobs, self.logprobs_mode == "processed", self.echo)

    def adjustments(self, tokenizer: Any) -> Adjustments | None:
        """Penalties, bias and forbidden words in tokens; None where nothing is asked."""
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            words += {tuple(tokenizer.continuation(text)) for text in (word, f" {word.lstrip()}")} - {()}
        made = self._adjustments(tuple(sorted(set(words))))
        return None if made == Adjustments() else made

    def _adjustments(self, words: tuple[tuple[int, ...], ...]) -> Adjustments:
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias is {self.logit_bias!r}, it must map token ids to numbers")
        bias = tuple(sorted((_token(token), value) for token, value in self.logit_bias.items()))
        if len(dict(bias)) < len(bias):
            raise UserError("logit_bias names a token twice, as a number and as text")
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return Adjustments(*penalties, bias, words, self.min_tokens)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, 1024)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise UserError(f"logprobs_mode is {self.logprobs_mode!r}, it must be {' or '.join(LOGPROBS_MODES)}")
        if self.logprobs is None and self.logprobs_mode != "raw":
            raise UserError("logprobs_mode says nothing without logprobs, give both or neither")


def asking_of(options: Mapping[str, Any]) -> Asking:
    """From options by name; UserError for a name that there is not."""
    known = [option.name for option in fields(Asking)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown option {name!r} of an answer, allowed are {', '.join(known)}{hint}")
    return Asking(**options)


def check_choices(count: int, asking: Asking) -> None:
    """UserError unless `count` answers to one prompt make sense."""
    check_whole("n", count, 1, 1024)
    if count > 1 and asking.sampling.is_greedy:
        raise UserError(f"n is {count}, greedy answers are all alike: ask for a temperature above 0 or for one answer")


def _check_strings(name: str, strings: Any) -> None:
    if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) for text in strings):
        raise UserError(f"{name} is {strings!r}, it must be a list of strings")
    if not all(strings):
        raise UserError(f"{name} has an empty string, each needs at least one character")


def _token(token: Any) -> int:
    """A token id; JSON writes them as strings."""
    try:
        number = int(token)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 0 or str(number) != str(token):  # 1.5 is no token, nor is True
        raise UserError(f"a token of logit_bias is {token!r}, it must be a whole number, at least 0")
    return number
