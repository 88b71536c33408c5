"""Mistakes in multi-step drafting, where one graph runs several draft steps: each must fail the named test."""

from __future__ import annotations

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.llama.cuda import multi_step
from outpace.models.llama.cuda.multi_step import MultiStepGraph

PROPOSALS = "test_multi_step.py::test_proposals_are_those_of_passes_of_their_own"
LIKELIEST = "test_multi_step.py::test_the_likeliest_nodes_are_expanded"


def sees_itself_alone(forward: Original) -> Original:
    return lambda graph, inputs, nodes, number, bits, *rest: forward(
        graph, inputs, nodes, number, multi_step._own_bit(number).expand_as(bits), *rest
    )


def keyed_one_further(propose: Original) -> Original:
    return lambda graph, inputs, depths, *rest: propose(graph, inputs, (depths + 1).clamp(max=graph.steps - 1), *rest)


def in_order_of_tokens(best: Original) -> Original:
    return lambda values, count: tuple(part.flip(-1) for part in best(values, count))


def below_the_root(children: Original) -> Original:
    """Forget the chance of what is above a node."""
    return lambda graph, nodes, *rest: children(graph, nodes._replace(scores=nodes.scores.clamp(min=0.0)), *rest)


STEP_MUTATIONS: list[Mutation] = [
    mutation("multi-step: a node attends only to itself", MultiStepGraph, "_forward", sees_itself_alone, PROPOSALS),
    mutation("multi-step: noise of the next position", MultiStepGraph, "_propose", keyed_one_further, PROPOSALS),
    mutation("multi-step: proposals in reverse order", multi_step, "stable_top_k", in_order_of_tokens, PROPOSALS),
    mutation("multi-step: chances forget what is above", MultiStepGraph, "_children", below_the_root, LIKELIEST),
]
