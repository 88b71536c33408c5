"""How much an engine may do at once, and the memory that it may take."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.errors import check_range, check_whole

BURST = 0.016  # seconds of rounds in one step: less than a picture of a screen stands


@dataclass(frozen=True)
class EngineOptions:
    """`nodes` a request's tree may have in one pass, the root included, and `rows` all trees together; `chunk` prompt
    tokens a pass; `batch` requests running at once, the others wait; `kv_memory` GiB for keys and values (None: half of
    what is free); `reuse`: a prompt that begins like a text that is there does not read that again, and what
    followed all of it there is told to drafters; `burst`: seconds of rounds that one step may take, plain ones or whole
    ones by the kernels, so that the host's work is done for all of them together."""

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
