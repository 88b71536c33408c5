"""Tables learnt from answers, kept separately for each cache salt: no request finds what another salt's texts
taught."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

MOST = 8  # salts with a table; each may be as large as the shared one

Table = TypeVar("Table")


class PerSalt(Generic[Table]):
    """The table `shared` by requests without a cache salt, and one for each recently used salt, created by `make`."""

    def __init__(self, make: Callable[[], Table]) -> None:
        self.shared = make()
        self.make = make
        self._own: OrderedDict[str, Table] = OrderedDict()

    def of(self, key: str | None) -> Table:
        """Return the table of requests with this salt; beyond `MOST` salts, the least recently used is dropped."""
        if key is None:
            return self.shared
        if key not in self._own:
            self._own[key] = self.make()
        self._own.move_to_end(key)
        if len(self._own) > MOST:
            self._own.popitem(last=False)
        return self._own[key]
