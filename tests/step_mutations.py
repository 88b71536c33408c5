"""Mistakes in multi-step drafting, where one graph runs several draft steps: each must fail the named test."""

from __future__ import annotations

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing

from outpace.drafters._multi_step import MultiStepCache
from outpace.models.llama.cuda import step_choice
from outpace.models.llama.cuda.multi_step_runtime import SteppingLlama
from outpace.models.llama.cuda.step_choice import NodeSelection, own_bit

OUTLIVE = "test_draft_steps.py::test_steps_taken_ahead_outlive_a_correction"
ALIKE = "test_draft_steps.py::test_several_steps_grow_the_tree_of_single_ones"


def sees_itself_alone(best: Original) -> Original:
    return lambda choice, slots: best(choice, slots)._replace(bits=own_bit(slots))


def keyed_one_further(propose: Original) -> Original:
    return lambda model, bucket, inputs, nodes, *rest: propose(
        model, bucket, inputs, nodes._replace(depths=nodes.depths + 1), *rest
    )


def in_order_of_tokens(best: Original) -> Original:
    return lambda values, count: tuple(part.flip(-1) for part in best(values, count))


STEP_MUTATIONS: list[Mutation] = [
    mutation("multi-step: a node attends only to itself", NodeSelection, "best", sees_itself_alone, ALIKE),
    mutation("multi-step: noise of the next position is used", SteppingLlama, "_propose", keyed_one_further, ALIKE),
    mutation("multi-step: children in reverse order", step_choice, "stable_top_k", in_order_of_tokens, ALIKE),
    mutation("multi-step: nodes expanded below a new root are lost", MultiStepCache, "claim", nothing, OUTLIVE),
]
