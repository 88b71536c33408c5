"""What an answer may be: of any text, which tokens may follow. A grammar is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Constraint:
    """The limits of one request's answer, a function of the text alone; several threads may ask.

    `text` is the prompt and what is written of the answer, `path` drafted tokens behind it. A method may raise, which
    ends the request; whoever drafts then does without.
    """

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of `path` may follow `text`, one after the other. None does after the end."""
        raise NotImplementedError

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        """Which tokens may follow `text` and `path`, bool [vocab]; None where the text is over or cannot be."""
        raise NotImplementedError

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        """Whether nothing may follow: the text is complete."""
        raise NotImplementedError

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Tokens that spell what has to follow, as the model would most likely cut it; often none."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process drafts without it: what it proposes is judged here."""
        return _none, ()


def _none() -> None:
    return None
