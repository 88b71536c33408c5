"""A mistake that mutations.py applies to the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A named mistake: `before`, which occurs once in src/`file`, is replaced by `after`."""

    name: str
    file: str
    before: str
    after: str

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Apply the mistake to the copy at `root`. Raise ValueError if the source has changed."""
        place = root / "src" / self.file
        text = place.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {text.count(self.before)} times in {self.file}")
        place.write_text(text.replace(self.before, self.after), encoding="utf-8")
        try:
            yield
        finally:
            place.write_text(text, encoding="utf-8")
