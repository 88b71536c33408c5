"""The process that renders a chat template: it reads and writes lines of JSON, and offers what transformers offers.

It is run as a file, not imported from the package, so that it needs jinja2 alone and starts in 0.1 seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

SECONDS = 5  # of CPU time per text
BYTES = 2**29  # of address space of the process
LONGEST = 2**24  # characters of a text


def main() -> None:
    """Read the template, then render it for every line of values until end of input."""
    _limit_memory()
    template = json.loads(sys.stdin.buffer.readline())
    render: Callable[[Mapping[str, Any]], dict[str, str]] | None = None
    for line in sys.stdin.buffer:
        _limit_time(SECONDS)
        render = render or _renderer(template)
        answer = render(json.loads(line))
        _limit_time(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    except (ImportError, ValueError, OSError):  # not available on every system; the time limit still applies
        return


def _limit_time(seconds: int) -> None:
    """Have the system end the process after this much CPU time, even within one long operation; 0 lifts the limit."""
    import signal

    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _renderer(template: str) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    import jinja2

    try:
        compiled = _environment().from_string(template)
    except Exception as error:
        kind = "" if isinstance(error, jinja2.TemplateSyntaxError) else f"{type(error).__name__}: "
        refusal = {"refusal": f"is not valid: {kind}{error}"}
        return lambda values: refusal

    def render(values: Mapping[str, Any]) -> dict[str, str]:
        pieces, length = [], 0
        try:
            for piece in compiled.generate(values):
                length += len(piece)
                if length > LONGEST:
                    return {"refusal": f"writes more than {LONGEST} characters"}
                pieces.append(piece)
        except MemoryError:
            return {"refusal": f"takes more than {BYTES >> 20} MiB"}
        except Exception as error:  # anything that a template raises is bad input
            return {"refusal": f"refuses these messages: {error}"}
        return {"text": "".join(pieces)}

    return render


def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's part for training; here its content is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write plain JSON: jinja2's own filter escapes <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


if __name__ == "__main__":
    main()
