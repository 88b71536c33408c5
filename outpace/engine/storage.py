"""Where a request's keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.models.base import Session


@dataclass(eq=False)
class Storage:
    """A request's keys and values: the session that holds them, only while it runs, and what is known of it."""

    session: Session = field(init=False)
    keep: Sequence[int] = ()  # pending nodes of the session that were accepted
    is_broken: bool = False  # a round broke off: what the session holds is unknown

    def settle(self) -> None:
        """Commits the accepted nodes to the session now, where the next pass would do it."""
        if self.keep:
            self.session.keep(self.keep)
            self.keep = ()

    def release(self) -> None:
        """Lets go of them: a request that is over may be held for long, its keys and values may not."""
        del self.session
        self.keep = ()
