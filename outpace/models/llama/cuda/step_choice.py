"""Chooses the nodes of the next draft step by operations on tensors of fixed shapes; the host reads no value.

`NodeSelection` makes the same choice as `drafters/_tree_expander.py` and `drafters/model.py`, for all texts of a batch
at once: path scores are float64, children are in the order of their parents and proposals, and sorts are stable, so
equal scores keep their order.

`RootMailbox` and `RootTracker` let the steps follow the target while they run: CARD's correction (arXiv:2508.04462,
query-and-correct) without ending the graph. A copy from pinned memory is part of the graph, so nothing waits for it; a
message that was read while the host wrote it fails its checksum and is ignored.
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

_COUNT, _SLOT, _SCORE, _LENGTH, _TOKENS = range(5)  # columns of a message; tokens and a checksum follow
_COLUMNS = _TOKENS + MAX_UPDATE_TOKENS
_FACTOR = 0x5851F42D4C957F2D  # odd; its powers, modulo 2^64, are the checksum's weights
_FACTORS = np.full(_COLUMNS, _FACTOR, np.int64).cumprod()
_NONE = float("-inf")
StepInputs = dict[str, Tensor]


class RootMailbox:
    """The last root update of each text, on the host and on the device: int64 [texts, numbers]."""

    def __init__(self, texts: int, last_token: int, device: torch.device) -> None:
        """`last_token`: the highest token id of the model."""
        self._host = torch.zeros(texts, _COLUMNS + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers, self._last_token = self._host.numpy(), last_token
        self.device = torch.zeros(texts, _COLUMNS + 1, dtype=torch.int64, device=device)
        self._count = 0

    def clear(self) -> None:
        """Remove all updates."""
        self._numbers[:] = 0

    def write(self, text: int, update: RootUpdate) -> None:
        """Replace the update of a text."""
        self._count += 1
        row = np.zeros(_COLUMNS + 1, np.int64)
        row[_COUNT], row[_SLOT], row[_LENGTH] = self._count, update.slot, len(update.tokens)
        row[_SCORE : _SCORE + 1].view(np.float64)[0] = update.score
        row[_TOKENS : _TOKENS + len(update.tokens)] = [min(token, self._last_token) for token in update.tokens]
        row[-1] = (row[:-1] * _FACTORS).sum()
        self._numbers[text] = row

    def fetch(self) -> None:
        """Captured: copy the host's updates to the device."""
        self.device.copy_(self._host, non_blocking=True)


class RootTarget(NamedTuple):
    """The part of each tree that a step may expand after an update: nodes below the new root or, if that is not
    expanded yet, the next token on the way there.

    `has_moved` [texts]: there was an update; `is_there` [texts]: the new root is expanded. `bits` [texts, WORDS],
    `slot`, `depth` and `score` [texts]: the last expanded node on the way; `token` [texts]: the next token below it.
    """

    has_moved: Tensor
    is_there: Tensor
    bits: Tensor
    slot: Tensor
    depth: Tensor
    score: Tensor
    token: Tensor


class NodeColumns(NamedTuple):
    """The nodes that a graph knows besides those that were pending before: [texts, columns] each.

    `bits` [.., WORDS] are those of their parents; `slots` is -1 for a node that is not expanded.
    """

    tokens: Tensor
    bits: Tensor
    slots: Tensor
    scores: Tensor


class RootTracker:
    """Follows the root updates of each text."""

    def __init__(self, mailbox: RootMailbox, pending_bits: Tensor, depths: Tensor) -> None:
        """Take what the nodes that were pending before see, [texts, pending, WORDS], and their depths."""
        self._mailbox, self._bits, self._depths = mailbox, pending_bits, depths
        self._update = torch.zeros_like(mailbox.device)
        self._own = own_bit(torch.arange(MOST_PENDING, device=depths.device))
        self._factors = torch.full((_COLUMNS,), _FACTOR, device=depths.device).cumprod(0)

    def target(self, columns: NodeColumns) -> RootTarget:
        """Fetch the updates and walk from the node that each names down the expanded nodes."""
        self._mailbox.fetch()
        fetched = self._mailbox.device
        is_whole = (fetched[:, :-1] * self._factors).sum(1) == fetched[:, -1]
        self._update = update = torch.where(is_whole[:, None], fetched, self._update)
        slot = update[:, _SLOT]
        bits = self._bits.gather(1, slot[:, None, None].expand(-1, 1, WORDS))[:, 0]
        depth = self._depths.gather(1, slot[:, None])[:, 0]
        score = update[:, _SCORE].contiguous().view(torch.float64)
        walked, token = torch.zeros_like(slot), torch.zeros_like(slot)
        places = torch.arange(columns.tokens.shape[1], device=slot.device).where(columns.slots >= 0, -1)  # expanded
        for number in range(MAX_UPDATE_TOKENS):
            is_next = (walked == number) & (number < update[:, _LENGTH])
            token = torch.where(is_next, update[:, _TOKENS + number], token)
            matches = (columns.tokens == token[:, None]) & is_next[:, None] & (columns.bits == bits[:, None]).all(-1)
            at = torch.where(matches, places, -1).amax(1)
            is_found, at = at >= 0, at.clamp(min=0)[:, None]
            slot = torch.where(is_found, columns.slots.gather(1, at)[:, 0], slot)
            bits = bits | self._own[slot]
            depth, walked = depth + is_found, walked + is_found
            score = torch.where(is_found, columns.scores.gather(1, at)[:, 0], score)
        return RootTarget(update[:, _COUNT] > 0, walked == update[:, _LENGTH], bits, slot, depth, score, token)


