"""outpace: language models that write faster without changing what they write.

import outpace
with outpace.LLM() as llm:
    for piece in llm.stream("The three primary colours are", max_tokens=40):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from outpace._moved import install
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.api.llm import LLM, load
    from outpace.api.params import SamplingParams
    from outpace.api.stream import Result, Stream
    from outpace.api.text import Piece

__version__ = "0.2.0"
install()
__all__ = ["LLM", "Piece", "Result", "SamplingParams", "Stream", "UserError", "load"]
_HOMES = {
    "LLM": "llm",
    "Piece": "text",
    "Result": "stream",
    "SamplingParams": "params",
    "Stream": "stream",
    "load": "llm",
    "Asking": "_deprecated",
}


def __dir__() -> list[str]:
    """What there is to use, the library too before it is imported."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """The library, torch with it, is imported at its first use: the command line's help needs neither."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"outpace.api.{_HOMES[name]}"), name)
    if name == "Asking":
        from outpace.api._deprecated import warn

        warn("outpace.Asking", "outpace.SamplingParams", 3)
    return found
