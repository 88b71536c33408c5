"""Limits of the engine: sizes of batches and memory."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.errors import check_range, check_whole

BURST = 0.016  # seconds of rounds in one step: less than one frame of a screen at 60 Hz


@dataclass(frozen=True)
class EngineOptions:
    """`nodes`: most nodes of a request's tree in one pass, root included; `rows`: most nodes of all trees together;
    `chunk`: prompt tokens in a pass; `batch`: requests running at once, others wait; `kv_memory`: GiB for keys and
    values (None: half of the free memory); `reuse`: start prompts from the keys and values of a text with the same
    prefix, and let drafters copy what followed the whole prompt there; `burst`: seconds that several rounds in one step
    may take, plain or native ones, so that the host's work is done once for all of them."""

    nodes: int = 8
    rows: int = 64
    chunk: int = 256
    batch: int = 16
    kv_memory: float | None = None
    reuse: bool = True
    burst: float = 0.0

    def __post_init__(self) -> None:
        check_whole("nodes", self.nodes, 1, 4096)
        check_whole("rows", self.rows, 1, 65536)
        check_whole("chunk", self.chunk, 1, 65536)
        check_whole("batch", self.batch, 1, 4096)
        check_range("burst", self.burst, 0.0)
        if self.kv_memory is not None:
            check_range("kv_memory", self.kv_memory, 0.0)
