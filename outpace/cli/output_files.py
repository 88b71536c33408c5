"""Files that a command will write: errors are reported before the work begins, or after it is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from outpace.cli import display
from outpace.core.errors import UserError


def check_file(flag: str, file: Path | None) -> None:
    """UserError unless `file` can be made or written over; None: it was not asked for."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"{flag} is {file}, which is a folder; name a file")
    if not file.parent.is_dir():
        raise UserError(f"{flag} is {file}, but there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{flag} is {file}, which cannot be written")


def check_folder(flag: str, folder: Path | None) -> None:
    """UserError unless `folder` is there or can be made."""
    if folder is None:
        return
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise UserError(f"{flag} is {folder}, but {above} is a file")
    if not os.access(above, os.W_OK):
        raise UserError(f"{flag} is {folder}, but {above} cannot be written")


def check_plot(flag: str, file: Path | None) -> None:
    """UserError unless matplotlib is there and can write `file` in the form that its name tells."""
    if file is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(f"{flag} needs `pip install matplotlib`; leave it out for the table alone") from None
    forms = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in forms:
        raise UserError(f"{flag} is {file}, its name must end with one of {', '.join(f'.{form}' for form in forms)}")
    check_file(flag, file)


def write_all(writes: Iterable[Callable[[], None]]) -> list[UserError]:
    """Carries out all of them; what the user is to know of those that failed."""
    errors = []
    for write in writes:
        try:
            write()
        except UserError as error:
            errors.append(error)
    return errors


def raise_last(errors: list[UserError]) -> None:
    """Says all of them; the last one ends the command."""
    for error in errors[:-1]:
        display.say(f"error: {error}", "red")
    if errors:
        raise errors[-1]
