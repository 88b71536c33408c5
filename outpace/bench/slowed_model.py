"""Models whose passes take a stated time: stand-ins for larger ones, each on a core of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from outpace.core.drafting import BuildContext
from outpace.core.types import Drafter
from outpace.engine.build import build_drafter
from outpace.models.base import Part
from outpace.models.load import Loaded

T = TypeVar("T")


class SlowedModel:
    """A model whose passes last `seconds` at least: it sleeps for the rest, and needs no core meanwhile."""

    def __init__(self, model: Any, seconds: float) -> None:
        self._model, self._seconds = model, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score(self, forest: Sequence[Part]) -> Any:
        """The model's scores, no sooner."""
        return self._paced(self._model.score, forest)

    def score_held(self, forest: Sequence[Part]) -> Any:
        """The model's scores, no sooner."""
        return self._paced(self._model.score_held, forest)

    def _paced(self, call: Callable[[Sequence[Part]], T], forest: Sequence[Part]) -> T:
        end = time.perf_counter() + self._seconds
        result = call(forest)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result


def slowed_drafter(
    again: Callable[[], Loaded], vocab_size: int, options: Mapping[str, Any], seconds: float, core: int | None
) -> Drafter:
    """A draft model's drafter, in whatever process this is called; `core` is the only one that it then runs on."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    draft = again()
    draft.model.vocab_size = vocab_size
    return build_drafter("model", BuildContext(SlowedModel(draft.model, seconds)), options)
