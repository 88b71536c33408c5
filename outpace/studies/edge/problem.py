"""One slot of a network as an assignment problem, and what an assignment costs.

A device drafts gamma tokens in gamma t_d. Its server, which gives it a share y of the band and z of the compute, has
received these d bits and verified them after queue + d / (y R) + t_p / z, where R is the rate over the whole band.
Drafting runs in parallel with verification (PEARL), so a step takes the greater of both times and yields
`theory.pearl_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

ALONE = -1  # the server of a device that drafts and verifies alone


@dataclass(frozen=True)
class Assignment:
    """The server of each device, or ALONE, and the device's shares of the server's band and compute."""

    server: np.ndarray  # [devices]
    band: np.ndarray  # y [devices]
    compute: np.ndarray  # z [devices]


class DeviceFigures(NamedTuple):
    """What each device gets: arrays [devices], or [slots, devices]."""

    time: np.ndarray  # ms per token
    energy: np.ndarray  # mJ per token
    cost: np.ndarray  # the objective per token, in ms
    is_served: np.ndarray  # whether it has a server


@dataclass(frozen=True)
class SlotProblem:
    """Times in ms, energies in mJ. `link` and `verify` are times of a device that has the whole server to itself."""

    draft: np.ndarray  # gamma t_d [devices]
    tokens: np.ndarray  # expected tokens of a step [devices]
    link: np.ndarray  # d / R [devices, servers], infinite out of reach
    verify: np.ndarray  # t_p [servers]
    queue: np.ndarray  # mean wait behind prompts [servers]
    alone: np.ndarray  # time per token on the device alone [devices]
    draft_energy: np.ndarray  # energy of drafting in a step [devices]
    alone_energy: np.ndarray  # energy per token on the device alone [devices]
    radio_watts: float
    transmit_watts: float
    energy_price: np.ndarray  # ms per mJ: the energy weight times the used part of the battery [devices]
    is_paper: bool = False
    imbalance: float = 0.0

    @property
    def in_range(self) -> np.ndarray:
        """Which servers are in reach, bool [devices, servers]."""
        return np.isfinite(self.link)

    @property
    def weight(self) -> np.ndarray:
        """Cost per token of one more ms of a step [devices]: the time, and the price of the radio's energy."""
        return (1.0 + self.energy_price * self.radio_watts) / self.tokens

    def equal_costs(self, counts: np.ndarray) -> np.ndarray:
        """Return each device's cost at each server, [devices, servers], if `counts` devices share it equally."""
        shared = np.maximum(counts, 1)
        parts = self.link * shared, (self.verify * shared)[None], self.queue[None]
        return self._cost(*parts, *(array[:, None] for array in self._own))

    @property
    def _own(self) -> tuple[np.ndarray, ...]:
        return self.draft, self.tokens, self.draft_energy, self.energy_price

    def _cost(
        self,
        link: np.ndarray,
        verify: np.ndarray,
        queue: np.ndarray,
        draft: np.ndarray,
        tokens: np.ndarray,
        energy: np.ndarray,
        price: np.ndarray,
    ) -> np.ndarray:
        """Return the objective per token: time plus the price of the energy, or the paper's sum with its penalty."""
        served = queue + link + verify
        if self.is_paper:
            # A server out of reach costs infinitely much; its other terms are left out, since inf - inf has no value.
            is_near = np.isfinite(link)
            gap = np.where(is_near, served, draft) - draft
            energy = energy + self.transmit_watts * np.where(is_near, link, 0.0)
            return (draft + served + self.imbalance * gap**2 + price * energy) / tokens
        return (np.maximum(draft, served) * (1.0 + price * self.radio_watts) + price * energy) / tokens

    def evaluate(self, chosen: Assignment) -> DeviceFigures:
        """Evaluate an assignment. A device writes alone if its server is out of reach, as can happen if the policy knew
        old channels."""
        index = np.arange(len(self.draft))
        link = self.link[index, chosen.server]
        is_served = (chosen.server != ALONE) & np.isfinite(link)
        band, compute = (np.where(is_served, share, 1.0) for share in (chosen.band, chosen.compute))
        parts = np.where(is_served, link, 0.0) / band, self.verify[chosen.server] / compute, self.queue[chosen.server]
        step = np.maximum(self.draft, sum(parts))
        radio = self.transmit_watts * parts[0] if self.is_paper else self.radio_watts * step
        time = np.where(is_served, step / self.tokens, self.alone)
        energy = np.where(is_served, (self.draft_energy + radio) / self.tokens, self.alone_energy)
        cost = np.where(is_served, self._cost(*parts, *self._own), self.alone + self.energy_price * self.alone_energy)
        return DeviceFigures(time, energy, cost, is_served)

    def without_drafts(self) -> SlotProblem:
        """Return the problem of servers that write alone: one token per pass, and almost no time on the links."""
        none, one = np.zeros_like(self.draft), np.ones_like(self.draft)
        link = np.where(self.in_range, 1e-9 * self.link, np.inf)
        return replace(self, draft=none, tokens=one, link=link, draft_energy=none, is_paper=False)

    def counts(self, server: np.ndarray) -> np.ndarray:
        """Return the number of devices of each server."""
        return np.bincount(server[server != ALONE], minlength=len(self.verify))

    def members(self, server: np.ndarray) -> np.ndarray:
        """Return the association as a bool matrix [devices, servers]."""
        return server[:, None] == np.arange(len(self.verify))[None]

    def equal_objective(self, server: np.ndarray) -> float:
        """Return the sum of all costs with equal shares."""
        costs = self.equal_costs(self.counts(server))
        lonely = (self.alone + self.energy_price * self.alone_energy)[server == ALONE]
        return float(costs[self.members(server)].sum() + lonely.sum())
