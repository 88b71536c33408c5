"""An answer that was requested and has not begun."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from outpace.api.text import TextAssembler
from outpace.core.types import Request


@dataclass(frozen=True)
class Prepared:
    """What the engine is handed (`request`, `decoder`, its `options`, `text.watch`, and the name of its `drafter`), and
    what makes text of its tokens. `echo` stands before the answer."""

    request: Request
    decoder: ModuleType
    options: Any
    text: TextAssembler
    method: str
    echo: str
    drafter: str | None = None
