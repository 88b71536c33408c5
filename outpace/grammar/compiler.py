"""Compiles structures to grammars in bounded time and memory; each is compiled once for all requests."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outpace.core.errors import UserError, install_command
from outpace.grammar import schema
from outpace.grammar.matcher import DigitLimit, GrammarConstraint, unpacked
from outpace.grammar.regexes import in_ascii, with_plain_classes
from outpace.grammar.structure import FREE_WHITESPACE, NAMES, Structure
from outpace.models.text.tokenizer import Tokenizer


class Vocabulary:
    """A model's vocabulary with the fields and the call that `llguidance.LLTokenizer` needs of a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Collect the bytes of every token.

        Ids without bytes become unnamed special tokens. If no token ends an answer, one more id, which no model has,
        does.
        """
        known, special = tokenizer.bytes_by_id(), tokenizer.special_ids
        self._tokenizer = tokenizer
        self.tokens = [known.get(index) or f"<|no bytes {index}|>".encode() for index in range(tokenizer.size)]
        self.special_token_ids = sorted(special | {i for i in range(tokenizer.size) if not known.get(i)})
        self.stop_ids = sorted(tokenizer.stop_ids) or [tokenizer.size]
        if not tokenizer.stop_ids:
            self.tokens.append(b"<|end|>")
            self.special_token_ids.append(tokenizer.size)
        self.eos_token_id = self.stop_ids[0]
        self._by_bytes = {written: index for index, written in known.items() if index not in special}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text as the model would most likely do in the middle of another text."""
        text = text.decode() if isinstance(text, bytes) else text
        ids = self._tokenizer.continuation(text)
        if ids and self._spelled(ids) == b" " + text.encode():  # the tokenizer prepends a space
            bare = self.tokens[ids[0]][1:]
            ids = [*([self._by_bytes[bare]] if bare in self._by_bytes else []), *ids[1:]]
        return ids if self._spelled(ids) == text.encode() else []

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[index] for index in ids)


SECONDS = 5.0  # of processor time for one grammar
BUSY = 6  # times as much elapsed time, for a busy machine
KEPT = 64  # grammars in the cache
_COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ", "key_separator": ": "}
_FIXED = {"coerce_one_of": True, "lenient": False}  # branches of oneOf exclude one another, see schema.py
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # at most 2 kB each
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
_LOOK = 0.01  # polling interval, as a fraction of the limit
_LONGEST = 300  # characters of a reason in an error
_ECHO = re.compile(r"\s*\d+ \| ")  # a line of the grammar in llguidance's message
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_INNER = re.compile("<non-verbose/>|JSON|json_schema|grammars")


class Grammars:
    """The compiled grammars of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._digits: DigitLimit | None = None
        self._known: OrderedDict[Structure, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.compiled = 0  # number of compilations
        self.seconds = 0.0  # their total time

    def constraint(self, structure: Structure, start: int) -> GrammarConstraint:
        """Return the constraint of one answer, which follows a prompt of `start` tokens; compile it if it is new.

        Raises UserError if the structure cannot be enforced or takes too much time or memory.
        """
        matcher = self.compile(structure)
        digits = self._digits if structure.kind == "json" or "%json" in structure.text else None
        ends, size = frozenset(self._vocabulary.eos_tokens), self._vocabulary.vocab_size
        return GrammarConstraint(matcher, start, self._tokenizer, ends, size, digits)

    def compile(self, structure: Structure) -> Any:
        """Return the grammar at its beginning, a `llguidance.LLMatcher` that callers copy."""
        with self._lock:
            if structure in self._known:
                self._known.move_to_end(structure)
                return self._known[structure]
        asked = structure
        if structure.kind == "json":
            limits = schema.enforceable(json.loads(structure.text))
            asked = replace(structure, text=json.dumps(limits, ensure_ascii=False))
        began = time.perf_counter()
        try:
            matcher = _within(SECONDS, asked, self._matcher)
        except UserError:
            if structure.fallback is None:
                raise
            matcher = self.compile(structure.fallback)
        with self._lock:
            self.compiled, self.seconds = self.compiled + 1, self.seconds + time.perf_counter() - began
            self._known[structure] = matcher
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return matcher

    def _matcher(self, structure: Structure) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise UserError(f"structured output needs the package llguidance: {install_command('grammar')}") from error
        with self._lock:
            if self._vocabulary is None:  # made once, which takes a tenth of a second
                tokens: Any = Vocabulary(self._tokenizer)
                self._digits = DigitLimit(tokens.tokens, frozenset((*tokens.special_token_ids, *tokens.stop_ids)))
                self._vocabulary = llguidance.LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=tokens.stop_ids)
        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            text = _written(llguidance.LLMatcher, structure)
        except ValueError as error:
            raise _refused(structure, str(error)) from error
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        allowed: set[int] = set()
        if not matcher.is_error():  # the first mask costs most and is included in the time limit
            allowed = set(np.flatnonzero(unpacked(matcher.compute_bitmask())).tolist())
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        if allowed <= set(self._vocabulary.eos_tokens):
            raise UserError(f"the {NAMES[structure.kind]} allows no text but the empty one")
        return matcher


def _written(library: Any, structure: Structure) -> str:
    if structure.kind == "json":
        options = (_COMPACT if structure.compact else FREE_WHITESPACE) | _FIXED
        text: str = library.grammar_from_json_schema(structure.text, overrides=options)
    elif structure.kind == "regex":
        text = library.grammar_from_regex(in_ascii(with_plain_classes(structure.text)))
    else:
        text = library.grammar_from_lark(in_ascii(structure.text))
    if not structure.around:
        return text
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    first = {"lark_grammar": in_ascii(structure.around)}
    return json.dumps({"grammars": [first, {**grammars[0], "name": "form"}, *grammars[1:]]})


def _within(seconds: float, structure: Structure, work: Any) -> Any:
    """Return work(structure), computed in a thread that is abandoned after `seconds` of processor time.

    It is also abandoned after `BUSY` times as much elapsed time; its own limits then end it.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    clocks: list[int] = []  # the id of the thread's processor-time clock, which others can read; none on Windows

    def body() -> None:
        try:
            if hasattr(time, "pthread_getcpuclockid"):
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            results.append(work(structure))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="outpace-grammar", daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        waited = time.monotonic() - began
        if waited >= BUSY * seconds or _used(clocks, waited) >= seconds:
            break
        thread.join(_LOOK * seconds)
    if errors:
        raise errors[0]
    if not results:
        raise UserError(f"the {NAMES[structure.kind]} takes more than {seconds:g} seconds to compile, make it simpler")
    return results[0]


def _used(clocks: Sequence[int], waited: float) -> float:
    """Return the seconds of processor time of a thread, or the elapsed ones if the system does not measure it."""
    try:
        return time.clock_gettime(clocks[0]) if clocks else waited
    except OSError:  # the thread has just ended
        return 0.0


def _refused(structure: Structure, said: str) -> UserError:
    """Return the error for what llguidance said, without the lines of the grammar that it quotes."""
    lines = itertools.takewhile(lambda line: not _ECHO.match(line), said.partition("<state>")[0].splitlines())
    words = " ".join(" ".join(lines).split())
    is_own = structure.kind == "lark" and not _INNER.search(words)  # its places are those of the user's text
    why = _PLACE.sub(r"line \1, column \2: " if is_own else "", words)
    return UserError(f"the {NAMES[structure.kind]} cannot be enforced: {why[:_LONGEST]}")
