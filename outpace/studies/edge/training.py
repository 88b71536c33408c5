"""Trains learned shares by soft actor-critic: one actor for all devices, trained on cells of several sizes at once.

A cell is a server and its devices. An episode is one step, because shares do not affect what follows: each device
observes its own features and their means over the cell, with `channel_age` 1 those of the previous slot, and acts by
two scores, for band and compute. Haarnoja et al., arXiv:1801.01290, by stable-baselines3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from outpace.core.errors import UserError
from outpace.studies.edge.associations import max_sinr
from outpace.studies.edge.settings import EdgeSettings
from outpace.studies.edge.shares import LIMIT, OBSERVATIONS, SCORES, divide_equally, from_scores, observe
from outpace.studies.edge.world import make_world

CELLS_PER_WORLD = 30  # cells drawn from one world before the next world is made
MAX_DRAWS = 50 * CELLS_PER_WORLD
OFFSET_PENALTY = 1.0  # factor of the squared mean scores that is subtracted from a reward
SPEEDS = 0.7  # servers are up to e^0.7 times as fast or slow, which prepares for cells of other sizes
SIZES = range(3, 13)  # numbers of devices in the cells to train on
GRADIENT_STEPS = 3  # after each step of all cells
BATCH = 512
LEARNING_RATE = 1e-3  # falls to 0 over the training
ENTROPY = "auto_0.02"  # initial weight of the entropy: from the library's 1, its decay takes longer than a training


class Cell:
    """Draws a server and a fixed number of devices for which it is the best one, and rewards their scores."""

    def __init__(self, settings: EdgeSettings, devices: int, seed: int) -> None:
        self._settings, self._devices = settings, devices
        self._here = np.zeros(devices, dtype=int)
        self._rng, self._drawn = np.random.default_rng(seed), 0

    def draw(self) -> np.ndarray:
        """Draw the next cell and return the observations [devices, OBSERVATIONS].

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
                    self.known, self.actual = (slot.cell(server, drawn) for slot in self._slots)
                    self._equal = self.actual.evaluate(divide_equally(self.known, self._here)).cost.mean()
                    return observe(self.known, self._here)
        raise UserError(f"no server has {self._devices} devices in reach, which training needs")

    def _make_world(self) -> None:
        devices, age = max(self._settings.devices, self._devices), self._settings.channel_age
        chosen = replace(self._settings, slots=1 + age, devices=devices)
        world = make_world(chosen, int(self._rng.integers(2**31)))
        speeds = np.exp(self._rng.uniform(-SPEEDS, SPEEDS, chosen.servers))
        world = replace(world, pass_ms=world.pass_ms * speeds)
        self._slots = [world.problem(slot, np.zeros(chosen.servers), world.battery) for slot in (0, age)]
        self._nearest = max_sinr(self._slots[0], self._rng)

    def reward(self, scores: np.ndarray) -> float:
        """Return the logarithm of the cell's cost with equal shares over its cost with the shares of these scores."""
        cost = self.actual.evaluate(from_scores(self.known, self._here, scores)).cost.mean()
        return float(np.log(self._equal / cost))

    def differences(self, scores: np.ndarray) -> np.ndarray:
        """Return each device's difference reward: the cell's minus the one if this device had given scores of 0.

        Wolpert and Tumer, 2001. Except for the penalty it has the gradient of the cell's reward.
        """
        without = [scores * (np.arange(self._devices) != number)[:, None] for number in range(self._devices)]
        return self._penalised(scores) - np.array([self._penalised(others) for others in without])

    def _penalised(self, scores: np.ndarray) -> float:
        """Return the reward minus a penalty on the mean scores, which do not change the shares but could saturate."""
        return self.reward(scores) - OFFSET_PENALTY * float(np.square(scores.mean(0)).sum())


class Device(gymnasium.Env):
    """One device of a cell: the spaces of its observations and scores. `SharedActorCells` resets and steps it."""

    observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (OBSERVATIONS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (SCORES,), np.float32)


class SharedActorCells(DummyVecEnv):
    """Several cells as a vector of environments, one for each device, that share an actor.

    Rewards are difference rewards, times the number of devices, because a device's effect on its cell's mean falls
    with that number.
    """

    def __init__(self, settings: EdgeSettings, sizes: Sequence[int] = SIZES, seed: int = 0) -> None:
        self._cells = [Cell(settings, size, seed + number) for number, size in enumerate(sizes)]
        self._ends = np.cumsum(sizes)
        super().__init__([Device] * sum(sizes))

    def reset(self) -> np.ndarray:
        """Start a new episode in every cell."""
        return np.concatenate([cell.draw() for cell in self._cells])

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, object]]]:
        """Step every cell. All episodes end; the observations returned are those of the next episodes."""
        scores = np.split(np.clip(self.actions, -1.0, 1.0), self._ends[:-1])
        rewards = [len(own) * cell.differences(own) for cell, own in zip(self._cells, scores, strict=True)]
        infos: list[dict[str, object]] = [{} for _ in range(self.num_envs)]
        return self.reset(), np.concatenate(rewards).astype(np.float32), np.ones(self.num_envs, dtype=bool), infos


def train(
    settings: EdgeSettings, file: Path, minutes: float, seed: int, progress: Callable[[float], None] = lambda done: None
) -> None:
    """Train for `minutes` of CPU time and write the policy to `file`. `progress` receives the fraction that is done."""
    deadline = Deadline(60.0 * minutes, progress)
    model = SAC(
        "MlpPolicy",
        SharedActorCells(settings, seed=seed),
        learning_rate=lambda _: LEARNING_RATE * deadline.left(),
        buffer_size=100_000,
        learning_starts=1_000,
        batch_size=BATCH,
        ent_coef=ENTROPY,
        gamma=0.0,  # an episode is one step, so target networks are never used
        target_update_interval=10**9,
        gradient_steps=GRADIENT_STEPS,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    model.learn(total_timesteps=10**12, callback=deadline)
    try:
        model.save(file, exclude=["learning_rate", "lr_schedule"])  # these functions read this training's clock
    except OSError as error:
        raise UserError(f"the policy cannot be written to {file} ({error.strerror})") from error


class Deadline(BaseCallback):
    """Ends training after `seconds` of CPU time."""

    def __init__(self, seconds: float, progress: Callable[[float], None]) -> None:
        super().__init__()
        self._seconds, self._progress, self._start = seconds, progress, time.process_time()

    def left(self) -> float:
        """Return the fraction of the time that is left."""
        return max(1.0 - (time.process_time() - self._start) / self._seconds, 0.0)

    def _on_step(self) -> bool:
        self._progress(1.0 - self.left())
        return self.left() > 0.0
