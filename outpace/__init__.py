"""outpace: language models that write faster without changing what they write.

import outpace
with outpace.load() as llm:
    for piece in llm.stream("The three primary colours are", max_tokens=40):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from outpace._moved import install
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.api.llm import LLM, Asking, Piece, Result, Stream
    from outpace.api.load import load

__version__ = "0.2.0"
install()
__all__ = ["LLM", "Asking", "Piece", "Result", "Stream", "UserError", "load"]


def __getattr__(name: str) -> Any:
    """The library, torch with it, is imported at its first use: the command line's help needs neither."""
    if name not in __all__:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from outpace.api import llm
    from outpace.api.load import load

    return load if name == "load" else getattr(llm, name)
