"""Divide each server by scores of a trained actor: shares are the softmax of the scores within the cell.

The actor observes the features of one device, their means over its cell, and the number of devices. The features are
ratios of times, so that it also works in cells of other sizes and speeds than it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError, require
from outpace.studies.edge.problem import ALONE, Assignment, SlotProblem

OWN = 4  # features of a device
OBSERVATIONS = 2 * OWN + 1  # also their means over the cell, and the number of devices
SCORES = 2  # for band and compute
SPREAD = 2.0  # a score of 1 gives e^2 times the share of a score of 0
LIMIT = 8.0  # features are clipped to [-8, 8]


def observe(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Return the observations of the devices, [devices, OBSERVATIONS]; zeros for those without a server.

    A device's features are three logarithms of ratios and a fraction: its drafting time beyond the server's queue over
    the time of link and pass with equal shares; link over pass; its weight over the cell's geometric mean; and the
    fraction of an equal share, at most 1, with which it would not wait for the server.
    """
    seen = np.zeros((len(server), OBSERVATIONS), dtype=np.float32)
    served = np.flatnonzero(server != ALONE)
    cell = server[served]
    counts = problem.counts(server)[cell]
    link, verify = problem.link[served, cell], problem.verify[cell]
    floor = np.maximum(problem.draft[served] - problem.queue[cell], 1e-3)
    waits = counts * (link + verify)  # with equal shares
    weight = np.log(problem.weight[served])
    weight -= _means(weight[:, None], cell, counts)[:, 0]
    own = np.stack([np.log(floor / waits), np.log(link / verify), weight, np.minimum(1.0, waits / floor)], axis=1)
    seen[served] = np.hstack([own, _means(own, cell, counts), 3.0 / counts[:, None]])
    return np.clip(seen, -LIMIT, LIMIT)


def _means(values: np.ndarray, cell: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each column's mean over the device's cell [devices, columns]."""
    sums = np.stack([np.bincount(cell, column) for column in values.T], axis=1) if len(cell) else values
    return sums[cell] / counts[:, None]


def from_scores(problem: SlotProblem, server: np.ndarray, scores: np.ndarray) -> Assignment:
    """Turn scores in [-1, 1], [devices, SCORES], into shares that sum to 1 at each server."""
    weights = np.exp(SPREAD * scores.astype(float))
    cell = np.where(server == ALONE, len(problem.verify), server)
    shares = weights / np.stack([np.bincount(cell, column) for column in weights.T], axis=1)[cell]
    shares[server == ALONE] = 1.0
    return Assignment(server, shares[:, 0], shares[:, 1])


def load(file: Path) -> Callable[[SlotProblem, np.ndarray], Assignment]:
    """Load a policy that `outpace edge --train` wrote; UserError if it is damaged or made for other observations."""
    require("a learned policy", "edge", "stable_baselines3", "gymnasium")
    if not file.is_file():
        raise UserError(f"policy is {file}, which is no file; --train {file} makes one")
    from stable_baselines3 import SAC

    try:
        model: Any = SAC.load(file, device="cpu")
        shapes = model.observation_space.shape, model.action_space.shape
    except Exception as error:  # the library raises what its unpickling raises
        raise UserError(f"policy is {file}, which is no policy of --train ({type(error).__name__}: {error})") from error
    if shapes != ((OBSERVATIONS,), (SCORES,)):
        raise UserError(
            f"policy is {file}, which sees {shapes[0]} values and gives {shapes[1]}; allowed are"
            f" {OBSERVATIONS} and {SCORES}: train it again with --train"
        )
    if not all(bool(weights.isfinite().all()) for weights in model.policy.parameters()):
        raise UserError(f"policy is {file}, which has weights that are not finite: train it again with --train")

    def divide(problem: SlotProblem, server: np.ndarray) -> Assignment:
        scores, _ = model.predict(observe(problem, server), deterministic=True)
        return from_scores(problem, server, scores)

    return divide
