"""Draft steps that are under way for one request, and where the target goes meanwhile, as they are told of it."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.steps import MOST_WALKED, Mail, Moved
from outpace.drafters._grower import Job


class UnderWay:
    """What another thread may know of a tree while a graph grows it: its nodes that are pending, as they were when the
    steps began. `mail`: by which the steps are told."""

    def __init__(self, job: Job) -> None:
        state, tree, _ = job
        self._known = {
            node_id: (state.slots[node_id], score)
            for node_id, score in zip(tree.ids, tree.scores, strict=True)
            if node_id in state.slots
        }
        self._root = tree.ids[0]
        self._above = self._known.get(self._root)
        self._written: list[int] = []  # below that node
        self.mail = Mail()

    def hear(self, path: Sequence[int], tokens: Sequence[int], root_id: int) -> None:
        """As `Drafter.hear`. What is said of another root than the present one came too late, or too early."""
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
