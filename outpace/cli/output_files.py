"""Files that a command writes: mistakes are reported before the work starts."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.core.errors import UserError


def check_file(flag: str, file: Path | None) -> None:
    """Raise UserError unless `file` is None or can be written."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"{flag} is {file}, which is a folder; name a file")
    if not file.parent.is_dir():
        raise UserError(f"{flag} is {file}, but there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{flag} is {file}, which cannot be written")


def check_folder(flag: str, folder: Path | None) -> None:
    """Raise UserError unless `folder` is None, exists, or can be made."""
    if folder is None:
        return
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise UserError(f"{flag} is {folder}, but {above} is a file")
    if not os.access(above, os.W_OK):
        raise UserError(f"{flag} is {folder}, but {above} cannot be written")


def check_plot(flag: str, file: Path | None) -> None:
    """Raise UserError unless `file` is None or matplotlib can write it in the format of its suffix."""
    if file is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(f"{flag} needs `pip install matplotlib`; leave it out for the table alone") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        suffixes = ", ".join(f".{name}" for name in formats)
        raise UserError(f"{flag} is {file}, its name must end with one of {suffixes}")
    check_file(flag, file)
