"""Chooses the nodes of the next draft step by operations on tensors of fixed shapes; the host reads no value.

`NodeSelection` makes the same choice as `drafters/_tree_expander.py` and `drafters/_model_drafter.py`, for all texts of
a batch at once: path scores are float64, children are in the order of their parents and proposals, and sorts are
stable, so equal scores keep their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.logits import stable_top_k
from outpace.core.multi_step import MIN_COVERAGE, max_open_nodes
from outpace.core.noise import gumbel_from_words
from outpace.models.llama.cuda.captures import WORDS

_NONE = float("-inf")
StepInputs = dict[str, Tensor]


def own_bit(slots: Tensor) -> Tensor:
    """Return the bit of each pending node in a visibility mask: int64 [..] to [.., WORDS]"""
    words = torch.arange(WORDS, device=slots.device)
    return (words == (slots // 64)[..., None]).long() << (slots % 64)[..., None]


class StepBucket(NamedTuple):
    """The bucket of a graph: texts, nodes per step and text, steps, and proposals per node."""

    batch: int
    width: int
    steps: int
    num_proposals: int

    @property
    def taken(self) -> int:
        """Slots that the steps after the first may use."""
        return self.width * (self.steps - 1)

    @property
    def opened(self) -> int:
        """Maximum number of useful open nodes."""
        return max_open_nodes(self.width, self.steps)

    @property
    def columns(self) -> int:
        """Numbers per expanded node in the results: its origin, its token, its proposals and their values."""
        return 2 + 2 * self.num_proposals


class StepNodes(NamedTuple):
    """The nodes of one step, [batch, width] each; `ok` is False for rows without a node.

    `bits` [.., WORDS]: the pending nodes that it sees, itself included. `origin`: the number of the open node that it
    is; after all of these, the number of the expanded node above it.
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
    """The nodes of each text that may be expanded: open nodes, then children of each step's nodes."""

    def __init__(self, bucket: StepBucket, inputs: StepInputs) -> None:
        self._bucket, self._inputs = bucket, inputs
        batch, opened = bucket.batch, bucket.opened
        self._spare = opened + (bucket.steps - 1) * bucket.width**2  # a column for no node
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

    def first(self) -> StepNodes:
        """Return the nodes of the first step, which have logits already."""
        inputs = self._inputs
        depths = inputs["first_depths"]
        place = torch.arange(self._bucket.width, device=depths.device)
        ok = place < inputs["first_count"][:, None]
        scores = _floats(inputs["first_scores"])
        return StepNodes(ok, scores, torch.zeros_like(depths), depths, inputs["first_bits"], torch.zeros_like(depths))

    def attach(self, step: int, nodes: StepNodes, tokens: Tensor, values: Tensor) -> None:
        """Add the best children of a step's nodes from the proposals below each and their values, [batch, width,
        num_proposals] both."""
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
        self._scores[:, mine] = capped.masked_fill(dropped, _NONE)
        self._tokens[:, mine] = tokens[..., :width].flatten(1).gather(1, order)
        self._depths[:, mine] = depths
        self._bits[:, mine] = nodes.bits.gather(1, parent[..., None].expand(-1, -1, WORDS))
        self._origin[:, mine] = parent + (self._bucket.opened + step * width)

    def best(self, slots: Tensor) -> StepNodes:
        """Choose the best unexpanded nodes, in tree order, as the pending nodes `slots` [batch, width]."""
        width, inputs = self._bucket.width, self._inputs
        scores, floor = self._scores, _floats(inputs["floor"])
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        ranked, order = ranked[:, :width], order[:, :width]
        ok = (ranked > _NONE) & (ranked >= floor[:, None])
        ok = ok & (torch.arange(width, device=order.device) < inputs["width"][:, None])
        ok = ok & (self._num_nodes < inputs["most_nodes"])[:, None]
        at = order.masked_fill(~ok, self._spare).sort(dim=1).values
        ok, scores = at < self._spare, self._scores.gather(1, at)
        self._scores.scatter_(1, at, torch.full_like(scores, _NONE))
        above = self._bits.gather(1, at[..., None].expand(-1, -1, WORDS))
        chosen = (self._tokens.gather(1, at), self._depths.gather(1, at))
        return StepNodes(ok, scores, *chosen, above | own_bit(slots), self._origin.gather(1, at))

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
