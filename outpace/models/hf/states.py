"""States of recurrent layers, which no token can be removed from: every forward continues from a copy.

A copy belongs to a number of committed tokens. Those kept since then, if no forward ended just after them, are read
again by the next forward. So plain decoding and chains that are accepted as a whole read nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

TENSORS = ("conv_states", "recurrent_states")  # a layer's fields


class Saved(NamedTuple):
    """The states of all layers after some committed tokens, None: none; `owed` are the committed tokens since."""

    layers: Sequence[Any] | None
    owed: tuple[int, ...]


class States:
    """The states of one session's recurrent layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self.load(None)

    def load(self, saved: Saved | None) -> None:
        """Continue from saved states, or from the beginning of a text."""
        self.committed = saved or Saved(None, ())
        self.tokens: list[int] = []  # of the pending nodes
        self._end: tuple[list[int], Sequence[Any]] | None = None  # path and states of the last forward

    def restore(self) -> None:
        """Give the layers a copy of the committed states."""
        for number, layer in enumerate(self._layers):
            layer.__init__()
            if self.committed.layers is not None:
                vars(layer).update(_copy(self.committed.layers[number]))

    def finish(self, path: Sequence[int]) -> None:
        """Note that a forward has read the nodes of `path`, after all committed tokens."""
        self._end = list(path), [dict(vars(layer)) for layer in self._layers]

    def keep(self, path: Sequence[int], live: Sequence[int]) -> None:
        """Follow `Session.keep`."""
        read, states = self._end or ([], None)
        if states is not None and read == list(path)[: len(read)]:
            self.committed = Saved(states, tuple(self.tokens[node] for node in path[len(read) :]))
        else:
            owed = tuple(self.tokens[node] for node in path)
            self.committed = Saved(self.committed.layers, self.committed.owed + owed)
        self.tokens, self._end = [self.tokens[node] for node in live], None

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers' states; 0 before the first forward."""
        entries = [part for layer in self._layers for name in TENSORS for part in getattr(layer, name).values()]
        return sum(part.nbytes for part in entries if part is not None)


def _copy(value: Any) -> Any:
    """Return a layer's fields with tensors and dictionaries of their own."""
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
