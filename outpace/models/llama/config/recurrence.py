"""Recurrent layers: gated delta nets (arXiv:2412.06464) and short convolutions, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DELTA_NET, CONVOLUTION = "delta net", "short convolution"
INPUTS = "linear_attn.in_proj_"  # the beginning of the names of a delta net's input matrices
PARTS = {"qkvz": ("qkv", "z"), "ba": ("b", "a")}  # the ends of these names, by those of matrices that fuse them


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a model's recurrent layers, all of one kind. Sizes count elements of one layer.

    `channels` pass through a causal filter of `filter_length` tokens, the row's own included. Those of a delta net are
    queries and keys of `key_heads` heads, then values of `value_heads`; a value head's state is [key_depth,
    value_depth]. Value head j reads key head j mod key_heads if `is_tiled`, as in llama.cpp's files of Qwen3.5, else
    j div (value_heads / key_heads). The heads' numbers are 0 for a short convolution. `fused`: the input matrices, keys
    of PARTS, that a checkpoint fuses, as those of Qwen3-Next do.
    """

    kind: str
    filter_length: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_depth: int = 0
    value_depth: int = 0
    is_tiled: bool = False
    fused: tuple[str, ...] = ()

    @property
    def is_delta_net(self) -> bool:
        return self.kind == DELTA_NET

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_depth

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_depth

    @property
    def state_size(self) -> int:
        """Number of float32 entries that a session keeps for a layer: the heads' states and the filter's last rows."""
        return self.value_width * self.key_depth + (self.filter_length - 1) * self.channels

    @property
    def stash_size(self) -> int:
        """Number of float32 entries that a pending node keeps for a layer: its row before the filter and, of a delta
        net, the decays, keys and deltas of its heads."""
        return self.channels + self.value_heads + self.key_width + self.value_width

    def key_head(self, value_head: int) -> int:
        """Return the key head that a value head reads."""
        shared = self.value_heads // self.key_heads
        return value_head % self.key_heads if self.is_tiled else value_head // shared

    def input_rows(self) -> dict[str, int]:
        """Return the number of rows of each input matrix of a delta net in a checkpoint, by the end of its name."""
        rows = {"qkv": self.channels, "z": self.value_width, "b": self.value_heads, "a": self.value_heads}
        for name in self.fused:
            rows[name] = sum(rows.pop(part) for part in PARTS[name])
        return rows

    def fused_rows(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return, for each input matrix that a checkpoint fuses, the fused one and the rows there.

        A fused matrix has the rows of one key head after those of another: its query, key, values and gates, or the
        strengths and steps of its value heads.
        """
        if not self.fused:
            return {}
        shared = self.value_heads // self.key_heads
        key, value = self.key_depth, shared * self.value_depth
        rows: dict[str, tuple[str, np.ndarray]] = {}
        if "qkvz" in self.fused:
            query_rows, key_rows, value_rows, rows_of_z = self._rows_by_head((key, key, value, value))
            rows["qkv"] = "qkvz", np.concatenate([query_rows, key_rows, value_rows])
            rows["z"] = "qkvz", rows_of_z
        if "ba" in self.fused:
            rows["b"], rows["a"] = (("ba", part) for part in self._rows_by_head((shared, shared)))
        return rows

    def _rows_by_head(self, sizes: tuple[int, ...]) -> list[np.ndarray]:
        """Return each part's rows of a matrix that has, for each key head, parts of these sizes."""
        rows = np.arange(self.key_heads * sum(sizes)).reshape(self.key_heads, -1)
        return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]