def own_bit(slots: Tensor) -> Tensor:
    """Return the bit of each pending node in a visibility mask: int64 [..] to [.., WORDS]"""
    words = torch.arange(WORDS, device=slots.device)
    return (words == (slots // 64)[..., None]).long() << (slots % 64)[..., None]


class StepBucket(NamedTuple):
    """The bucket of a graph: texts, nodes per step and text, steps, and proposals per node."""

    batch: int
    width: int
    steps: int
    offered: int
    follows_root: bool = False  # whether root updates arrive while the steps run

    @property
    def taken(self) -> int:
        """Slots that the steps after the first may use."""
        return self.width * (self.steps - 1)

    @property
    def opened(self) -> int:
        """Maximum number of useful open nodes."""
        return max_open_nodes(self.width, self.steps, self.follows_root)

    @property
    def columns(self) -> int:
        """Numbers per expanded node in the results: its origin, its token, its proposals and their values."""
        return 2 + 2 * self.offered

    @property
    def below(self) -> int:
        """Origins from here on are pending nodes below which the target wrote a token that no tree had."""
        return self.opened + self.steps * self.width


class StepNodes(NamedTuple):
    """The nodes of one step, [batch, width] each; `ok` is False for rows without a node.

    `bits` [.., WORDS]: the pending nodes that it sees, itself included. `origin`: the number of the open node that it
    is; after all of these, the number of the expanded node above it; after these, the pending node above it (see
    `StepBucket.below`).
    """

    ok: Tensor
    scores: Tensor
    tokens: Tensor
    depths: Tensor
    bits: Tensor
    origin: Tensor


def proposals(
    logits: Tensor, temperature: Tensor, words: Tensor | None, has_noise: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the best tokens of each row [rows, vocab] and their values on the rule's scale: [rows, count] both

    `words` [rows, 2]: the noise keys of rows with noise; None: no row has any.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = torch.log_softmax(wide / temperature.to(wide.dtype)[:, None], dim=-1)
    if words is not None:
        noisy = scale + gumbel_from_words(words, scale.shape[-1])
        scale = torch.where(has_noise[:, None], noisy, scale)
    return stable_top_k(scale, count)


class NodeSelection:
    """The nodes of each text that may be expanded: open nodes, then children of each step's nodes, then, for each step,
    a token that the target wrote."""

    def __init__(self, bucket: StepBucket, inputs: StepInputs, tracker: RootTracker | None = None) -> None:
        self._bucket, self._inputs, self._tracker = bucket, inputs, tracker
        batch, opened = bucket.batch, bucket.opened
        self._written = opened + (bucket.steps - 1) * bucket.width**2
        self._spare = self._written + (bucket.steps - 1) * bucket.follows_root  # a column for no node
        device = inputs["nodes"].device
        table = torch.zeros(batch, self._spare + 1, dtype=torch.int64, device=device)
        self._scores = torch.full((batch, self._spare + 1), _NONE, dtype=torch.float64, device=device)
        self._tokens, self._depths, self._origin = table, table.clone(), table.clone()
        self._bits = torch.zeros(batch, self._spare + 1, WORDS, dtype=torch.int64, device=device)
        place = torch.arange(opened, device=device)
        exists = place < inputs["open_count"][:, None]
        self._scores[:, :opened] = _floats(inputs["open_scores"]).masked_fill(~exists, _NONE)
        self._tokens[:, :opened] = inputs["open_tokens"]
        self._depths[:, :opened] = inputs["open_depths"]
        self._bits[:, :opened] = inputs["open_bits"]
        self._origin[:, :opened] = place
        self._num_nodes = inputs["nodes"].clone()  # of each tree
        if tracker is not None:  # scores of expanded nodes too, and their slots
            self._paths, self._slots = self._scores.clone(), torch.full_like(table, -1)

    def first(self) -> StepNodes:
        """Return the nodes of the first step, which have logits already."""
        inputs = self._inputs
        depths = inputs["first_depths"]
        place = torch.arange(self._bucket.width, device=depths.device)
        ok = place < inputs["first_count"][:, None]
        scores = _floats(inputs["first_scores"])
        return StepNodes(ok, scores, torch.zeros_like(depths), depths, inputs["first_bits"], torch.zeros_like(depths))

    def attach(self, step: int, nodes: StepNodes, tokens: Tensor, values: Tensor) -> None:
        """Add the best children of a step's nodes from the proposals and values [batch, width, offered] below each."""
        width, inputs = self._bucket.width, self._inputs
        above = nodes.scores[..., None]
        place = torch.arange(width, device=tokens.device)
        exists = nodes.ok[..., None] & (place < inputs["width"][:, None, None]) & (values[..., :width] > _NONE)
        scores = (above + self._log_chances(values)[..., :width]).masked_fill(~exists, _NONE).flatten(1)
        ranked, order = scores.sort(dim=1, descending=True, stable=True)  # [batch, width * width]
        parent = order // width
        free = inputs["most_nodes"] - self._num_nodes
        share = (free.double() * _floats(inputs["share"])).long()
        most = torch.minimum(free, torch.maximum(2 * inputs["width"], share)).clamp(min=0)
        self._num_nodes += torch.minimum((ranked > _NONE).sum(1), most)
        depths = nodes.depths.gather(1, parent) + 1
        dropped = torch.arange(width * width, device=tokens.device) >= most[:, None]
        dropped = dropped | (depths > inputs["deepest"][:, None])
        mine = slice(start := self._bucket.opened + step * width**2, start + width**2)
        capped = torch.minimum(ranked, nodes.scores.gather(1, parent))
        self._scores[:, mine] = kept = capped.masked_fill(dropped, _NONE)
        if self._tracker is not None:
            self._paths[:, mine] = kept
        self._tokens[:, mine] = tokens[..., :width].flatten(1).gather(1, order)
        self._depths[:, mine] = depths
        self._bits[:, mine] = nodes.bits.gather(1, parent[..., None].expand(-1, -1, WORDS))
        self._origin[:, mine] = parent + (self._bucket.opened + step * width)

    def best(self, step: int, slots: Tensor) -> StepNodes:
        """Choose the best nodes that are not expanded yet, in tree order, as the pending nodes `slots` [batch, width].

        After a root update, only nodes on the way to the new root or below it are chosen.
        """
        width, inputs = self._bucket.width, self._inputs
        scores, floor = self._scores, _floats(inputs["floor"])
        if self._tracker is not None:
            target = self._tracker.target(NodeColumns(self._tokens, self._bits, self._slots, self._paths))
            scores = self._towards(target, step)
            floor = torch.where(target.has_moved, floor + target.score, floor)  # chances are relative to the new root
            fewer = torch.minimum(self._num_nodes, (scores > _NONE).sum(1))  # its tree is a part of the old one
            self._num_nodes = torch.where(target.has_moved, fewer, self._num_nodes)
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        ranked, order = ranked[:, :width], order[:, :width]
        ok = (ranked > _NONE) & (ranked >= floor[:, None])
        ok = ok & (torch.arange(width, device=order.device) < inputs["width"][:, None])
        ok = ok & (self._num_nodes < inputs["most_nodes"])[:, None]
        at = order.masked_fill(~ok, self._spare).sort(dim=1).values
        ok, scores = at < self._spare, self._scores.gather(1, at)
        self._scores.scatter_(1, at, torch.full_like(scores, _NONE))
        if self._tracker is not None:
            self._slots.scatter_(1, at, slots.masked_fill(~ok, -1))
        above = self._bits.gather(1, at[..., None].expand(-1, -1, WORDS))
        chosen = (self._tokens.gather(1, at), self._depths.gather(1, at))
        return StepNodes(ok, scores, *chosen, above | own_bit(slots), self._origin.gather(1, at))

    def _towards(self, target: RootTarget, step: int) -> Tensor:
        """Return the scores with only nodes below the new root left, or the next token on the way there.

        That token has a column of its own.
        """
        mine, depth = self._written + step, target.depth + 1
        is_next = target.has_moved & ~target.is_there & (depth <= self._inputs["deepest"])
        self._tokens[:, mine], self._bits[:, mine], self._depths[:, mine] = target.token, target.bits, depth
        self._origin[:, mine] = self._bucket.below + target.slot
        certain = torch.zeros_like(target.score).masked_fill(~is_next, _NONE)
        self._scores[:, mine] = self._paths[:, mine] = certain
        is_below = (self._bits & target.bits[:, None] == target.bits[:, None]).all(-1) & target.is_there[:, None]
        is_below[:, mine] = is_next
        return self._scores.masked_fill(target.has_moved[:, None] & ~is_below, _NONE)

    def _log_chances(self, values: Tensor) -> Tensor:
        """Compute log chances as `log_chances` in `drafters/_calibration.py` does."""
        trust, coverage, open_share = (
            _floats(self._inputs[name])[:, None, None] for name in ("trust", "coverage", "open")
        )
        below = (values - values[..., :1]) / trust
        left = (1.0 - values.exp().sum(-1, keepdim=True)).clamp(min=0.0)
        covered = (1.0 - open_share * left).clamp(min=MIN_COVERAGE)
        covered = torch.where(self._inputs["has_shares"][:, None, None] > 0, covered, coverage)
        return below + (covered.log() - below.exp().sum(-1, keepdim=True).log())


def _floats(bits: Tensor) -> Tensor:
    """Reinterpret int64 bits as float64."""
    return bits.view(torch.float64)
