"""An interrupt while the shipped pair is loaded: both models, which are loaded at once, end at their next stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
from doubles import within

from outpace.api import pair
from outpace.engine.build import BuildOptions
from outpace.models.options import LoadOptions

Progress = Callable[[str, float], None]


class Draft:
    """Goes from stage to stage until it is ended, and says by what."""

    def __init__(self) -> None:
        self.began, self.ended_by = threading.Event(), ""

    def open(self, *given: Any, progress: Progress) -> Any:
        try:
            while True:
                progress("converting", 0.5)
                self.began.set()
                threading.Event().wait(0.001)
        except CancelledError as error:
            self.ended_by = type(error).__name__
            raise


def load(progress: Progress) -> None:
    pair.load_pair(None, None, LoadOptions(), BuildOptions(), progress=progress)


@pytest.mark.parametrize("when", ["the target is loaded", "the draft is waited for"])
def test_an_interrupt_ends_both(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft()
    is_early = when == "the target is loaded"

    def interrupted(stage: str, fraction: float) -> None:
        assert draft.began.wait(30.0)
        raise KeyboardInterrupt

    def target(spec: None, options: LoadOptions, *, progress: Progress) -> Any:
        return progress("loading", 0.5) if is_early else None

    monkeypatch.setattr(pair, "shipped_draft", lambda name: "draft")
    monkeypatch.setattr(pair, "open_draft", draft.open)
    monkeypatch.setattr(pair, "load_model", target)

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            load(interrupted)

    within(30.0, work)
    assert draft.ended_by == "CancelledError"
