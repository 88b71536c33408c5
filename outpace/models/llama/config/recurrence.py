"""Recurrent layers: gated delta nets (arXiv:2412.06464) and short convolutions, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

DELTA_NET, CONVOLUTION = "delta net", "short convolution"


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a model's recurrent layers, all of one kind. Sizes count elements of one layer.

    `channels` pass through a causal filter of `filter_length` tokens, the row's own included. Those of a delta net are
    queries and keys of `key_heads` heads, then values of `value_heads`; a value head's state is [key_depth,
    value_depth]. Value head j reads key head j mod key_heads if `is_tiled`, as in llama.cpp's files of Qwen3.5, else
    j div (value_heads / key_heads). The heads' numbers are 0 for a short convolution.
    """

    kind: str
    filter_length: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_depth: int = 0
    value_depth: int = 0
    is_tiled: bool = False

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
