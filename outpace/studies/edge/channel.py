"""Channels of 3GPP TR 38.901 and the rates that they allow: our own urban microcell (UMi street canyon), and Sionna's.

A server is out of reach where the signal-to-noise ratio (SNR) is below that of the lowest modulation; the spectral
efficiency is then 0.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from outpace.core.errors import require
from outpace.studies.edge.settings import EdgeSettings

SERVER_HEIGHT, DEVICE_HEIGHT, ENVIRONMENT_HEIGHT = 10.0, 1.5, 1.0  # metres
SHADOW_DB = {"line of sight": 4.0, "blocked": 7.82}  # standard deviation of shadowing
CORRELATION = 13.0  # correlation distance of shadowing in metres, for blocked links
SPEED_OF_LIGHT = 3e8  # m/s


class Channel(Protocol):
    """Gives the spectral efficiency of each link as the devices move."""

    def efficiency(self, devices: np.ndarray, servers: np.ndarray) -> np.ndarray:
        """Return bit/s/Hz [devices, servers] for positions in metres, [devices, 2] and [servers, 2]; 0 out of reach."""


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
        loss = path_loss(distance, is_clear, self._settings.carrier_ghz) + sigma * self._shadow
        return shannon(received_snr_db(self._settings, loss), self._settings.reach_db)

    def _move_shadow(self, devices: np.ndarray) -> None:
        if self._last is not None:
            kept = np.exp(-np.hypot(*(devices - self._last).T) / CORRELATION)[:, None]
            fresh = self._rng.standard_normal(self._shadow.shape)
            self._shadow = kept * self._shadow + np.sqrt(1.0 - kept**2) * fresh
        self._last = devices.copy()


def received_snr_db(settings: EdgeSettings, loss_db: np.ndarray) -> np.ndarray:
    """Return the SNR in dB over a server's whole band, W / E."""
    band_hz = settings.bandwidth_mhz * 1e6 / settings.servers
    return settings.transmit_dbm - loss_db - settings.noise_dbm_hz - 10.0 * np.log10(band_hz)


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


SIONNA_HEIGHTS = {"umi": 10.0, "uma": 25.0}  # of the servers in metres, TR 38.901
ELEMENTS = 12 * 14 * 25  # resource elements of a transport block: 25 resource blocks for a slot
BLER_TARGET = 0.1  # fraction of transport blocks that may fail; these are sent again


class SionnaChannel:
    """The stochastic channel by sionna-no-rt, UMi or UMa, of one world; needs Python 3.11, torch and the extra edge.

    A link's SNR is that of its path loss and its shadowing, which is correlated between devices close to each other;
    fast fading is averaged out by the many messages of a slot. Every slot uses the same seed, so that shadowing and
    lines of sight persist while a device hardly moves.
    """

    def __init__(self, settings: EdgeSettings, rng: np.random.Generator) -> None:
        require("the channel sionna", "edge", "sionna", "torch")
        self._settings, self._seed = settings, int(rng.integers(2**31))

    def efficiency(self, devices: np.ndarray, servers: np.ndarray) -> np.ndarray:
        """Return bit/s/Hz [devices, servers] by Shannon's formula or by the chosen modulation and coding."""
        snr_db = received_snr_db(self._settings, -self._gain_db(devices, servers))
        if self._settings.rate == "shannon":
            return shannon(snr_db, self._settings.reach_db)
        return coded_efficiency(snr_db)

    def _gain_db(self, devices: np.ndarray, servers: np.ndarray) -> np.ndarray:
        import torch
        from sionna.phy import config

        config.seed = self._seed
        model = self._make_model()
        places = [np.column_stack([devices, np.full(len(devices), DEVICE_HEIGHT)])]
        places.append(np.column_stack([servers, np.full(len(servers), SIONNA_HEIGHTS[self._settings.scenario])]))
        ut, bs = (torch.tensor(place, dtype=torch.float32)[None] for place in places)
        still, outdoors = torch.zeros_like(ut), torch.zeros(ut.shape[:2], dtype=torch.bool)
        model.set_topology(ut, bs, still, torch.zeros_like(bs), still, outdoors, los="random")
        drawn = model.sample_lsp()  # the large-scale parameters [1, servers, devices]
        return (10.0 * drawn.sf.double().log10() - drawn.pathloss.double())[0].T.numpy()

    def _make_model(self) -> Any:
        """Create a model; each slot needs a new one, because a used one draws other numbers from the same seed."""
        from sionna.phy.channel import tr38901

        carrier = self._settings.carrier_ghz * 1e9
        antenna = tr38901.PanelArray(1, 1, "single", "V", "omni", carrier)
        kind: Any = tr38901.UMi if self._settings.scenario == "umi" else tr38901.UMa
        # True: large-scale parameters are drawn by `sample_lsp` only.
        return kind(carrier, "low", antenna, antenna, "uplink", always_generate_lsp=True)


def coded_efficiency(snr_db: np.ndarray) -> np.ndarray:
    """Return bits per resource element of the best modulation and coding whose blocks fail at most one time in ten."""
    import torch
    from sionna.phy.nr.utils import decode_mcs_index
    from sionna.sys import InnerLoopLinkAdaptation, PHYAbstraction

    snr = torch.tensor(10.0 ** (snr_db.ravel() / 10.0), dtype=torch.float32)
    adaptation = InnerLoopLinkAdaptation(PHYAbstraction(), bler_target=BLER_TARGET)
    elements = torch.full(snr.shape, ELEMENTS, dtype=torch.int32)
    bits, rate = decode_mcs_index(adaptation(sinr_eff=snr, num_allocated_re=elements))
    coded = (bits * rate * (1.0 - BLER_TARGET)).double().numpy().reshape(snr_db.shape)
    return np.where(coded <= np.log2(1.0 + 10.0 ** (snr_db / 10.0)), coded, 0.0)  # too weak for the lowest coding
