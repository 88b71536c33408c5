"""Mistakes in draft steps that a device takes by itself: each must fail a test of the suite, named here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing
from test_draft_steps import keyed_one_further, sees_itself_alone

from outpace.core.multi_step import RootUpdateChannel
from outpace.drafters._multi_step import InFlightSteps, MultiStepCache
from outpace.models.llama.cuda.multi_step_runtime import SteppingLlama
from outpace.models.llama.cuda.step_choice import NodeSelection

ALIKE = "test_draft_steps.py::test_several_steps_grow_the_tree_of_single_ones"
TOLD = "test_turning_steps.py::test_steps_that_are_told_go_where_the_target_went"


def anywhere(towards: Original) -> Original:
    def mutated(choice: NodeSelection, goal: Any, step: int) -> Any:
        towards(choice, goal, step)
        return choice._scores

    return mutated


def of_any_root(follow: Original) -> Original:
    def mutated(steps: InFlightSteps, path: Sequence[int], tokens: Sequence[int], root_id: int) -> Any:
        return follow(steps, [steps._root, *path[1:]], tokens, root_id)

    return mutated


STEP_MUTATIONS: list[Mutation] = [
    mutation("steps: a node sees itself alone", NodeSelection, "best", sees_itself_alone, ALIKE),
    mutation("steps: noise is that of the next position", SteppingLlama, "_propose", keyed_one_further, ALIKE),
    mutation("steps: nobody tells them where the target went", RootUpdateChannel, "send", nothing, TOLD),
    mutation("steps: told where the target went, they go on as before", NodeSelection, "_towards", anywhere, TOLD),
    mutation("steps: what they expanded below a new root is lost", MultiStepCache, "claim", nothing, TOLD),
    mutation(
        "steps: what is said of an older root is heard",
        InFlightSteps,
        "_follow",
        of_any_root,
        "test_turning_steps.py::test_what_is_said_of_another_root_is_not_heard",
    ),
]
