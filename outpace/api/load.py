"""`outpace.load`: loads an LLM in one call."""

from __future__ import annotations

from typing import Any

from outpace.api.llm import LLM
from outpace.models.options import LoadOptions


def load(target: Any = None, draft: Any = None, options: LoadOptions | None = None, **more: Any) -> LLM:
    """Loads a target (None: the shipped model) and a draft for it: the same as `LLM` with these arguments."""
    return LLM(target, draft, options, **more)
