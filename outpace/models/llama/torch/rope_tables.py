"""Rotary embedding tables: the complex factors by which layers multiply the pairs of their heads."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.rope import BLOCK, Rotation

RopeFactors = dict[int | None, Tensor]
"""By rotation, None for layers without positions: complex [rows, heads + 2 kv_heads, head_dim / 2]"""


def frequencies_of(head_dim: int, rotation: Rotation) -> Tensor:
    """Return the angle of each pair per position: float32 [head_dim / 2]"""
    theta, scaling, rotated = rotation.theta, rotation.scaling, rotation.dim or head_dim
    frequencies = 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    frequencies = torch.from_numpy(scaling.stretched(frequencies.numpy(), theta)) if scaling else frequencies
    return torch.cat([frequencies, frequencies.new_zeros((head_dim - rotated) // 2)])


class Rotary:
    """A growing table of e^(i position frequency), times the scaling's gain."""

    def __init__(self, head_dim: int, rotation: Rotation, device: torch.device) -> None:
        self._frequencies = frequencies_of(head_dim, rotation)
        self._gains = torch.from_numpy(rotation.gains(head_dim))
        self.table = torch.empty(0, head_dim // 2, dtype=torch.complex64, device=device)  # [positions, head_dim / 2]

    def grow_to(self, positions: int) -> None:
        """Grow the table to at least `positions` positions; it becomes another tensor. One thread at a time."""
        if positions <= len(self.table):
            return
        blocks = [self.table]
        for start in range(len(self.table), positions, BLOCK):
            block = torch.arange(start, start + BLOCK, dtype=torch.float32)
            angles = torch.outer(block, self._frequencies)
            blocks.append((torch.complex(angles.cos(), angles.sin()) * self._gains).to(self.table.device))
        self.table = torch.cat(blocks)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the factors of positions [rows]: complex64 [rows, head_dim / 2]"""
        return self.table[positions]


class RopeTables:
    """The tables of all rotations of a model, with factors of a complex `dtype`."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._rotaries = [
            Rotary(head_dim, rotation, device)
            for head_dim, rotation in zip(config.rotated_dims, config.rotations, strict=True)
        ]
        layers = {config.rotation(layer): config.of_layer(layer) for layer in range(config.num_layers)}
        self._configs = [layers.get(number, config) for number in range(len(self._rotaries))]

    def grow_to(self, positions: int) -> None:
        """Grow all tables to at least `positions` positions; one thread at a time."""
        for rotary in self._rotaries:
            rotary.grow_to(positions)

    @property
    def tables(self) -> list[Tensor]:
        """The tables by rotation, complex64 [positions, head_dim / 2]; replaced when they grow."""
        return [rotary.table for rotary in self._rotaries]

    def of_layer(self, layer: int) -> Tensor | None:
        """Return the table of a layer's rotation; None for a layer without positions."""
        rotation = self._config.rotation(layer)
        return None if rotation is None else self._rotaries[rotation].table

    def __call__(self, positions: Tensor) -> RopeFactors:
        """Return the factors of rows at these positions: queries' include the attention scale, values' are 1."""

        def of_heads(config: LlamaConfig, factors: Tensor | None) -> Tensor:
            ones = torch.ones((len(positions), 1, config.head_dim // 2), dtype=self._dtype, device=self._device)
            factors = ones if factors is None else factors
            query = (factors * config.attention_scale).expand(-1, config.num_heads, -1)
            parts = (query, factors.expand(-1, config.num_kv_heads, -1), ones.expand(-1, config.num_kv_heads, -1))
            return torch.cat(parts, dim=1)

        found: RopeFactors = {
            number: of_heads(self._configs[number], rotary(positions)[:, None].to(self._dtype))
            for number, rotary in enumerate(self._rotaries)
        }
        return found | {None: of_heads(self._config, None)} if self._config.rotary_layers else found
