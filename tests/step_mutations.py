"""Mistakes in multi-step drafting, where one graph runs several draft steps: each must fail the named test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing

from outpace.core.multi_step import RootUpdateChannel
from outpace.drafters._multi_step import InFlightSteps, MultiStepCache
from outpace.models.llama.cuda import step_choice
from outpace.models.llama.cuda.multi_step_runtime import SteppingLlama
from outpace.models.llama.cuda.step_choice import NodeSelection, own_bit

ALIKE = "test_draft_steps.py::test_several_steps_grow_the_tree_of_single_ones"
MOVED = "test_root_updates.py::test_later_steps_draft_below_the_new_root"


def sees_itself_alone(best: Original) -> Original:
    return lambda choice, step, slots: best(choice, step, slots)._replace(bits=own_bit(slots))


def keyed_one_further(propose: Original) -> Original:
    return lambda model, bucket, inputs, nodes, *rest: propose(
        model, bucket, inputs, nodes._replace(depths=nodes.depths + 1), *rest
    )


def in_order_of_tokens(best: Original) -> Original:
    return lambda values, count: tuple(part.flip(-1) for part in best(values, count))


def anywhere(towards: Original) -> Original:
    def mutated(choice: NodeSelection, target: Any, step: int) -> Any:
        towards(choice, target, step)
        return choice._scores

    return mutated


def of_any_root(follow: Original) -> Original:
    def mutated(steps: InFlightSteps, path: Sequence[int], tokens: Sequence[int], root_id: int) -> Any:
        return follow(steps, [steps._root, *path[1:]], tokens, root_id)

    return mutated


STEP_MUTATIONS: list[Mutation] = [
    mutation("multi-step: a node attends only to itself", NodeSelection, "best", sees_itself_alone, ALIKE),
    mutation("multi-step: noise of the next position is used", SteppingLlama, "_propose", keyed_one_further, ALIKE),
    mutation("multi-step: children in reverse order", step_choice, "stable_top_k", in_order_of_tokens, ALIKE),
    mutation("multi-step: root updates are not sent", RootUpdateChannel, "send", nothing, MOVED),
    mutation("multi-step: root updates are ignored", NodeSelection, "_towards", anywhere, MOVED),
    mutation("multi-step: nodes expanded below a new root are lost", MultiStepCache, "claim", nothing, MOVED),
    mutation(
        "multi-step: an update of an older root is applied",
        InFlightSteps,
        "_follow",
        of_any_root,
        "test_root_updates.py::test_an_update_of_another_root_is_ignored",
    ),
]
