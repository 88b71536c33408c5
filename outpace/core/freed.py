"""Gives the memory that the C library keeps for later back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """What has been freed by all threads, in whole pages; nothing where the C library cannot: it is glibc's own."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
