"""Where the target goes while draft steps are under way: the graph itself fetches that from the host's memory at each
step, and turns.

CARD's correction (arXiv:2508.04462, query-and-correct) without an end of the graph: a copy from pinned memory is part
of it, so nobody waits. What is fetched while the host writes is known by its last number, a sum, and is passed over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.multi_step import MAX_UPDATE_TOKENS, RootUpdate
from outpace.models.llama.static_inputs import MOST_PENDING, WORDS

_COUNT, _SLOT, _SCORE, _LENGTH, _TOKENS = range(5)  # columns; then the tokens, and a sum over all of it
_COLUMNS = _TOKENS + MAX_UPDATE_TOKENS
_FACTOR = 0x5851F42D4C957F2D  # odd; its powers, as 64 bits hold them, weigh the numbers
_FACTORS = np.full(_COLUMNS, _FACTOR, np.int64).cumprod()


class Box:
    """What the host last said of each text, in its memory and on the device: int64 [texts, numbers]."""

    def __init__(self, texts: int, last_token: int, device: torch.device) -> None:
        """`last_token` that the model knows."""
        self._host = torch.zeros(texts, _COLUMNS + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers, self._last_token = self._host.numpy(), last_token
        self.device = torch.zeros(texts, _COLUMNS + 1, dtype=torch.int64, device=device)
        self._count = 0

    def clear(self) -> None:
        """Nothing was said of any text."""
        self._numbers[:] = 0

    def write(self, text: int, moved: RootUpdate) -> None:
        """Takes the place of what was said of this text before."""
        self._count += 1
        row = np.zeros(_COLUMNS + 1, np.int64)
        row[_COUNT], row[_SLOT], row[_LENGTH] = self._count, moved.slot, len(moved.tokens)
        row[_SCORE : _SCORE + 1].view(np.float64)[0] = moved.score
        row[_TOKENS : _TOKENS + len(moved.tokens)] = [min(token, self._last_token) for token in moved.tokens]
        row[-1] = (row[:-1] * _FACTORS).sum()
        self._numbers[text] = row

    def fetch(self) -> None:
        """Captured: what the host has said by now."""
        self.device.copy_(self._host, non_blocking=True)


class Goal(NamedTuple):
    """What a step may expand of each text whose root went elsewhere: what lies below the new root, or, where that is
    not expanded, the next token on the way there.

    `is_told` [texts]: whether it did; `is_there` [texts]: the new root is expanded. `bits` [texts, WORDS], `slot`,
    `depth` and `score` [texts]: of the last node on the way that is expanded; `token` [texts]: what stands below it.
    """

    is_told: Tensor
    is_there: Tensor
    bits: Tensor
    slot: Tensor
    depth: Tensor
    score: Tensor
    token: Tensor


class Columns(NamedTuple):
    """The nodes that a graph knows of beside those that were pending before: [texts, columns] each, `bits` of their
    parents [.., WORDS], `slots` -1 where a node is not expanded."""

    tokens: Tensor
    bits: Tensor
    slots: Tensor
    scores: Tensor


class Course:
    """Follows what the host says of each text."""

    def __init__(self, box: Box, pending_bits: Tensor, depths: Tensor) -> None:
        """Of the nodes that are pending before the steps: what they see [texts, pending, WORDS], their depths."""
        self._box, self._bits, self._depths = box, pending_bits, depths
        self._said = torch.zeros_like(box.device)
        self._own = own_bit(torch.arange(MOST_PENDING, device=depths.device))
        self._factors = torch.full((_COLUMNS,), _FACTOR, device=depths.device).cumprod(0)

    def goal(self, columns: Columns) -> Goal:
        """By what the host has said by now. From the node that it names the walk goes down the expanded nodes."""
        self._box.fetch()
        fetched = self._box.device
        is_whole = (fetched[:, :-1] * self._factors).sum(1) == fetched[:, -1]
        self._said = said = torch.where(is_whole[:, None], fetched, self._said)
        slot = said[:, _SLOT]
        bits = self._bits.gather(1, slot[:, None, None].expand(-1, 1, WORDS))[:, 0]
        depth = self._depths.gather(1, slot[:, None])[:, 0]
        score = said[:, _SCORE].contiguous().view(torch.float64)
        walked, token = torch.zeros_like(slot), torch.zeros_like(slot)
        places = torch.arange(columns.tokens.shape[1], device=slot.device).where(columns.slots >= 0, -1)  # of expanded
        for number in range(MAX_UPDATE_TOKENS):
            is_next = (walked == number) & (number < said[:, _LENGTH])
            token = torch.where(is_next, said[:, _TOKENS + number], token)
            fits = (columns.tokens == token[:, None]) & is_next[:, None] & (columns.bits == bits[:, None]).all(-1)
            at = torch.where(fits, places, -1).amax(1)
            is_found, at = at >= 0, at.clamp(min=0)[:, None]
            slot = torch.where(is_found, columns.slots.gather(1, at)[:, 0], slot)
            bits = bits | self._own[slot]
            depth, walked = depth + is_found, walked + is_found
            score = torch.where(is_found, columns.scores.gather(1, at)[:, 0], score)
        return Goal(said[:, _COUNT] > 0, walked == said[:, _LENGTH], bits, slot, depth, score, token)


def own_bit(slots: Tensor) -> Tensor:
    """Of pending nodes, among what a node sees: int64 [..] to [.., WORDS]"""
    words = torch.arange(WORDS, device=slots.device)
    return (words == (slots // 64)[..., None]).long() << (slots % 64)[..., None]
