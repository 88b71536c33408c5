"""outpace: language models that write faster without changing what they write.

import outpace
with outpace.load(draft="layers:0,1,28,29") as llm:
    for piece in llm.stream("Once upon a time"):
        print(piece.text, end="", flush=True)
"""

from outpace.core.errors import UserError
from outpace.library import LLM, Piece, Result, Stream, load

__version__ = "0.1.0"
__all__ = ["LLM", "Piece", "Result", "Stream", "UserError", "load"]
