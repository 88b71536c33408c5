"""Where files of our own are kept, and what is said where they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.core.errors import UserError


def cache_folder() -> Path:
    """Where converted models are kept: OUTPACE_CACHE, else XDG_CACHE_HOME/outpace, else ~/.cache/outpace.

    UserError where a home folder is meant that the system does not know.
    """
    own, shared = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser()
        is_valid = os.path.isabs(shared)  # by its specification a relative one is to be ignored
        return (Path(shared) if is_valid else Path.home() / ".cache") / "outpace"
    except RuntimeError as error:
        said = (
            f"OUTPACE_CACHE is {own!r:.200}, whose" if own else "the cache folder is to be in the user's home, but this"
        )
        raise UserError(f"{said} home folder is not known: name a folder by OUTPACE_CACHE") from error


def unwritable(path: Path, error: OSError) -> UserError:
    """For what cannot be written, with the way out where it is to lie in the cache folder."""
    said = f"{path} cannot be written ({error.strerror or error})"
    try:
        is_cached = cache_folder() in path.parents
    except UserError:  # it is nowhere
        is_cached = False
    return UserError(f"{said}: name another folder by OUTPACE_CACHE" if is_cached else said)
