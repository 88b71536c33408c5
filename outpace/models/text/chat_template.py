"""Renders a model's Jinja chat template in jinja2's sandbox, with what transformers offers, and bounds its work.

A template is a program written by the model's author. The sandbox keeps it from accessing anything. The bounds end
loops, macros and texts that grow without end, with a sentence. As in transformers and vLLM, a template that was written
to be slow can still be slow: load models of authors whom you trust.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outpace.core.errors import UserError

MAX_STEPS = 5_000_000  # iterations, calls and filters of one rendering: about five seconds
MAX_LENGTH = 2**24  # characters of a text; 16 for each other item of a list
MAX_BITS = 2**14  # of a product or power
MAX_WIDTH = 2**20  # to which a text is padded
MAX_ERROR_CHARACTERS = 500  # characters of a template's own error message that are shown

# Filters, and methods of texts, whose result may be longer than their arguments together.
_GROWING = {
    *("batch", "center", "expandtabs", "indent", "join", "ljust", "pprint", "replace", "rjust", "round", "slice"),
    *("string", "tojson", "zfill"),
}
_WIDE = re.compile(r"%(\(.*?\))?[-+ #.\d]*(\*|\d{6})|\{[^{}]*:[^{}]*(\{|\d{6})")  # a width in a format
_COUNTED, _MEASURED = "counted items", "measured text"  # filters that `compile_bounded` inserts


class ChatTemplate:
    """One template. Thread-safe: one conversation is rendered at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lock = threading.Lock()
        self._environment = _BoundedEnvironment()

    def render(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> str:
        """Return the text of the conversation; UserError if the template is invalid, raises, or exceeds its bounds."""
        try:
            given = json.loads(json.dumps({"messages": [dict(message) for message in messages], **values}))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages and tools must be plain JSON values ({error})") from error
        with self._lock:
            try:
                return self._environment.render(self._compiled, given)
            except UserError as error:
                refusal = str(error)
            except Exception as error:  # anything that a template raises is bad input
                refusal = f"refuses these messages: {str(error) or type(error).__name__}"
        raise UserError(f"the model's chat template {refusal[:MAX_ERROR_CHARACTERS]}")

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return self._environment.compile_bounded(self.text)
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateSyntaxError) else f"{type(error).__name__}: "
            raise UserError(f"is not valid: {kind}{error}") from error


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts steps and written characters, and measures what may grow before it does."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions = [loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._write)
        self._steps, self._written = 0, 0
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]  # writes as many paragraphs as it is asked for
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: self._count_items, _MEASURED: self._measure}

    def compile_bounded(self, text: str) -> jinja2.Template:
        """Compile a template whose loops are counted, and whose joined values are measured."""
        tree = self.parse(text)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _COUNTED)
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [_filtered(one, _MEASURED) for one in joined.nodes]
        return self.from_string(tree)

    def render(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        self._steps = self._written = 0
        pieces, length = [], 0
        for piece in template.generate(values):
            length += len(piece)
            _check_length(length)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a call, and measure what a method of a text would make."""
        __self._count()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        if isinstance(owner := getattr(method, "__self__", None), str):
            _check_growth(method.__name__, owner, (*args, *kwargs.values()))
        elif isinstance(__obj, LoopContext):  # a recursive loop's items
            args = tuple(map(__self._count_items, args))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            _check_length(math.prod(one if isinstance(one, int) else _size(one) for one in (left, right)))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is counted, and measures what it would make."""
        first = int(hasattr(function, "jinja_pass_arg"))  # before the value, a context or environment is passed

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._count()
            _check_growth(name, args[first], (*args[first + 1 :], *kwargs.values()))
            return function(*args, **kwargs)

        return run

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise UserError(f"takes more than {MAX_STEPS} steps")

    def _count_items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count()
            yield item

    def _measure(self, value: Any) -> Any:
        _size(value)
        return value

    def _write(self, value: Any) -> Any:
        """Count a value that is written, also in a macro or to a variable."""
        self._written += _size(value)
        _check_length(self._written)
        return value


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write plain JSON: jinja2's own filter escapes <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _size(value: Any) -> int:
    """Return the number of characters in a value, other items count as 16; lists may contain one list many times."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += len(one) if isinstance(one, str) else 16
        if isinstance(one, Mapping):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        _check_length(size)
    return size


def _check_growth(name: str, value: Any, args: Sequence[Any]) -> None:
    """Check how long a filter or method makes a value: at most the product of the given lengths and widths."""
    if name == "format":
        if _WIDE.search(str(value)):
            raise UserError("pads a text too much")
        _check_length((str(value).count("%") + str(value).count("{")) * _size(list(args)))
    elif name in _GROWING:
        widths = [one for one in args if isinstance(one, int)]
        if max(widths, default=0) > MAX_WIDTH:
            raise UserError("pads a text too much")
        texts = args[1:] if name == "replace" else args  # the length of what is replaced does not count
        sizes = [_size(one) for one in (value, *texts) if not isinstance(one, int)]
        _check_length(math.prod(max(1, one) for one in (*widths, *sizes)))


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise UserError(f"writes more than {MAX_LENGTH} characters")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise UserError(f"makes a number of more than {MAX_BITS} bits")
