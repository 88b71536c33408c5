"""Divide each server equally among its devices."""

from __future__ import annotations

import numpy as np

from outpace.studies.edge.problem import Assignment, SlotProblem


def divide(problem: SlotProblem, server: np.ndarray) -> Assignment:
    """Give each of n devices 1 / n of the band and the compute."""
    share = 1.0 / np.maximum(problem.counts(server), 1)[server]
    return Assignment(server, share, share)
