"""The parameters of a simulated network, with their defaults, and the acceptance rates of drafted tokens.

M, E and W are those of the paper, UARA (arXiv:2511.01695), which has GPT2-XL as the target and GPT2 (137 M weights) as
the draft model. The other values of its Table I could not be read: those marked "ours" were chosen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.models.files.reading import read_json

SHIPPED = Path(__file__).parents[2] / "drafts" / "smollm2-135m-instruct" / "judgement.json"
OBJECTIVES = ("step", "paper")
CHANNELS = ("3gpp", "sionna")
SCENARIOS = ("umi", "uma")
RATES = ("shannon", "mcs")
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


@dataclass(frozen=True)
class EdgeSettings:
    """The parameters of a world. Distances are in metres and times in milliseconds unless the name says otherwise."""

    devices: int = 120  # M; the paper has 30 to 180
    servers: int = 12  # E; the paper has 4 to 20
    bandwidth_mhz: float = 10.0  # W, divided equally among the servers; the paper's
    acceptance: tuple[float, ...] = (0.8,)  # rate at each draft position; the last one holds for all further positions
    draft_length: int | None = 8  # ours: gamma of all devices; None: each device's best, 0 if drafting does not pay
    objective: str = "step"
    energy_weight: float = 0.0  # ms that a device with an empty battery spends to save one mJ
    channel: str = "3gpp"
    scenario: str = "umi"
    rate: str = "shannon"
    channel_age: int = 0  # policies know the channels of this many slots ago
    slots: int = 1
    area: float = 1000.0  # ours: side of the square in which devices and servers are
    speed: float = 1.5  # ours: metres a second
    slot_ms: float = 1000.0  # ours
    battery: tuple[float, float] = (0.05, 1.0)  # ours: range of the battery levels at the start, 1 is full
    prompts: float = 0.05  # ours: chance that a device sends a new prompt in a slot
    prompt_passes: float = 20.0  # ours: server time of a prompt, in target passes
    header_bits: int = 480  # ours: headers of a message; each token adds 17 bits, as keyed rules need only ids
    transmit_dbm: float = 23.0  # ours: 3GPP's power class 3
    noise_dbm_hz: float = -167.0  # ours: thermal noise of -174 and a noise figure of 7 dB
    carrier_ghz: float = 3.5  # ours
    reach_db: float = -6.7  # ours: the SNR that the lowest modulation needs; with less, a server is out of reach
    radio_watts: float = 0.8  # ours: a connected radio, which does not sleep between messages of a step
    imbalance: float = 0.01  # ours: factor of the objective paper's squared difference, per ms

    def __post_init__(self) -> None:
        """Raise UserError for a value that no network can have."""
        for name, high in (("devices", 10_000), ("servers", 1000), ("slots", 100_000)):
            check_whole(name, getattr(self, name), 1, high)
        if self.servers > self.devices:
            raise UserError(f"servers is {self.servers}, it must be at most the number of devices, {self.devices}")
        if not self.acceptance:
            raise UserError("acceptance is empty, it must be a rate for each position, as in 0.8,0.7")
        for rate in self.acceptance:
            check_range("acceptance", rate, 0.0, 1.0)
        for low in self.battery:
            check_range("battery", low, 0.001, 1.0)
        if self.battery[0] > self.battery[1]:
            raise UserError(f"battery is {self.battery[0]:g}:{self.battery[1]:g}, the lower level must come first")
        if self.draft_length is not None:
            check_whole("draft-length", self.draft_length, 1, MAX_LENGTH)
        check_range("bandwidth", self.bandwidth_mhz, 0.001, 1e6)
        check_range("energy-weight", self.energy_weight, 0.0, 1e6)
        check_range("area", self.area, 1.0, 1e6)
        check_range("transmit-dbm", self.transmit_dbm, -300.0, 100.0)
        check_range("speed", self.speed, 0.0, 1000.0)
        check_range("prompts", self.prompts, 0.0, 1.0)
        check_whole("channel-age", self.channel_age, 0, 1)
        for name, allowed in (
            ("objective", OBJECTIVES),
            ("channel", CHANNELS),
            ("scenario", SCENARIOS),
            ("rate", RATES),
        ):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        if self.channel == "3gpp" and (self.scenario, self.rate) != ("umi", "shannon"):
            raise UserError(
                "--scenario uma and --rate mcs need --channel sionna; --channel 3gpp has umi and shannon only"
            )


SWEPT = {  # settings that a sweep may change, and their types
    **dict.fromkeys(("devices", "servers", "slots", "draft_length"), int),
    **dict.fromkeys(("bandwidth_mhz", "energy_weight", "area", "speed", "prompts", "transmit_dbm"), float),
}


def read_acceptance(text: str) -> tuple[float, ...]:
    """Parse comma-separated rates or read a judgement.json; an empty text means the rates of the shipped pair."""
    if not text:
        return judged(SHIPPED)
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        if Path(text).suffix != ".json":
            says = "it must be rates with commas between them, as in 0.8,0.7, or a judgement.json of outpace distill"
            raise UserError(f"acceptance is {text!r}, {says}") from None
        return judged(Path(text))
    for rate in rates:
        check_range("acceptance", rate, 0.0, 1.0)
    return rates


def judged(file: Path) -> tuple[float, ...]:
    """Return the acceptance rate at each draft position at temperature 0, averaged over tasks."""
    rows = read_json(file).get("rows")
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    columns = [_positions(row, file) for row in found if row.get("temperature") == 0]
    if not any(columns):
        raise UserError(f"{file} has no row of temperature 0 with `by_position`, the acceptance of each draft position")
    return tuple(fmean(rate for rate in column if rate is not None) for column in zip_longest(*columns))


def _positions(row: dict[str, Any], file: Path) -> list[float]:
    rates = row.get("by_position") or []
    for rate in rates if isinstance(rates, list) else [rates]:
        check_range(f"by_position in {file}", rate, 0.0, 1.0)
    return list(rates)
