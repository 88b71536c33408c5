"""A world: devices with batteries, servers, and the channels between them, slot by slot.

A world depends on its settings and seed alone, so every policy meets the same devices, moves and prompts. The channel
is that of 3GPP TR 38.901 in an urban microcell (UMi street canyon). A server is out of reach where the signal-to-noise
ratio (SNR) is below that of the lowest modulation; the spectral efficiency is then 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.core import theory
from outpace.studies.edge.problem import SlotProblem
from outpace.studies.edge.settings import DEVICE_CLASSES, MAX_LENGTH, MODEL_RATIO, PASS_MS, EdgeSettings

TOKEN_BITS = 17  # the id of a token in a vocabulary of up to 131,072
SERVER_HEIGHT, DEVICE_HEIGHT, ENVIRONMENT_HEIGHT = 10.0, 1.5, 1.0  # metres
SHADOW_DB = {"line of sight": 4.0, "blocked": 7.82}  # standard deviation of shadowing
CORRELATION = 13.0  # correlation distance of shadowing in metres, for blocked links
SPEED_OF_LIGHT = 3e8  # m/s


class RadioSlot(NamedTuple):
    """The part of a slot that does not depend on the policy."""

    efficiency: np.ndarray  # bit/s/Hz [devices, servers]
    is_prompting: np.ndarray  # whether a device sends a new prompt, bool [devices]


@dataclass(frozen=True)
class EdgeWorld:
    """All random draws that do not depend on a policy."""

    settings: EdgeSettings
    kind: np.ndarray  # index into DEVICE_CLASSES [devices]
    battery: np.ndarray  # levels at the start, 1 is full [devices]
    pass_ms: np.ndarray  # time of a target pass [servers]
    lengths: np.ndarray  # draft lengths, gamma [devices]
    slots: tuple[RadioSlot, ...]

    def problem(self, slot: int, queue: np.ndarray, battery: np.ndarray) -> SlotProblem:
        """Return the assignment problem for a slot's channels, the servers' queues in ms, and the battery levels."""
        chosen, efficiency = self.settings, self.slots[slot].efficiency
        step_ms, watts = (column[self.kind] for column in device_columns())
        bits = chosen.header_bits + TOKEN_BITS * self.lengths
        band_khz = 1e3 * chosen.bandwidth_mhz / chosen.servers  # bits per ms at 1 bit/s/Hz
        with np.errstate(divide="ignore"):
            link = bits[:, None] / (band_khz * efficiency)
        draft, alone = self.lengths * step_ms, step_ms * _alone_steps(chosen.acceptance)
        return SlotProblem(
            draft=draft,
            tokens=_step_tokens(chosen.acceptance)[self.lengths],
            link=link,
            verify=self.pass_ms,
            queue=mean_wait(queue, chosen.slot_ms),
            alone=alone,
            draft_energy=draft * watts,
            alone_energy=alone * watts,
            radio_watts=chosen.radio_watts,
            transmit_watts=10.0 ** (chosen.transmit_dbm / 10.0 - 3.0),
            energy_price=chosen.energy_weight * (1.0 - battery),
            is_paper=chosen.objective == "paper",
            imbalance=chosen.imbalance,
        )

    def queue_after(self, queue: np.ndarray, slot: int, server: np.ndarray) -> np.ndarray:
        """Return each server's queue in ms at the start of the next slot: prompts left over and new prompts."""
        prompting = server[self.slots[slot].is_prompting & (server >= 0)]
        new = np.bincount(prompting, minlength=len(queue)) * self.settings.prompt_passes * self.pass_ms
        return np.maximum(queue - self.settings.slot_ms, 0.0) + new

    def battery_after(self, battery: np.ndarray, milliwatts: np.ndarray) -> np.ndarray:
        """Return the battery levels after a slot in which the devices use this power."""
        capacity = np.array([one.battery_joules for one in DEVICE_CLASSES])[self.kind]
        return np.maximum(battery - milliwatts * self.settings.slot_ms / 1e6 / capacity, 0.0)


def make_world(settings: EdgeSettings, seed: int) -> EdgeWorld:
    """Draw a world."""
    rng = np.random.default_rng([seed, settings.devices, settings.servers])
    devices, servers = rng.random((settings.devices, 2)), rng.random((settings.servers, 2))
    kind = rng.integers(len(DEVICE_CLASSES), size=settings.devices)
    pass_ms = np.array(PASS_MS)[rng.integers(len(PASS_MS), size=settings.servers)]
    battery = rng.uniform(*settings.battery, size=settings.devices)
    heading = rng.uniform(0.0, 2.0 * np.pi, size=settings.devices)
    channel = PathLossChannel(settings, rng)
    slots, place = [], devices * settings.area
    for _ in range(settings.slots):
        efficiency = channel.efficiency(place, servers * settings.area)
        slots.append(RadioSlot(efficiency, rng.random(settings.devices) < settings.prompts))
        heading = heading + rng.normal(0.0, 0.3, size=settings.devices)
        stride = settings.speed * settings.slot_ms / 1e3 * np.stack([np.cos(heading), np.sin(heading)], 1)
        place = settings.area - np.abs(settings.area - np.abs(place + stride))  # walls reflect
    lengths = _lengths(settings, kind, battery, pass_ms)
    return EdgeWorld(settings, kind, battery, pass_ms, lengths, tuple(slots))


def mean_wait(queue: np.ndarray, slot_ms: float) -> np.ndarray:
    """Return the mean wait in ms of a pass that arrives at a random time of a slot and waits for the queue to empty."""
    return np.where(queue <= slot_ms, queue**2 / (2.0 * slot_ms), queue - 0.5 * slot_ms)


