"""What a drafter chooses between two steps, as operations on tensors of fixed shapes: no value is read by the host.

The same choice as `drafters/_tree_expander.py` and `drafters/model.py` make, for all texts of a batch at once: path scores in
float64, children in the order of their parents and proposals, ranked by stable sorts: equal ones keep their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.logits import stable_top_k
from outpace.core.multi_step import MAX_UPDATE_TOKENS, MIN_COVERAGE, RootUpdate, max_open_nodes
from outpace.core.noise import gumbel_from_words
from outpace.models.llama.cuda.captures import MOST_PENDING, WORDS

_COUNT, _SLOT, _SCORE, _LENGTH, _TOKENS = range(5)  # columns; then the tokens, and a sum over all of it
_COLUMNS = _TOKENS + MAX_UPDATE_TOKENS
_FACTOR = 0x5851F42D4C957F2D  # odd; its powers, as 64 bits hold them, weigh the numbers
_FACTORS = np.full(_COLUMNS, _FACTOR, np.int64).cumprod()


class RootMailbox:
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


class RootTarget(NamedTuple):
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


class NodeColumns(NamedTuple):
    """The nodes that a graph knows of beside those that were pending before: [texts, columns] each, `bits` of their
    parents [.., WORDS], `slots` -1 where a node is not expanded."""

    tokens: Tensor
    bits: Tensor
    slots: Tensor
    scores: Tensor


class RootTracker:
    """Follows what the host says of each text."""

    def __init__(self, box: RootMailbox, pending_bits: Tensor, depths: Tensor) -> None:
        """Of the nodes that are pending before the steps: what they see [texts, pending, WORDS], their depths."""
        self._box, self._bits, self._depths = box, pending_bits, depths
        self._said = torch.zeros_like(box.device)
        self._own = own_bit(torch.arange(MOST_PENDING, device=depths.device))
        self._factors = torch.full((_COLUMNS,), _FACTOR, device=depths.device).cumprod(0)

    def goal(self, columns: NodeColumns) -> RootTarget:
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
        return RootTarget(said[:, _COUNT] > 0, walked == said[:, _LENGTH], bits, slot, depth, score, token)


def own_bit(slots: Tensor) -> Tensor:
    """Of pending nodes, among what a node sees: int64 [..] to [.., WORDS]"""
    words = torch.arange(WORDS, device=slots.device)
    return (words == (slots // 64)[..., None]).long() << (slots % 64)[..., None]


_NONE = float("-inf")
Given = dict[str, Tensor]


class StepBucket(NamedTuple):
    """The bucket of a graph: texts, nodes a step and text, steps, and proposals a node."""

    batch: int
    width: int
    steps: int
    offered: int
    is_told: bool = False  # meanwhile where the target went

    @property
    def taken(self) -> int:
        """Slots that steps behind the first can take."""
        return self.width * (self.steps - 1)

    @property
    def opened(self) -> int:
        """Open nodes that can be of use."""
        return max_open_nodes(self.width, self.steps, self.is_told)

    @property
    def columns(self) -> int:
        """Of one expanded node's results: where it comes from, its token, its proposals and their values."""
        return 2 + 2 * self.offered

    @property
    def below(self) -> int:
        """From here on an origin is a pending node, below which the target wrote what no tree had."""
        return self.opened + self.steps * self.width


class StepNodes(NamedTuple):
    """The nodes of one step, [batch, width] each; `ok` where there is one. `bits` [.., WORDS]: the pending nodes that
    it sees, itself among them. `origin`: the open node that it is, behind these the expanded one above, or behind these
    the pending one above, see `StepBucket.below`."""

    ok: Tensor
    scores: Tensor
    tokens: Tensor
    depths: Tensor
    bits: Tensor
    origin: Tensor


