"""outpace: language models that write faster without changing what they write.

import outpace
with outpace.LLM() as llm:
    for piece in llm.stream("The three primary colours are", max_tokens=40):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.api.llm import LLM, load
    from outpace.api.params import SamplingParams
    from outpace.api.stream import Result, Stream
    from outpace.api.text import Piece

__version__ = "0.2.0"
__all__ = ["LLM", "Piece", "Result", "SamplingParams", "Stream", "UserError", "load"]
_MODULES = {
    "LLM": "llm",
    "load": "llm",
    "Piece": "text",
    "Result": "stream",
    "SamplingParams": "params",
    "Stream": "stream",
}


def __dir__() -> list[str]:
    """List the public names, including those that are not imported yet."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import the library at its first use: the command line's help needs neither it nor torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"outpace.api.{_MODULES[name]}"), name)
