"""What a part is built from, what it asks of the engine, and what it is then told of the target's passes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Given(NamedTuple):
    """What a drafter may be built from: the models and their tokenizers, None where there is none. In another process
    the draft and its tokenizer are all there is."""

    draft: Any = None
    target: Any = None
    draft_tokenizer: Any = None
    tokenizer: Any = None