def device_columns() -> tuple[np.ndarray, np.ndarray]:
    """Return the time of a draft step in ms and the power in W of each device class."""
    return np.array([one.draft_ms for one in DEVICE_CLASSES]), np.array([one.compute_watts for one in DEVICE_CLASSES])


def _lengths(settings: EdgeSettings, kind: np.ndarray, battery: np.ndarray, pass_ms: np.ndarray) -> np.ndarray:
    """Return the draft lengths: the given one, or each device's best with an equal share of an average server."""
    if settings.draft_length is not None:
        return np.full(settings.devices, settings.draft_length)
    step_ms, watts = (column[kind][:, None] for column in device_columns())
    draft = np.arange(MAX_LENGTH + 1)[None] * step_ms
    step = np.maximum(draft, pass_ms.mean() * settings.devices / settings.servers)
    energy = draft * watts + step * settings.radio_watts
    price = settings.energy_weight * (1.0 - battery[:, None])
    return ((step + price * energy) / _step_tokens(settings.acceptance)[None]).argmin(1)


def _step_tokens(acceptance: tuple[float, ...]) -> np.ndarray:
    """Return the tokens of a step for each draft length from 0, where a step is a plain pass."""
    return np.array([1.0, *(theory.pearl_tokens(acceptance, gamma) for gamma in range(1, MAX_LENGTH + 1))])


def _alone_steps(acceptance: tuple[float, ...]) -> float:
    """Return the time per token, in draft steps, of a device that runs both models sequentially at its best length."""
    positions = [*acceptance, *[acceptance[-1]] * MAX_LENGTH]
    lengths = range(MAX_LENGTH + 1)
    return min((g + MODEL_RATIO) / theory.expected_tokens_by_position(positions[:g]) for g in lengths)


class PathLossChannel:
    """UMi path loss with log-normal shadowing that changes with the distance a device has moved."""

    def __init__(self, settings: EdgeSettings, rng: np.random.Generator) -> None:
        self._settings, self._rng = settings, rng
        self._obstruction = rng.random((settings.devices, settings.servers))
        self._shadow = rng.standard_normal((settings.devices, settings.servers))
        self._last: np.ndarray | None = None

    def efficiency(self, devices: np.ndarray, servers: np.ndarray) -> np.ndarray:
        """Return Shannon's log2(1 + SNR), [devices, servers]."""
        self._move_shadow(devices)
        distance = np.hypot(*(devices[:, None] - servers[None]).transpose(2, 0, 1))
        is_clear = self._obstruction < line_of_sight_chance(distance)
        sigma = np.where(is_clear, SHADOW_DB["line of sight"], SHADOW_DB["blocked"])
        chosen = self._settings
        loss = path_loss(distance, is_clear, chosen.carrier_ghz) + sigma * self._shadow
        band_hz = chosen.bandwidth_mhz * 1e6 / chosen.servers
        snr_db = chosen.transmit_dbm - loss - chosen.noise_dbm_hz - 10.0 * np.log10(band_hz)
        return shannon(snr_db, chosen.reach_db)

    def _move_shadow(self, devices: np.ndarray) -> None:
        if self._last is not None:
            kept = np.exp(-np.hypot(*(devices - self._last).T) / CORRELATION)[:, None]
            fresh = self._rng.standard_normal(self._shadow.shape)
            self._shadow = kept * self._shadow + np.sqrt(1.0 - kept**2) * fresh
        self._last = devices.copy()


def shannon(snr_db: np.ndarray, reach_db: float) -> np.ndarray:
    """Return log2(1 + SNR) in bit/s/Hz; 0 where the SNR is below `reach_db`, minus infinity included."""
    return np.where(snr_db >= reach_db, np.log2(1.0 + 10.0 ** (np.maximum(snr_db, reach_db) / 10.0)), 0.0)


def line_of_sight_chance(distance: np.ndarray) -> np.ndarray:
    """Return the probability of a line of sight at horizontal distances in metres. TR 38.901, table 7.4.2-1."""
    far = np.maximum(distance, 18.0)
    return 18.0 / far + np.exp(-far / 36.0) * (1.0 - 18.0 / far)


def path_loss(distance: np.ndarray, is_clear: np.ndarray, carrier_ghz: float) -> np.ndarray:
    """Return the loss in dB at horizontal distances in metres, at least 10. TR 38.901, table 7.4.1-1."""
    flat = np.maximum(distance, 10.0)
    space = np.hypot(flat, SERVER_HEIGHT - DEVICE_HEIGHT)
    above = (SERVER_HEIGHT - ENVIRONMENT_HEIGHT) * (DEVICE_HEIGHT - ENVIRONMENT_HEIGHT)
    breakpoint_m = 4.0 * above * carrier_ghz * 1e9 / SPEED_OF_LIGHT
    carrier = 20.0 * np.log10(carrier_ghz)
    near = 32.4 + 21.0 * np.log10(space) + carrier
    beyond = 9.5 * np.log10(breakpoint_m**2 + (SERVER_HEIGHT - DEVICE_HEIGHT) ** 2)
    clear = np.where(flat <= breakpoint_m, near, 32.4 + 40.0 * np.log10(space) + carrier - beyond)
    blocked = 35.3 * np.log10(space) + 22.4 + 21.3 * np.log10(carrier_ghz) - 0.3 * (DEVICE_HEIGHT - 1.5)
    return np.where(is_clear, clear, np.maximum(clear, blocked))
