"""Slows models down to a given time per pass, to emulate larger models on devices of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outpace.core.drafting import BuildContext
from outpace.core.types import Drafter
from outpace.drafters import build_drafter
from outpace.models.base import Model, Part
from outpace.models.load import Loaded
from outpace.simulate import trace
from outpace.simulate.models import ReplayDraft, index_trace
from outpace.simulate.trace import limit_trace

T = TypeVar("T")


class SlowedModel:
    """A model whose forwards last at least `seconds`: it sleeps for the rest of the time and frees the core."""

    def __init__(self, model: Any, seconds: float) -> None:
        self._model, self._seconds = model, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score(self, forest: Sequence[Part]) -> Any:
        """Run the model's forward and wait."""
        return self._wait(self._model.score, forest)

    def score_sparse(self, forest: Sequence[Part]) -> Any:
        """Run the model's forward and wait."""
        return self._wait(self._model.score_sparse, forest)

    def _wait(self, call: Callable[[Sequence[Part]], T], forest: Sequence[Part]) -> T:
        end = time.perf_counter() + self._seconds
        result = call(forest)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result


def loaded_draft(again: Callable[[], Loaded], vocab_size: int) -> Model:
    """Load a draft model again, with the target's vocabulary."""
    model = again().model
    model.vocab_size = vocab_size
    return model


def replayed_draft(path: Path, answers: int | None) -> Model:
    """Return the model that replays the draft's side of a trace."""
    return ReplayDraft(index_trace(limit_trace(trace.load(path), answers)), lambda rows: 0.0)


def slowed_drafter(load: Callable[[], Model], options: Mapping[str, Any], seconds: float, core: int | None) -> Drafter:
    """Build a draft model's drafter in the calling process, which then runs on `core` only (None: on any core)."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    return build_drafter("model", BuildContext(SlowedModel(load(), seconds)), options)
