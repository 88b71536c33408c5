"""Shares a model's layers among the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outpace.core.errors import UserError
from outpace.models.options import AUTO

_WEIGHTS = 0.8  # share of the free memory that `auto` fills with weights; the rest is for keys and values
_GIB = 1 << 30


class RankFacts(NamedTuple):
    """What `share_layers` knows about a rank: bytes of free memory, and seconds of one layer for one row."""

    free: int
    layer_seconds: float


def share_layers(plan: str, num_layers: int, ranks: Sequence[RankFacts], layer_bytes: int, end_bytes: int) -> list[int]:
    """Return the number of layers of each rank, by a plan as in "12,10,8" or "auto".

    `auto` gives each rank layers in proportion to its speed, but no more than fit in its memory. `end_bytes` is the
    size of the embedding and the output layer, which rank 0 holds too. UserError for a plan that does not fit the model
    or the ranks.
    """
    if len(ranks) > num_layers:
        raise UserError(f"the model has {num_layers} layers, which {len(ranks)} ranks cannot share: start fewer")
    if plan != AUTO:
        counts = [int(count) for count in plan.split(",")]
        if len(counts) != len(ranks) or sum(counts) != num_layers:
            raise UserError(
                f"pp_plan is {plan}, which names {sum(counts)} layers for {len(counts)} ranks: the model has"
                f" {num_layers} layers, and {len(ranks)} ranks were started"
            )
        return counts
    max_layers = [
        int(_WEIGHTS * rank.free - (0 if number else end_bytes)) // layer_bytes for number, rank in enumerate(ranks)
    ]
    if sum(max_layers) < num_layers or min(max_layers) < 1:
        held = " + ".join(str(max(0, count)) for count in max_layers)
        raise UserError(
            f"the ranks have memory for {held} of the {num_layers} layers of {layer_bytes / _GIB:.2f} GiB: start more"
            " ranks, or choose a smaller dtype"
        )
    counts = [1] * len(ranks)
    speeds = [1.0 / max(rank.layer_seconds, 1e-9) for rank in ranks]
    for _ in range(num_layers - len(ranks)):
        open_ranks = [rank for rank in range(len(ranks)) if counts[rank] < max_layers[rank]]
        counts[min(open_ranks, key=lambda rank: (counts[rank] + 1) / speeds[rank])] += 1
    return counts


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """Return the numbers of the layers of each rank."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
