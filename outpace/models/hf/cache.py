"""A transformers Cache with fixed slots: each forward sees a chosen selection of the stored keys and values.

What a model stores for a token depends only on the token's branch, so a rejected branch is dropped by no longer
selecting it; nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from outpace.core.arrays import to_device
from outpace.core.errors import UserError

# placeholders for layers that share another layer's keys and values; before transformers 5.23 there are none
_SHARING_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
HYBRIDS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
)  # whose recurrent layers continue from a copy of their states


class CacheLayout(NamedTuple):
    """How a model's layers attend.

    `windows`: the attention window of each layer type, None for full attention; one entry "" if there are no types.
    `objection`: why a token tree's mask cannot be expressed, or None.
    """

    windows: dict[str, int | None]
    objection: str | None


@dataclass(frozen=True)
class SlotView:
    """The slots that a forward reads and writes: `past` tokens precede the new ones, which go to the slots `write`.

    `read`: slots of past and new tokens in order; None for `first`, `first` + 1, ... without gaps. The slots before
    `first` hold the cross-attention's keys and values of a source.
    """

    past: int
    write: np.ndarray
    read: np.ndarray | None
    first: int = 0
    _indices: dict[torch.device, tuple[slice | Tensor, Tensor | None]] = field(default_factory=dict, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without device indices; other processes make their own."""
        return SlotView, (self.past, self.write, self.read, self.first)

    def indices_on(self, device: torch.device) -> tuple[slice | Tensor, Tensor | None]:
        """Return `write` and `read` as indices on the device, made once for all layers."""
        if device not in self._indices:
            read = None if self.read is None else to_device(self.read, np.int64, device)
            first, count = (int(self.write[0]), len(self.write)) if len(self.write) else (0, 0)
            is_consecutive = np.array_equal(self.write, np.arange(first, first + count))
            write = slice(first, first + count) if is_consecutive else to_device(self.write, np.int64, device)
            self._indices[device] = write, read
        return self._indices[device]


class SlotLayer(DynamicLayer):
    """One layer's keys and values of one sequence, [1, heads, slots, dim] each, allocated at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = 0
        self.stored: tuple[Tensor, ...] = ()
        self.show(SlotView(0, np.arange(0), None))

    def show(self, shown: SlotView) -> None:
        """Set what the next forward sees."""
        self._shown, self._seen = shown, shown.past
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots, uninitialised: no forward reads a slot before it was written."""
        super().lazy_initialization(key_states, value_states)
        pair = (key_states, value_states)
        self.stored = tuple(part.new_empty(*part.shape[:-2], self._slots, part.shape[-1]) for part in pair)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; return keys and values of past and new tokens, [1, heads, past + new, dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        shown = self._shown
        self._seen = shown.past + key_states.shape[-2]
        write, read = shown.indices_on(key_states.device)
        for stored, new in zip(self.stored, (key_states, value_states), strict=True):
            stored[..., write, :] = new
        if read is None:
            seen = slice(shown.first, shown.first + self._seen)
            self.keys, self.values = (stored[..., seen, :] for stored in self.stored)
        else:
            self.keys, self.values = (stored.index_select(-2, read) for stored in self.stored)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens that this forward has seen so far."""
        return self._seen

    def resize(self, slots: int, held: int) -> None:
        """Change the number of slots; the first `held` keep their content."""
        self._slots = slots
        self.keys = self.values = None  # views of the old slots
        grown = tuple(part.new_empty(*part.shape[:-2], slots, part.shape[-1]) for part in self.stored)
        for new, old in zip(grown, self.stored, strict=True):
            new[..., :held, :] = old[..., :held, :]
        self.stored = grown

    def move(self, source: np.ndarray, start: int) -> None:
        """Copy slots `source` to start, start + 1, ..."""
        for stored in self.stored:
            index = to_device(source, np.int64, stored.device)
            stored[..., start : start + len(source), :] = stored.index_select(-2, index)

    def copy(self, other: SlotLayer, length: int) -> None:
        """Copy the first `length` slots from the same layer of another session."""
        if not self.is_initialized and other.is_initialized:
            self.lazy_initialization(*other.stored)
        for stored, found in zip(self.stored, other.stored, strict=True):
            stored[..., :length, :] = found[..., :length, :]


def build_cache(config: Any) -> tuple[Any, list[SlotLayer], list[Any]]:
    """Return a Cache for this config, its layers that store keys and values, and those that have a state."""
    cache, others = DynamicCache(config=config), (LinearAttentionLayer, *_SHARING_LAYERS)
    cache.layers = [layer if isinstance(layer, others) else SlotLayer() for layer in cache.layers]
    stores = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    return cache, stores, [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


def read_layout(config: Any) -> CacheLayout:
    """Return how the layers of a model with this config attend.

    Raises UserError if drafted tokens could not be removed, or if this transformers version does not reveal shared
    layers.
    """
    if not _SHARING_LAYERS and getattr(config, "num_kv_shared_layers", None):
        raise UserError("a model whose layers share keys and values needs transformers 5.23 or newer")
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # an incomplete config raises anything
        raise UserError(
            f"transformers has no cache for this model ({type(error).__name__}: {error}), so drafted tokens could not"
            " be taken back"
        ) from error
    is_hybrid = getattr(config, "model_type", None) in HYBRIDS
    recurrent = (LinearAttentionLayer,) if is_hybrid else ()
    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, *recurrent, *_SHARING_LAYERS):
            raise UserError(
                f"layer {number} keeps a {type(layer).__name__}, a state from which drafted tokens cannot be taken"
                " back: the runtime transformers takes no models with recurrent or compressed memory, except"
                f" {', '.join(HYBRIDS)}"
            )
    if any(isinstance(layer, recurrent) for layer in layers):
        return CacheLayout({"": None}, "its recurrent layers continue from a copy of their states")
    return CacheLayout(_windows(getattr(config, "layer_types", None), layers), _objection(config))


def _windows(types: Sequence[str] | None, layers: Sequence[Any]) -> dict[str, int | None]:
    """Return windows by layer type; a single entry "" if all are equal."""
    names = types if types is not None and len(types) == len(layers) else [""] * len(layers)
    found = {
        name: getattr(layer, "sliding_window", None)
        for name, layer in zip(names, layers, strict=True)
        if not isinstance(layer, _SHARING_LAYERS)
    }
    return {"": next(iter(found.values()), None)} if len(set(found.values())) <= 1 else found


def _objection(config: Any) -> str | None:
    """Return why slots must equal positions in this model, so that a tree's mask would not suffice; or None."""
    fields = config.to_dict()
    if "chunked_attention" in (fields.get("layer_types") or ()) or fields.get("attention_chunk_size"):
        return "its layers attend in chunks of positions"
    for name, value in fields.items():
        known = name in ("sliding_window", "max_window_layers", "use_sliding_window") or name.endswith("pattern")
        if "window" in name and not known and isinstance(value, int) and value > 0:
            return f"its layers apply a window of their own ({name} {value})"
    return None
