"""The parameters of a simulated network, with their defaults, and the acceptance rates of drafted tokens.

M, E and W are those of the paper, UARA (arXiv:2511.01695), which has GPT2-XL as the target and GPT2 (137 M weights) as
the draft model. The other values of its Table I could not be read: those marked "ours" were chosen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.options import CheckedOptions, number, one_of, option, whole
from outpace.models.files.reading import read_json

SHIPPED = Path(__file__).parents[2] / "drafts" / "smollm2-135m-instruct" / "judgement.json"
OBJECTIVES = ("step", "paper")
MAX_LENGTH = 16


class DeviceClass(NamedTuple):
    """A kind of device: the time of a draft step, its power while it computes, and its battery."""

    name: str
    draft_ms: float
    compute_watts: float
    battery_joules: float


DEVICE_CLASSES = (  # ours: 137 MB of int8 weights read at 23, 9 and 4.6 GB/s
    DeviceClass("phone", 6.0, 4.0, 54_000.0),
    DeviceClass("older phone", 15.0, 3.0, 40_000.0),
    DeviceClass("gateway", 30.0, 4.0, 72_000.0),
)
PASS_MS = (12.0, 18.0, 24.0)  # ours: a target pass on servers of three kinds, 3.1 GB of weights at 260 to 130 GB/s
MODEL_RATIO = 1558 / 137  # a target pass over a draft step on the same device, both memory-bound


def _check_rates(name: str, rates: tuple[float, ...]) -> None:
    if not rates:
        raise UserError(f"{name} is empty, it must be a rate for each position, as in 0.8,0.7")
    for rate in rates:
        check_range(name, rate, 0.0, 1.0)


def _check_battery(name: str, levels: tuple[float, float]) -> None:
    for level in levels:
        check_range(name, level, 0.001, 1.0)
    if levels[0] > levels[1]:
        raise UserError(f"{name} is {levels[0]:g}:{levels[1]:g}, the lower level must come first")


def _check_length(name: str, length: int | None) -> None:
    if length is not None:
        check_whole(name, length, 1, MAX_LENGTH)


@dataclass(frozen=True)
class EdgeSettings(CheckedOptions):
    """The parameters of a world. Distances are in metres and times in milliseconds unless the name says otherwise.

    Fields with a help text are flags of `outpace edge`.
    """

    devices: int = whole(120, 1, 10_000, "Number of devices (M).")  # the paper has 30 to 180
    servers: int = whole(12, 1, 1000, "Number of servers (E).")  # the paper has 4 to 20
    bandwidth_mhz: float = number(  # the paper's
        10.0, 0.001, 1e6, "Bandwidth of all servers together in MHz (W), divided equally among them."
    )
    acceptance: tuple[float, ...] = option((0.8,), "", _check_rates)  # by position; the last one holds for all further
    draft_length: int | None = option(8, "", _check_length)  # ours: gamma; None: each device's best, 0 if none pays
    objective: str = one_of(
        "step",
        OBJECTIVES,
        "What policies minimise: step, the time of a step that drafts and verifies in parallel; or paper, the"
        " sum of both times with a penalty on the square of their difference.",
    )
    energy_weight: float = number(0.0, 0.0, 1e6, "Milliseconds that one mJ is worth to a device with an empty battery.")
    channel_age: int = whole(0, 0, 1, "Age in slots of the channels that policies know, 0 or 1.")
    slots: int = whole(
        1, 1, 100_000, "Number of slots of one second; devices move, and queues and batteries carry over."
    )
    area: float = number(1000.0, 1.0, 1e6, "Side of the simulated square, in metres.")  # ours
    speed: float = number(1.5, 0.0, 1000.0, "Speed of the devices, in m/s.")  # ours
    battery: tuple[float, float] = option(  # ours
        (0.05, 1.0), "Range of the initial battery levels, between 0.001 and 1 (full).", _check_battery
    )
    prompts: float = number(0.05, 0.0, 1.0, "Probability that a device sends a new prompt in a slot.")  # ours
    transmit_dbm: float = number(  # ours: 3GPP's power class 3
        23.0, -300.0, 100.0, "Transmit power of the devices, in dBm."
    )
    slot_ms: float = 1000.0  # ours
    prompt_passes: float = 20.0  # ours: server time of a prompt, in target passes
    header_bits: int = 480  # ours: headers of a message; each token adds 17 bits, as keyed rules need only ids
    noise_dbm_hz: float = -167.0  # ours: thermal noise of -174 and a noise figure of 7 dB
    carrier_ghz: float = 3.5  # ours
    reach_db: float = -6.7  # ours: the SNR that the lowest modulation needs; with less, a server is out of reach
    radio_watts: float = 0.8  # ours: a connected radio, which does not sleep between messages of a step
    imbalance: float = 0.01  # ours: factor of the objective paper's squared difference, per ms

    def __post_init__(self) -> None:
        """Raise UserError for a value that no network can have."""
        super().__post_init__()
        if self.servers > self.devices:
            raise UserError(f"servers is {self.servers}, it must be at most the number of devices, {self.devices}")


SWEPT = {  # settings that a sweep may change, and their types
    **dict.fromkeys(("devices", "servers", "slots", "draft_length"), int),
    **dict.fromkeys(("bandwidth_mhz", "energy_weight", "area", "speed", "prompts", "transmit_dbm"), float),
}


def read_acceptance(text: str) -> tuple[float, ...]:
    """Parse comma-separated rates or read a judgement.json; an empty text means the rates of the shipped pair."""
    try:
        rates = tuple(float(part) for part in text.split(",")) if text else judged(SHIPPED)
    except ValueError:
        if Path(text).suffix != ".json":
            says = "it must be rates with commas between them, as in 0.8,0.7, or a judgement.json of outpace distill"
            raise UserError(f"acceptance is {text!r}, {says}") from None
        return judged(Path(text))
    _check_rates("acceptance", rates)
    return rates


def judged(file: Path) -> tuple[float, ...]:
    """Return the acceptance rate at each draft position at temperature 0, averaged over tasks."""
    rows = read_json(file).get("rows")
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    positions = [row.get("by_position") for row in found if row.get("temperature") == 0]
    columns = [rates for rates in positions if isinstance(rates, list)]
    if not any(columns):
        raise UserError(f"{file} has no row of temperature 0 with `by_position`, the acceptance of each draft position")
    for rate in chain.from_iterable(columns):
        check_range(f"by_position in {file}", rate, 0.0, 1.0)
    return tuple(fmean(rate for rate in column if rate is not None) for column in zip_longest(*columns))
