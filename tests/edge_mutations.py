"""Mistakes in `outpace edge`: each must fail a test of the suite, named here."""

from __future__ import annotations

from mutation_checks import Original
from part_mutations import mutation

from outpace.core import theory
from outpace.studies.edge.policies import _Cells
from outpace.studies.edge.world import EdgeWorld


def without_floor(shares: Original) -> Original:
    def mutated(self: _Cells, *prices: object) -> object:
        self._floor = 0.0 * self._floor + 1e-12
        return shares(self, *prices)

    return mutated


EDGE_MUTATIONS = [
    mutation(
        "edge: shares ignore the time of drafting",
        _Cells,
        "_shares",
        without_floor,
        "test_edge.py::test_a_device_with_long_drafts_gets_what_it_needs_and_no_more",
    ),
    mutation(
        "edge: queues end with their slot",
        EdgeWorld,
        "queue_after",
        lambda after: lambda self, queue, *given: after(self, 0.0 * queue, *given),
        "test_edge.py::test_queues_and_batteries_carry_over",
    ),
    mutation(
        "theory: PEARL verifies one token a step",
        theory,
        "pearl_tokens",
        lambda tokens: lambda acceptances, gamma: tokens(acceptances, 1),
        "test_theory.py::test_pearls_tokens_by_position",
    ),
]
