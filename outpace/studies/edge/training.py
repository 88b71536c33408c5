"""Trains learned shares by soft actor-critic: one actor for all devices, trained on cells of several sizes at once.

Haarnoja et al., arXiv:1801.01290, by stable-baselines3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from outpace.core.errors import UserError
from outpace.studies.edge.settings import EdgeSettings

from .environment import CellEnvironment

SIZES = range(3, 13)  # numbers of devices in the cells to train on
GRADIENT_STEPS = 3  # after each step of all cells
BATCH = 512
LEARNING_RATE = 1e-3  # falls to 0 over the training
ENTROPY = "auto_0.02"  # initial weight of the entropy: from the library's 1, its decay takes longer than a training


def train(
    settings: EdgeSettings, file: Path, minutes: float, seed: int, progress: Callable[[float], None] = lambda done: None
) -> None:
    """Train for `minutes` of CPU time and write the policy to `file`. `progress` receives the fraction that is done."""
    cells = [CellEnvironment(settings, size, seed + number) for number, size in enumerate(SIZES)]
    deadline = Deadline(60.0 * minutes, progress)
    model = SAC(
        "MlpPolicy",
        SharedActorCells(cells),
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


class SharedActorCells(VecEnv):
    """Several cells as a vector of environments, one for each device, that share an actor.

    Rewards are difference rewards, times the number of devices, because a device's effect on its cell's mean falls
    with that number.
    """

    def __init__(self, cells: Sequence[CellEnvironment]) -> None:
        self._cells = cells
        agents = sum(len(cell.possible_agents) for cell in cells)
        super().__init__(agents, cells[0].observation_space(""), cells[0].action_space(""))

    def reset(self) -> np.ndarray:
        """Start a new episode in every cell."""
        return np.stack([seen for cell in self._cells for seen in cell.reset()[0].values()])

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step every cell. All episodes end; the observations returned are those of the next episodes."""
        left = iter(self._actions)
        rewards: list[float] = []
        last: list[np.ndarray] = []
        for cell in self._cells:
            seen, *_, infos = cell.step({agent: next(left) for agent in cell.agents})
            rewards += (len(seen) * info["difference"] for info in infos.values())
            last += seen.values()
        ends = [{"terminal_observation": seen, "TimeLimit.truncated": False} for seen in last]
        return self.reset(), np.array(rewards, dtype=np.float32), np.ones(self.num_envs, dtype=bool), ends

    def close(self) -> None:
        """Do nothing: cells hold no resources."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise NotImplementedError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


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
