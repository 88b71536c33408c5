"""Assign one device after another, those with the fewest servers first, where the sum of all costs grows least."""

from __future__ import annotations

import numpy as np

from outpace.edge.problem import ALONE, SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Compare servers by the device's own cost plus what it adds to the costs of the devices already there."""
    server = np.full(len(problem.draft), ALONE)
    counts = np.zeros(len(problem.verify), dtype=int)
    here = problem.equal_costs(counts)  # the costs at the present numbers of devices
    for device in np.lexsort((problem.link.min(1), problem.reach.sum(1))):
        if not problem.reach[device].any():
            continue
        after, members = problem.equal_costs(counts + 1), problem.members(server)
        growth = np.where(members, after, 0.0).sum(0) - np.where(members, here, 0.0).sum(0) + after[device]
        chosen = int(growth.argmin())
        server[device], here[:, chosen] = chosen, after[:, chosen]
        counts[chosen] += 1
    return server
