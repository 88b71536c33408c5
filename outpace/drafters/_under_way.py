"""Draft steps that are under way for one request, and where the target goes meanwhile, as they are told of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from outpace.core.steps import MOST_WALKED, Mail, Moved
from outpace.drafters._grower import Job


class Walk(NamedTuple):
    """Where the target went: the nodes by id, what it wrote behind each, the root from then on."""

    path: Sequence[int]
    tokens: Sequence[int]
    root_id: int


class UnderWay:
    """What another thread may know of a tree while a graph grows it: its nodes that are pending, as they were when the
    steps began. `mail`: by which the steps are told."""

    def __init__(self, job: Job, heard: deque[Walk]) -> None:
        """`heard`: what was said and not yet observed, to which others add."""
        state, tree, _ = job
        self._heard, self._lock = heard, threading.Lock()
        self._known = {
            node_id: (state.slots[node_id], score)
            for node_id, score in zip(tree.ids, tree.scores, strict=True)
            if node_id in state.slots
        }
        self._root = tree.ids[0]
        self._above = self._known.get(self._root)
        self._written: list[int] = []  # below that node
        self.mail = Mail()

    def listen(self) -> None:
        """Any thread, when something was said: follows what leads on from the present root."""
        with self._lock:
            for walk in self._heard.copy():
                self._follow(*walk)

    def _follow(self, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        """As `Drafter.hear` has it. What begins at another root than the present one was followed before, or came too
        early."""
        if path[0] != self._root or self._above is None:
            return
        self._root = root_id
        walked = [*path, root_id]  # tokens[n] stands between walked[n] and walked[n + 1]
        last = max((place for place, node_id in enumerate(walked) if node_id in self._known), default=None)
        if last is None:
            self._written += tokens
        else:
            self._above, self._written = self._known[walked[last]], [*tokens[last:]]
        if len(self._written) <= MOST_WALKED:
            self.mail.send(Moved(*self._above, tuple(self._written)))
