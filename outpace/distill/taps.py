"""Records the target's hidden states in the passes that write the text, and stores them as int8 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.drafting import Needs
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, DraftState, Observation, Request
from outpace.models.llama.native.runtime import host_floats

LEVELS = 127  # of int8, on each side of zero
TAPS, SCALES = "taps", "tap_scales"  # tensors of a shard


def tap_list(layers: Sequence[int]) -> str:
    """Return layers as in `--taps`."""
    return ",".join(map(str, layers))


class Taps(NamedTuple):
    """Hidden states, whose values are `levels` times `scales`."""

    levels: np.ndarray  # int8 [tokens, layers, width]
    scales: np.ndarray  # float32 [tokens, layers]

    @classmethod
    def quantise(cls, hidden: np.ndarray) -> Taps:
        """Round float32 [layers, tokens, width] to int8; the largest magnitude of each row becomes LEVELS."""
        rows = hidden.swapaxes(0, 1)
        scales = np.abs(rows).max(-1) / np.float32(LEVELS)
        return cls(np.rint(rows / np.maximum(scales, np.float32(1e-30))[..., None]).astype(np.int8), scales)

    def floats(self) -> np.ndarray:
        """Return float32 [tokens, layers * width]."""
        return (self.levels * self.scales[..., None]).reshape(len(self.levels), -1)


class TapRecorder(Drafter):
    """Drafts nothing, and records the target's hidden states after the numbers of layers in `layers`."""

    capabilities = Capabilities((DraftSource("taps"),))

    def __init__(self, layers: tuple[int, ...], target: Any) -> None:
        self.capabilities = replace(self.capabilities, needs=Needs(layers=layers, prompt=True))
        self._parts: dict[int, list[Taps]] = {}  # by the id of the request; the first part is empty
        shape = (0, len(layers), target.config.hidden_size)
        self._empty = Taps(np.zeros(shape, np.int8), np.zeros(shape[:2], np.float32))

    def open(self, request: Request) -> DraftState:
        self._parts[id(request)] = [self._empty]
        return DraftState(request)

    def take(self, request: Request, tokens: int) -> Taps:
        """Return what was recorded of a finished request, whose text has this many tokens, and forget it. The hidden
        states of its last tokens are zero, as the target has not read them."""
        parts = zip(*self._parts.pop(id(request)), strict=True)
        levels, scales = (np.concatenate(arrays) for arrays in parts)
        missing = tokens - len(levels)
        return Taps(np.pad(levels, ((0, missing), (0, 0), (0, 0))), np.pad(scales, ((0, missing), (0, 0))))

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """Add no nodes."""

    def observe(self, state: DraftState, seen: Observation) -> None:
        super().observe(state, seen)
        if seen.seen is not None and seen.seen.hidden is not None:
            self._parts[id(state.request)].append(Taps.quantise(host_floats(seen.seen.hidden)))


class StoredTaps(NamedTuple):
    """Where a shard holds the hidden states of one answer's tokens."""

    file: Path
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """Return float32 [tokens, layers * width]."""
        opened = _open_shard(self.file)
        return Taps(*(opened.get_slice(name)[self.start : self.stop] for name in (TAPS, SCALES))).floats()


@lru_cache(maxsize=4096)
def _open_shard(file: Path) -> Any:
    """Open a shard, whose content is mapped and not read."""
    from safetensors import safe_open

    return safe_open(str(file), framework="np")