def proposals(
    logits: Tensor, temperature: Tensor, words: Tensor | None, has_noise: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The best tokens of each row [rows, vocab] on the rule's scale, and their values there: int64 and float32
    [rows, count]. `words` [rows, 2]: keys of the noise, for the rows that have it; None: none has."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = torch.log_softmax(wide / temperature.to(wide.dtype)[:, None], dim=-1)
    if words is not None:
        noisy = scale + gumbel_from_words(words, scale.shape[-1])
        scale = torch.where(has_noise[:, None], noisy, scale)
    return stable_top_k(scale, count)


class NodeSelection:
    """The nodes that may be expanded, of each text: those that were open, then the children of each step's nodes, then
    for each step what the target wrote."""

    def __init__(self, sizes: StepBucket, given: Given, course: RootTracker | None = None) -> None:
        self._sizes, self._given, self._course = sizes, given, course
        batch, opened = sizes.batch, sizes.opened
        self._written = opened + (sizes.steps - 1) * sizes.width**2
        self._spare = self._written + (sizes.steps - 1) * sizes.is_told  # a column that stands for no node
        device = given["nodes"].device
        table = torch.zeros(batch, self._spare + 1, dtype=torch.int64, device=device)
        self._scores = torch.full((batch, self._spare + 1), _NONE, dtype=torch.float64, device=device)
        self._tokens, self._depths, self._origin = table, table.clone(), table.clone()
        self._bits = torch.zeros(batch, self._spare + 1, WORDS, dtype=torch.int64, device=device)
        place = torch.arange(opened, device=device)
        there = place < given["open_count"][:, None]
        self._scores[:, :opened] = _numbers(given["open_scores"]).masked_fill(~there, _NONE)
        self._tokens[:, :opened] = given["open_tokens"]
        self._depths[:, :opened] = given["open_depths"]
        self._bits[:, :opened] = given["open_bits"]
        self._origin[:, :opened] = place
        self._standing = given["nodes"].clone()  # nodes of each tree
        if course is not None:  # of expanded nodes too; where these are
            self._paths, self._slots = self._scores.clone(), torch.full_like(table, -1)

    def first(self) -> StepNodes:
        """The nodes of the first step, which are scored already."""
        given = self._given
        depths = given["first_depths"]
        place = torch.arange(self._sizes.width, device=depths.device)
        ok = place < given["first_count"][:, None]
        scores = _numbers(given["first_scores"])
        return StepNodes(ok, scores, torch.zeros_like(depths), depths, given["first_bits"], torch.zeros_like(depths))

    def attach_children(self, step: int, nodes: StepNodes, tokens: Tensor, values: Tensor) -> None:
        """The best children of a step's nodes, of the proposals and values [batch, width, offered] below each."""
        width, given = self._sizes.width, self._given
        above = nodes.scores[..., None]
        place = torch.arange(width, device=tokens.device)
        there = nodes.ok[..., None] & (place < given["width"][:, None, None]) & (values[..., :width] > _NONE)
        scores = (above + self._log_chances(values)[..., :width]).masked_fill(~there, _NONE).flatten(1)
        ranked, order = scores.sort(dim=1, descending=True, stable=True)  # [batch, width * width]
        parent = order // width
        room = given["most_nodes"] - self._standing
        share = (room.double() * _numbers(given["share"])).long()
        most = torch.minimum(room, torch.maximum(2 * given["width"], share)).clamp(min=0)
        self._standing += torch.minimum((ranked > _NONE).sum(1), most)
        depths = nodes.depths.gather(1, parent) + 1
        dropped = torch.arange(width * width, device=tokens.device) >= most[:, None]
        dropped = dropped | (depths > given["deepest"][:, None])
        mine = slice(start := self._sizes.opened + step * width**2, start + width**2)
        capped = torch.minimum(ranked, nodes.scores.gather(1, parent))
        self._scores[:, mine] = kept = capped.masked_fill(dropped, _NONE)
        if self._course is not None:
            self._paths[:, mine] = kept
        self._tokens[:, mine] = tokens[..., :width].flatten(1).gather(1, order)
        self._depths[:, mine] = depths
        self._bits[:, mine] = nodes.bits.gather(1, parent[..., None].expand(-1, -1, WORDS))
        self._origin[:, mine] = parent + (self._sizes.opened + step * width)

    def best(self, step: int, slots: Tensor) -> StepNodes:
        """The best nodes that are not expanded yet, in the order of the tree; they are to be the pending nodes `slots`
        [batch, width]. Where the target went elsewhere, those on the way to its new root or below it."""
        width, given = self._sizes.width, self._given
        scores, floor = self._scores, _numbers(given["floor"])
        if self._course is not None:
            goal = self._course.goal(NodeColumns(self._tokens, self._bits, self._slots, self._paths))
            scores = self._towards(goal, step)
            floor = torch.where(goal.is_told, floor + goal.score, floor)  # chances are those below the new root
            fewer = torch.minimum(self._standing, (scores > _NONE).sum(1))  # its tree is a part of what stood
            self._standing = torch.where(goal.is_told, fewer, self._standing)
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        ranked, order = ranked[:, :width], order[:, :width]
        ok = (ranked > _NONE) & (ranked >= floor[:, None])
        ok = ok & (torch.arange(width, device=order.device) < given["width"][:, None])
        ok = ok & (self._standing < given["most_nodes"])[:, None]
        at = order.masked_fill(~ok, self._spare).sort(dim=1).values
        ok, scores = at < self._spare, self._scores.gather(1, at)
        self._scores.scatter_(1, at, torch.full_like(scores, _NONE))
        if self._course is not None:
            self._slots.scatter_(1, at, slots.masked_fill(~ok, -1))
        above = self._bits.gather(1, at[..., None].expand(-1, -1, WORDS))
        of = (self._tokens.gather(1, at), self._depths.gather(1, at))
        return StepNodes(ok, scores, *of, above | own_bit(slots), self._origin.gather(1, at))

    def _towards(self, goal: RootTarget, step: int) -> Tensor:
        """The scores of what lies below the new root alone, or of the next token on the way there, which has a column
        of its own."""
        mine, depth = self._written + step, goal.depth + 1
        is_next = goal.is_told & ~goal.is_there & (depth <= self._given["deepest"])
        self._tokens[:, mine], self._bits[:, mine], self._depths[:, mine] = goal.token, goal.bits, depth
        self._origin[:, mine] = self._sizes.below + goal.slot
        certain = torch.zeros_like(goal.score).masked_fill(~is_next, _NONE)
        self._scores[:, mine] = self._paths[:, mine] = certain
        is_below = (self._bits & goal.bits[:, None] == goal.bits[:, None]).all(-1) & goal.is_there[:, None]
        is_below[:, mine] = is_next
        return self._scores.masked_fill(goal.is_told[:, None] & ~is_below, _NONE)

    def _log_chances(self, values: Tensor) -> Tensor:
        """As `drafters/_chance.ChoiceModel.log_chances`."""
        given = {name: _numbers(self._given[name])[:, None, None] for name in ("trust", "coverage", "open")}
        below = (values - values[..., :1]) / given["trust"]
        left = (1.0 - values.exp().sum(-1, keepdim=True)).clamp(min=0.0)
        covered = (1.0 - given["open"] * left).clamp(min=MIN_COVERAGE)
        covered = torch.where(self._given["has_shares"][:, None, None] > 0, covered, given["coverage"])
        return below + (covered.log() - below.exp().sum(-1, keepdim=True).log())


def _numbers(bits: Tensor) -> Tensor:
    """float64, which came by its bits."""
    return bits.view(torch.float64)
