"""The channel of 3GPP TR 38.901 in an urban microcell (UMi street canyon), and the rates that it allows.

A server is out of reach where the signal-to-noise ratio (SNR) is below that of the lowest modulation; the spectral
efficiency is then 0.
"""

from __future__ import annotations

import numpy as np

from outpace.studies.edge.settings import EdgeSettings

SERVER_HEIGHT, DEVICE_HEIGHT, ENVIRONMENT_HEIGHT = 10.0, 1.5, 1.0  # metres
SHADOW_DB = {"line of sight": 4.0, "blocked": 7.82}  # standard deviation of shadowing
CORRELATION = 13.0  # correlation distance of shadowing in metres, for blocked links
SPEED_OF_LIGHT = 3e8  # m/s


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
