"""A mistake that mutations.py puts into the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`before` stands once in src/`file`; `after` takes its place."""

    name: str
    file: str
    before: str
    after: str

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Puts the mistake into the copy at `root`. ValueError where the sources have moved on."""
        place = root / "src" / self.file
        text = place.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {text.count(self.before)} times in {self.file}")
        place.write_text(text.replace(self.before, self.after), encoding="utf-8")
        try:
            yield
        finally:
            place.write_text(text, encoding="utf-8")
