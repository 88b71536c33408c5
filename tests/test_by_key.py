"""Drafters learn from answers within a cache salt only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import QuickToy, decode, make_request, write

from outpace.core.drafting import BuildContext
from outpace.core.types import Drafter
from outpace.drafters import cacheback, lookahead, ouroboros, suffix
from outpace.engine.engine import EngineOptions

TARGET = QuickToy(16, 1, 0)  # the next token depends on the last one alone
DRAFT = QuickToy(16, 3, 5)
WIDE = EngineOptions(nodes=32, rows=512)
NAMED: Any = SimpleNamespace(fingerprint="toy")
GIVEN = BuildContext(TARGET, tokenizer=NAMED)


def _lookahead(folder: Path) -> Drafter:
    return lookahead.LookaheadDrafter(lookahead.Options(phrases=str(folder / "pool")), GIVEN)


MADE: dict[str, Callable[[Path], Any]] = {
    "suffix": lambda _: suffix.SuffixDrafter(suffix.Options()),
    "cacheback": lambda _: cacheback.CachebackDrafter(cacheback.Options(), None),
    "lookahead": _lookahead,
    "ouroboros": lambda _: ouroboros.OuroborosDrafter(DRAFT, ouroboros.Options()),
}


@pytest.mark.parametrize("name", MADE)
def test_answers_are_learnt_within_a_salt(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was written before takes fewer passes, for the same salt only."""
    monkeypatch.setattr(cacheback, "_MIN_CHANCE", 0.0)
    drafter = MADE[name](tmp_path)
    passes = []
    for key in ("mine", "yours", None, "mine"):
        asked = make_request((3, 1, 4), max_tokens=12, cache_salt=key)
        outcome = decode([asked], "speculative", drafter, target=TARGET, engine=WIDE)
        assert outcome.texts == [write(TARGET, asked)]
        passes.append(len(outcome.steps[0]))
    mine, yours, nobodys, again = passes
    assert mine == yours == nobodys
    assert again < mine
