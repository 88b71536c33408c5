"""One server's cell as a cooperative game of its devices, with PettingZoo's parallel interface.

In each step a device sees itself and its cell's means, and gives two scores; the shares are their softmax. All get the
same reward: by how much their cell's cost falls below that of equal shares, in tenths of it. A step is an episode,
since shares do not change what comes next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from pettingzoo import ParallelEnv

from outpace.edge.problem import SlotProblem
from outpace.edge.settings import EdgeSettings
from outpace.edge.shares import equal
from outpace.edge.shares.learned import LIMIT, OBSERVATIONS, SCORES, from_scores, observe
from outpace.edge.world import make_world

CELLS_PER_WORLD = 30  # drawn from one world before the next one is made
REWARD_SCALE = 10.0


class CellEnvironment(ParallelEnv):
    """A fixed number of devices at one server; every episode draws a server and devices in its reach."""

    metadata = {"name": "outpace_edge_cell", "render_modes": []}  # noqa: RUF012

    def __init__(self, settings: EdgeSettings, devices: int = 6, seed: int = 0) -> None:
        self._settings, self._devices = settings, devices
        self.possible_agents = [f"device_{number}" for number in range(devices)]
        self.agents: list[str] = []
        self.render_mode = None
        self._spaces = Box(-LIMIT, LIMIT, (OBSERVATIONS,), np.float32), Box(-1.0, 1.0, (SCORES,), np.float32)
        self._here = np.zeros(devices, dtype=int)
        self._seed(seed)

    def _seed(self, seed: int) -> None:
        self._rng, self._drawn = np.random.default_rng(seed), 0

    def observation_space(self, agent: str) -> Box:
        return self._spaces[0]

    def action_space(self, agent: str) -> Box:
        return self._spaces[1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Draw a cell."""
        if seed is not None:
            self._seed(seed)
        self._cell = self._draw()
        self.agents = list(self.possible_agents)
        return self._by_agent(observe(self._cell, self._here)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, np.ndarray]) -> tuple[dict[str, Any], ...]:
        """Divide the server by the scores, and end the episode."""
        scores = np.stack([np.clip(actions[agent], -1.0, 1.0) for agent in self.agents])
        cost, base = (
            self._cell.evaluate(chosen).cost.mean()
            for chosen in (from_scores(self._cell, self._here, scores), equal.divide(self._cell, self._here))
        )
        reward = REWARD_SCALE * float(1.0 - cost / base)
        agents, self.agents = self.agents, []
        seen = observe(self._cell, self._here)
        return (
            dict(zip(agents, seen, strict=True)),
            dict.fromkeys(agents, reward),
            dict.fromkeys(agents, True),
            dict.fromkeys(agents, False),
            {agent: {} for agent in agents},
        )

    def _by_agent(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self.agents, rows, strict=True))

    def _draw(self) -> SlotProblem:
        """Return a random server with random devices among those that reach it."""
        while True:
            if self._drawn % CELLS_PER_WORLD == 0:
                world = make_world(replace(self._settings, slots=1), int(self._rng.integers(2**31)))
                self._world = world.problem(0, np.zeros(self._settings.servers), world.battery)
            self._drawn += 1
            server = int(self._rng.integers(self._settings.servers))
            near = np.flatnonzero(self._world.reach[:, server])
            if len(near) >= self._devices:
                return self._world.cell(server, self._rng.choice(near, self._devices, replace=False))
