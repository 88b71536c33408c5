"""outpace: language models that write faster without changing what they write.

import outpace
with outpace.load() as llm:
    for piece in llm.stream("The three primary colours are", max_tokens=40):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.library import LLM, Asking, Piece, Result, Stream
    from outpace.loading import load

__version__ = "0.1.0"
__all__ = ["LLM", "Asking", "Piece", "Result", "Stream", "UserError", "load"]


def __getattr__(name: str) -> Any:
    """The library, torch with it, is imported at its first use: the command line's help needs neither."""
    if name not in __all__:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from outpace import library, loading

    return getattr(loading if name == "load" else library, name)
