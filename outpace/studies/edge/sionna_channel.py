"""The stochastic channel of 3GPP TR 38.901 by sionna-no-rt, UMi or UMa, and its link adaptation.

A link's SNR is that of its path loss and its shadowing, which is correlated between devices close to each other; fast
fading is averaged out by the many messages of a slot. Every slot uses the same seed, so that shadowing and lines of
sight persist while a device hardly moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outpace.core.errors import require
from outpace.studies.edge.channel import received_snr_db, shannon
from outpace.studies.edge.settings import EdgeSettings

HEIGHTS = {"umi": 10.0, "uma": 25.0}  # of the servers in metres, TR 38.901
DEVICE_HEIGHT = 1.5
ELEMENTS = 12 * 14 * 25  # resource elements of a transport block: 25 resource blocks for a slot
BLER_TARGET = 0.1  # fraction of transport blocks that may fail; these are sent again


class SionnaChannel:
    """Draws the links of one world; needs Python 3.11, torch and the extra edge."""

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
        places.append(np.column_stack([servers, np.full(len(servers), HEIGHTS[self._settings.scenario])]))
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
