"""What layers multiply the pairs of their heads by, for each way in which a model's layers turn."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.config.rope import BLOCK, Rotation

RopeFactors = dict[int | None, Tensor]
"""By the number of a rotation, None for layers that know no positions: [rows, heads + 2 kv_heads, head_dim / 2]
complex."""


class RopeTables:
    """Of all rotations of a model, complex numbers of a `dtype`. Tables are made as far as they are asked for."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._rotaries = [Rotary(config.head_dim, rotation, device) for rotation in config.rotations]

    def reach(self, positions: int) -> None:
        """Makes all tables hold at least so many positions; one thread at a time."""
        for rotary in self._rotaries:
            rotary.reach(positions)

    @property
    def tables(self) -> list[Tensor]:
        """By rotation; other tensors once there are more positions. [positions, head_dim / 2] complex64"""
        return [rotary.table for rotary in self._rotaries]

    def of_layer(self, layer: int) -> Tensor | None:
        """The table of a layer's rotation; None where it knows no positions."""
        rotation = self._config.rotation(layer)
        return None if rotation is None else self._rotaries[rotation].table

    def __call__(self, positions: Tensor) -> RopeFactors:
        """Unit numbers for rows at these positions, for queries times the scores' scale; values stay."""
        config = self._config
        still = torch.ones((len(positions), 1, config.head_dim // 2), dtype=self._dtype, device=self._device)

        def of_heads(turn: Tensor) -> Tensor:
            query = (turn * config.attention_scale).expand(-1, config.num_heads, -1)
            parts = (query, turn.expand(-1, config.num_kv_heads, -1), still.expand(-1, config.num_kv_heads, -1))
            return torch.cat(parts, dim=1)

        turns: RopeFactors = {
            number: of_heads(rotary(positions)[:, None].to(self._dtype)) for number, rotary in enumerate(self._rotaries)
        }
        return turns | {None: of_heads(still)} if config.rotary_layers else turns


def frequencies_of(head_dim: int, rotation: Rotation) -> Tensor:
    """By how much each pair turns from one position to the next, float32 [head_dim / 2]."""
    theta, scaling, turning = rotation.theta, rotation.scaling, rotation.dim or head_dim
    frequencies = 1.0 / (theta ** (torch.arange(0, turning, 2, dtype=torch.float32) / turning))
    frequencies = torch.from_numpy(scaling.stretched(frequencies.numpy(), theta)) if scaling else frequencies
    return torch.cat([frequencies, frequencies.new_zeros((head_dim - turning) // 2)])


class Rotary:
    """e^(i position frequency), times the scaling's gain, for as many positions as were asked for."""

    def __init__(self, head_dim: int, rotation: Rotation, device: torch.device) -> None:
        self._frequencies = frequencies_of(head_dim, rotation)
        self._gains = torch.from_numpy(rotation.gains(head_dim))
        self._table = torch.empty(0, head_dim // 2, dtype=torch.complex64, device=device)

    def reach(self, positions: int) -> None:
        """Makes the table hold at least so many positions; one thread at a time."""
        if positions <= len(self._table):
            return
        blocks = [self._table]
        for start in range(len(self._table), positions, BLOCK):
            places = torch.arange(start, start + BLOCK, dtype=torch.float32)
            angles = torch.outer(places, self._frequencies)
            blocks.append((torch.complex(angles.cos(), angles.sin()) * self._gains).to(self._table.device))
        self._table = torch.cat(blocks)

    @property
    def table(self) -> Tensor:
        """All that were asked for; another tensor once there are more. [positions, head_dim / 2] complex64"""
        return self._table

    def __call__(self, positions: Tensor) -> Tensor:
        """The numbers for positions [rows]: [rows, head_dim / 2] complex64."""
        return self._table[positions]
