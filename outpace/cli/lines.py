"""The lines of a conversation: from a terminal, with editing, history and several lines at once, or from a pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outpace.cli import signals, standard_streams

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

PROMPT, CONTINUED = "> ", "  "


def open_lines() -> tuple[bool, Callable[[], str | None]]:
    """Whether somebody types, and what gives the next line, or None after the last. UserError without an input."""
    with standard_streams.reading() as stream:
        is_typed = stream.isatty()
    return is_typed, _typed() if is_typed else _piped


def _piped() -> str | None:
    with standard_streams.reading() as stream, signals.at_any_point():
        return stream.readline() or None


def _typed() -> Callable[[], str | None]:
    """KeyboardInterrupt for Ctrl-C at the prompt."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _begin_a_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(always_prefer_tty=True)  # the answers alone may go to a file
    session: PromptSession[str] = PromptSession(
        PROMPT, key_bindings=keys, prompt_continuation=CONTINUED, output=output, complete_while_typing=False
    )

    def read() -> str | None:
        try:
            with signals.at_any_point():
                return session.prompt()
        except EOFError:
            return None

    return read
