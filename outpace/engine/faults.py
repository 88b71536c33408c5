"""Faults that end one request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outpace.engine.sequence import Running


def apart(run: Running, call: Callable[..., None], *arguments: Any) -> None:
    """A fault in a request's rule, its options or who watches it ends this request alone."""
    try:
        call(*arguments)
    except Exception as error:
        run.storage.is_broken = True
        run.fail(error)
