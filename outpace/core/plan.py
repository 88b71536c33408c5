"""What fits on which devices, what a pass over it must cost at least, and which method pays there: by formulas alone.

A pass must move its weights and its keys and values once, and must do two operations a weight and row; it takes the
longer of both, by the devices' stated rates. Nothing here is measured, and nothing below these times is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outpace.core.arrays import next_power_of_two
from outpace.core.theory import BatchCost, card_limit, expected_tokens, pearl_speedup, speedup

GIB = 1 << 30
WORK = 1.5 * GIB  # of each device: driver, libraries, the buffers of captured passes
MOST_NODES = 64
_LONGEST = 1 << 24  # tokens of context that are considered
SPLITS = (1, 2, 4, 8)  # devices that one target's layers may be spread over


class DeviceSpec(NamedTuple):
    """A device: bytes of memory, bytes and operations a second; or several that share the work without loss."""

    name: str
    memory: float
    bandwidth: float
    flops: float

    def times(self, count: int) -> DeviceSpec:
        """So many of them."""
        name = self.name if count == 1 else f"{count} x {self.name}"
        return DeviceSpec(name, count * self.memory, count * self.bandwidth, count * self.flops)


def _machine(name: str, gib: float, gigabytes: float, teraflops: float) -> DeviceSpec:
    return DeviceSpec(name, gib * GIB, gigabytes * 1e9, teraflops * 1e12)


# Makers' figures: memory, its bandwidth, dense bfloat16 products summed in float32.
DEVICES = {
    machine.name: machine
    for machine in (
        _machine("H100", 79.6, 3350, 989),
        _machine("H200", 140.4, 4800, 989),
        _machine("A100", 79.2, 2039, 312),
        _machine("L40S", 44.9, 864, 362),
        _machine("RTX 4090", 24.0, 1008, 165),
        _machine("RTX 3090", 24.0, 936, 71),
    )
}


class ModelSize(NamedTuple):
    """A model: weights that it holds and those that a pass reads (numbers), bytes of each, bytes of keys and values a
    token, and the most tokens of a text."""

    name: str
    held: int
    read: int
    weight_bytes: float
    token_bytes: int
    max_positions: int = _LONGEST

    def batch(self, machine: DeviceSpec, context: int) -> BatchCost:
        """What decides its passes over texts of so many tokens."""
        moved, kv = self.read * self.weight_bytes, context * self.token_bytes
        return BatchCost(moved, kv, self.read, machine.bandwidth, machine.flops)

    def needs(self, context: int, requests: int, is_pooled: bool = True) -> float:
        """Bytes of weights, keys and values; `is_pooled`: by captured passes on one device, where rows and slots go by
        powers of two, and a tree stands behind each text."""
        rows, slots = (
            (next_power_of_two(requests), next_power_of_two(context + MOST_NODES)) if is_pooled else (requests, context)
        )
        return self.held * self.weight_bytes + rows * slots * self.token_bytes


class Placement(NamedTuple):
    """Who lies where: each device's bytes, of what each has, and over how many devices the target is spread."""

    name: str
    needed: tuple[float, ...]
    memory: float
    split: int
    is_apart: bool  # the draft has a device of its own

    @property
    def fits(self) -> bool:
        return all(needed <= self.memory for needed in self.needed)


class MethodGain(NamedTuple):
    """What a method gives at best: `tokens` of a round in which `length` are drafted, and how many times as fast as
    plain decoding it is; CARD's is a bound."""

    method: str
    length: int
    tokens: float
    speedup: float


def placements(
    target: ModelSize, draft: ModelSize | None, machine: DeviceSpec, context: int, requests: int
) -> list[Placement]:
    """All that are worth asking for, the fewest devices first."""
    of_target = {split: target.needs(context, requests, split == 1) for split in SPLITS}
    of_draft = draft.needs(context, requests) if draft else 0.0
    found = []
    for split in SPLITS:
        spread = "on one device" if split == 1 else f"over {split} devices"
        shares = tuple([of_target[split] / split + WORK] * split)
        if draft is None:
            found.append(Placement(f"target {spread}", shares, machine.memory, split, False))
            continue
        both = (shares[0] + of_draft, *shares[1:])
        found.append(Placement(f"target {spread}, draft beside it", both, machine.memory, split, False))
        apart = (*shares, of_draft + WORK)
        found.append(Placement(f"target {spread}, draft on another", apart, machine.memory, split, True))
    return found


def most_context(target: ModelSize, draft: ModelSize | None, layout: Placement, requests: int) -> int:
    """Tokens of context for which a layout would still fit, up to the target's own; 0 where not even the weights do."""

    def fits(context: int) -> bool:
        needed = target.needs(context, requests, layout.split == 1) / layout.split + WORK
        beside = draft.needs(context, requests) if draft is not None and not layout.is_apart else 0.0
        return needed + beside <= layout.memory

    least, beyond = 0, target.max_positions + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least


def passes(size: ModelSize, machine: DeviceSpec, context: int, requests: int, nodes: Sequence[int]) -> list[float]:
    """Seconds of a pass over so many nodes a request, at least."""
    batch = size.batch(machine, context)
    return [batch.pass_seconds(count, requests) for count in nodes]


def method_gains(
    target: Sequence[float], draft: Sequence[float], acceptance: float, width: int, is_apart: bool
) -> list[MethodGain]:
    """What the methods give at best, plain decoding first. `target`, `draft`: seconds of passes over 1, 2, ... nodes.

    In turn, draft steps and passes add up. Beside one another on one device they share its memory's bandwidth, so they
    add up too, and nothing is gained over drafting in turn; on a device of its own the drafter costs the target
    nothing.
    """
    cost = draft[0] / target[0]
    lengths = range(1, len(target))
    tokens = [expected_tokens(acceptance, length) for length in lengths]
    verify = [target[length] / target[0] for length in lengths]
    found = [MethodGain("autoregressive", 0, 1.0, 1.0)]
    in_turn = [speedup(all_, n, cost, v) for all_, n, v in zip(tokens, lengths, verify, strict=True)]
    found.append(_best("speculative", lengths, tokens, in_turn))
    if is_apart:
        slow_down = draft[min(width, len(draft)) - 1] / draft[0]
        limits = [card_limit(all_, v, cost, slow_down) for all_, v in zip(tokens, verify, strict=True)]
        pearl = [pearl_speedup(acceptance, n, cost) for n in lengths]
        found += [_best("pearl", lengths, tokens, pearl), _best("card", lengths, tokens, limits)]
    return found


def best_method(found: Sequence[MethodGain]) -> str:
    """Which method pays. CARD's gain is a bound, and PEARL's, which drafts beside the target too, is what is sure:
    where drafting in turn lies between the two, both are named, for the hits decide."""
    gained = {gain.method: gain.speedup for gain in found}
    in_turn = gained.get("speculative", 0.0)
    if "card" in gained and max(in_turn, gained["card"]) > 1.0:
        if gained["pearl"] > in_turn:
            return "card"
        return "speculative or card" if gained["card"] > in_turn else "speculative"
    return "speculative" if in_turn > 1.0 else "autoregressive"


def _best(method: str, lengths: Sequence[int], tokens: Sequence[float], gained: Sequence[float]) -> MethodGain:
    place = max(range(len(lengths)), key=lambda number: gained[number])
    return MethodGain(method, lengths[place], tokens[place], gained[place])
