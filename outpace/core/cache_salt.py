"""What a drafter learns from answers, apart for each reuse key: nobody finds what another key's texts taught."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

MOST = 8  # keys whose tables are held: each may be as large as the one of requests without a key

Learnt = TypeVar("Learnt")


class PerSalt(Generic[Learnt]):
    """Tables that `make` makes: `shared`, of all requests without a reuse key, and those of the keys used last."""

    def __init__(self, make: Callable[[], Learnt]) -> None:
        self.shared = make()
        self._make = make
        self._own: OrderedDict[str, Learnt] = OrderedDict()

    def of(self, key: str | None) -> Learnt:
        """The table of requests with this reuse key; where there are too many, that of the key unused longest goes."""
        if key is None:
            return self.shared
        if key not in self._own:
            self._own[key] = self._make()
        self._own.move_to_end(key)
        if len(self._own) > MOST:
            self._own.popitem(last=False)
        return self._own[key]
