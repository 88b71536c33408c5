"""Run policies over worlds, and summarise times, energies and objectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outpace.core.errors import UserError, check_whole, unknown
from outpace.studies.edge.policies import ASSOCIATIONS, SHARES, Associate, Divide
from outpace.studies.edge.problem import Assignment, DeviceFigures, SlotProblem
from outpace.studies.edge.settings import SWEPT, EdgeSettings
from outpace.studies.edge.world import EdgeWorld, make_world

BASELINE = "max-sinr/equal"
ALONE_POLICY = "alone/equal"  # each device has both models
SERVER_ALONE = "server-alone"  # the servers write without drafts
BOUNDS = (ALONE_POLICY, SERVER_ALONE)
DEFAULT = (
    *BOUNDS,
    *(BASELINE, "random/equal", "max-compute/equal", "greedy/equal", "swap/equal", "move/equal"),
    *("max-sinr/optimal", "greedy/optimal", "swap/optimal", "move/optimal"),
)


@dataclass(frozen=True)
class EdgePolicy:
    """An association and shares. If `drafts` is False, the servers write alone and the devices only receive."""

    name: str
    associate: Associate
    divide: Divide
    drafts: bool = True

    def assign(self, problem: SlotProblem, rng: np.random.Generator) -> Assignment:
        return self.divide(problem, self.associate(problem, rng))


def find_policy(name: str) -> EdgePolicy:
    """Return a policy by its name, as in greedy/optimal."""
    if name == SERVER_ALONE:
        return replace(find_policy("greedy/equal"), name=name, drafts=False)
    first, slash, second = name.partition("/")
    if not slash:
        raise UserError(f"policy is {name!r}, it must be an association and shares, as in greedy/optimal")
    if first not in ASSOCIATIONS:
        raise unknown("association", first, ASSOCIATIONS)
    allowed = tuple(SHARES) if first != "alone" else ("equal",)  # a device alone shares nothing
    if second not in allowed:
        raise unknown(f"shares of the policy {name!r}", second, allowed)
    return EdgePolicy(name, ASSOCIATIONS[first], SHARES[second])


def run_policy(world: EdgeWorld, policy: EdgePolicy, seed: int = 0) -> DeviceFigures:
    """Run one policy through all slots of a world; queues and batteries carry over."""
    rng = np.random.default_rng(seed)
    queue, battery = np.zeros(world.settings.servers), world.battery
    rows = []
    for slot in range(world.settings.slots):
        known = world.problem(max(slot - world.settings.channel_age, 0), queue, battery)
        actual = world.problem(slot, queue, battery) if world.settings.channel_age else known
        if not policy.drafts:
            known, actual = known.without_drafts(), actual.without_drafts()
        chosen = policy.assign(known, rng)
        rows.append(actual.evaluate(chosen))
        battery = world.battery_after(battery, 1e3 * rows[-1].energy / rows[-1].time)
        queue = world.queue_after(queue, slot, chosen.server)
    return DeviceFigures(*(np.array(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True)
class PolicySummary:
    """The figures of one policy over all worlds; times in ms, energies in mJ, both per token."""

    policy: str
    time: float
    time_error: float  # half of the 95 % interval of the mean over worlds
    slowest: float  # 95th percentile of the time over devices and slots
    energy: float
    cost: float
    cut: float | None  # how far the objective is below the baseline's, as a fraction; None for bounds under `paper`
    cut_error: float
    faster_alone: float  # share of devices that would be faster alone
    out_of_reach: float  # share of devices without a server
    low_battery: tuple[float, float] | None  # time and energy of devices whose battery was below 20 % at the start
    high_battery: tuple[float, float] | None  # the same for batteries above 80 %


def compare(
    settings: EdgeSettings,
    policies: Sequence[EdgePolicy],
    num_worlds: int,
    seed: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[PolicySummary]:
    """Run all policies in the same worlds; `progress` is given the number of finished worlds."""
    check_whole("worlds", num_worlds, 1)
    worlds: list[EdgeWorld] = []
    runs: dict[str, list[DeviceFigures]] = {}
    wanted = {policy.name: policy for policy in (find_policy(BASELINE), find_policy(ALONE_POLICY), *policies)}
    for number in range(num_worlds):
        worlds.append(make_world(settings, seed + number))
        for name, policy in wanted.items():
            runs.setdefault(name, []).append(run_policy(worlds[-1], policy, seed + number))
        progress(number + 1)
    return [_summarise(policy.name, runs, worlds) for policy in policies]


def _summarise(name: str, all_runs: Mapping[str, list[DeviceFigures]], worlds: list[EdgeWorld]) -> PolicySummary:
    runs, alone = all_runs[name], all_runs[ALONE_POLICY]
    times = np.array([one.time.mean() for one in runs])
    costs, base = (np.array([one.cost.mean() for one in some]) for some in (runs, all_runs[BASELINE]))
    cuts = 1.0 - costs / base
    is_comparable = worlds[0].settings.objective == "step" or name not in BOUNDS
    return PolicySummary(
        policy=name,
        time=float(times.mean()),
        time_error=interval(times),
        slowest=float(np.percentile(np.concatenate([one.time.ravel() for one in runs]), 95)),
        energy=float(np.mean([one.energy.mean() for one in runs])),
        cost=float(costs.mean()),
        cut=float(cuts.mean()) if is_comparable else None,
        cut_error=interval(cuts),
        faster_alone=float(np.mean([(lone.time < one.time).mean() for lone, one in zip(alone, runs, strict=True)])),
        out_of_reach=float(1.0 - np.mean([one.is_served.mean() for one in runs])),
        low_battery=_figures_of(runs, [world.battery < 0.2 for world in worlds]),
        high_battery=_figures_of(runs, [world.battery > 0.8 for world in worlds]),
    )


def _figures_of(runs: Sequence[DeviceFigures], chosen: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """Return the mean time and energy of the devices chosen in each world; None if there are none."""
    if not any(mask.any() for mask in chosen):
        return None
    time, energy = (
        np.concatenate([getattr(one, name)[:, mask].ravel() for one, mask in zip(runs, chosen, strict=True)]).mean()
        for name in ("time", "energy")
    )
    return float(time), float(energy)


def interval(values: np.ndarray) -> float:
    """Return half of the 95 % interval of a mean, by the normal distribution; 0 for a single value."""
    return 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0


def parse_sweep(text: str) -> list[dict[str, float]]:
    """Parse ranges as in devices=30:180:30,servers=4:20:4 and return all their combinations."""
    ranges: dict[str, list[float]] = {}
    for part in filter(None, text.split(",")):
        name, _, span = part.partition("=")
        field = name.strip().replace("-", "_")
        if field not in SWEPT:
            raise unknown("setting to sweep", name, (allowed.replace("_", "-") for allowed in SWEPT))
        if field in ranges:
            raise UserError(f"sweep has {name} twice, each name may occur once")
        try:
            first, last, stride = (float(value) for value in span.split(":"))
        except ValueError:
            raise UserError(f"sweep has {part!r}, it must be a name and a range as in devices=30:180:30") from None
        if not 0.0 < stride < math.inf or not -math.inf < first <= last < math.inf:
            raise UserError(
                f"sweep has {part!r}: the last value must not be below the first, the step must be above 0, and all"
                " must be finite"
            )
        count = int((last - first) / stride + 1e-9) + 1
        if count > 1000:
            raise UserError(f"sweep has {part!r}, which are {count} values; at most 1000 are allowed")
        values = [first + stride * number for number in range(count)]
        if SWEPT[field] is int and not all(value.is_integer() for value in values):
            raise UserError(f"sweep has {part!r}, {name} must be whole numbers")
        ranges[field] = [SWEPT[field](value) for value in values]
    if not ranges:
        raise UserError(f"sweep is {text!r}, it must be names and ranges as in devices=30:180:30,servers=4:20:4")
    return [dict(zip(ranges, point, strict=True)) for point in itertools.product(*ranges.values())]


def sweep(
    settings: EdgeSettings,
    points: Sequence[Mapping[str, float]],
    policies: Sequence[EdgePolicy],
    worlds: int,
    seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Iterator[tuple[Mapping[str, float], list[PolicySummary]]]:
    """Compare the policies at each point; `progress` is given the finished share of all points."""
    for number, point in enumerate(points):

        def advance(finished: int, before: int = number * worlds) -> None:
            progress((before + finished) / (worlds * len(points)))

        yield point, compare(replace(settings, **point), policies, worlds, seed, advance)  # type: ignore[arg-type]
