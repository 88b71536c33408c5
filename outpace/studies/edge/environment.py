"""One server's cell as a cooperative game of its devices, with PettingZoo's parallel interface.

A cell is a server and its devices. In a step each device observes its own features and their means over the cell, and
acts by two scores, for band and compute; the softmax of the scores over the cell gives the shares. All devices get the
same reward: the logarithm of the ratio of the cell's cost with equal shares to its cost with these shares.

With `channel_age` 1, devices observe the channels of the previous slot. An episode is one step, because shares do not
affect what follows. `infos` holds each device's difference reward: the common reward minus the one if this device had
given scores of 0 (Wolpert and Tumer, 2001). Both rewards have the same gradient with respect to the device's scores,
except for a penalty on the cell's mean scores, which do not change the shares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from pettingzoo import ParallelEnv

from outpace.core.errors import UserError
from outpace.studies.edge.associations import max_sinr
from outpace.studies.edge.problem import SlotProblem
from outpace.studies.edge.settings import EdgeSettings
from outpace.studies.edge.shares import LIMIT, OBSERVATIONS, SCORES, divide_equally, from_scores, observe
from outpace.studies.edge.world import make_world

CELLS_PER_WORLD = 30  # cells drawn from one world before the next world is made
MAX_DRAWS = 50 * CELLS_PER_WORLD
OFFSET_PENALTY = 1.0  # factor of the squared mean scores that is subtracted from a reward
SPEEDS = 0.7  # servers are up to e^0.7 times as fast or slow, which prepares for cells of other sizes


class CellEnvironment(ParallelEnv):
    """A fixed number of devices at one server; each episode draws a server and devices for which it is the best one."""

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
        self._known, self._cell = self._draw()
        self._base = self._cell.evaluate(divide_equally(self._known, self._here)).cost.mean()
        self.agents = list(self.possible_agents)
        seen = dict(zip(self.agents, observe(self._known, self._here), strict=True))
        return seen, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, np.ndarray]) -> tuple[dict[str, Any], ...]:
        """Compute shares from the scores, return the rewards, and end the episode."""
        scores = np.stack([np.clip(actions[agent], -1.0, 1.0) for agent in self.agents])
        team, value, devices = self._reward(scores), self._value(scores), range(len(scores))
        without = [self._value(scores * (np.arange(len(scores)) != number)[:, None]) for number in devices]
        agents, self.agents = self.agents, []
        seen = observe(self._known, self._here)
        return (
            dict(zip(agents, seen, strict=True)),
            dict.fromkeys(agents, team),
            dict.fromkeys(agents, True),
            dict.fromkeys(agents, False),
            {agent: {"difference": value - other} for agent, other in zip(agents, without, strict=True)},
        )

    def _reward(self, scores: np.ndarray) -> float:
        cost = self._cell.evaluate(from_scores(self._known, self._here, scores)).cost.mean()
        return float(np.log(self._base / cost))

    def _value(self, scores: np.ndarray) -> float:
        """Return the reward minus a penalty on the mean scores, which do not change the shares but could saturate."""
        return self._reward(scores) - OFFSET_PENALTY * float(np.square(scores.mean(0)).sum())

    def _draw(self) -> list[SlotProblem]:
        """Return a random cell twice: with the channels that policies observe, and with the present ones.

        Its devices have their best channel to its server; if these are too few, they have it in reach.
        """
        for _ in range(MAX_DRAWS):
            if self._drawn % CELLS_PER_WORLD == 0:
                self._make_world()
            self._drawn += 1
            server = int(self._rng.integers(self._settings.servers))
            for chosen in (self._nearest == server, self._slots[0].in_range[:, server]):
                near = np.flatnonzero(chosen)
                if len(near) >= self._devices:
                    drawn = self._rng.choice(near, self._devices, replace=False)
                    return [slot.cell(server, drawn) for slot in self._slots]
        raise UserError(f"no server has {self._devices} devices in reach, which training needs")

    def _make_world(self) -> None:
        devices, age = max(self._settings.devices, self._devices), self._settings.channel_age
        chosen = replace(self._settings, slots=1 + age, devices=devices)
        world = make_world(chosen, int(self._rng.integers(2**31)))
        speeds = np.exp(self._rng.uniform(-SPEEDS, SPEEDS, chosen.servers))
        world = replace(world, pass_ms=world.pass_ms * speeds)
        self._slots = [world.problem(slot, np.zeros(chosen.servers), world.battery) for slot in (0, age)]
        self._nearest = max_sinr(self._slots[0], self._rng)
