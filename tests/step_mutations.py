"""Mistakes in draft steps that a device takes by itself: each must fail a test of the suite, named here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation, nothing

from outpace.core.steps import Mail
from outpace.drafters._ahead import Burst
from outpace.drafters._under_way import UnderWay
from outpace.models.llama.graph_steps import SteppingLlama
from outpace.models.llama.step_choice import Choice, Nodes
from outpace.models.llama.step_mail import own_bit

ALIKE = "test_draft_steps.py::test_several_steps_grow_the_tree_of_single_ones"
TOLD = "test_turning_steps.py::test_steps_that_are_told_go_where_the_target_went"


def sees_itself_alone(best: Original) -> Original:
    def mutated(choice: Choice, step: int, slots: Any) -> Nodes:
        nodes: Nodes = best(choice, step, slots)
        return nodes._replace(bits=own_bit(slots))

    return mutated


def one_deeper(proposed: Original) -> Original:
    def mutated(model: Any, sizes: Any, given: Any, nodes: Nodes, *rest: Any) -> Any:
        return proposed(model, sizes, given, nodes._replace(depths=nodes.depths + 1), *rest)

    return mutated


def anywhere(towards: Original) -> Original:
    def mutated(choice: Choice, goal: Any, step: int) -> Any:
        towards(choice, goal, step)
        return choice._scores

    return mutated


def of_any_root(follow: Original) -> Original:
    def mutated(steps: UnderWay, path: Sequence[int], tokens: Sequence[int], root_id: int) -> Any:
        return follow(steps, [steps._root, *path[1:]], tokens, root_id)

    return mutated


STEP_MUTATIONS: list[Mutation] = [
    mutation("steps: a node sees itself alone", Choice, "best", sees_itself_alone, ALIKE),
    mutation("steps: noise is that of the next position", SteppingLlama, "_proposed", one_deeper, ALIKE),
    mutation("steps: nobody tells them where the target went", Mail, "send", nothing, TOLD),
    mutation("steps: told where the target went, they go on as before", Choice, "_towards", anywhere, TOLD),
    mutation("steps: what they expanded below a new root is lost", Burst, "claim", nothing, TOLD),
    mutation(
        "steps: what is said of an older root is heard",
        UnderWay,
        "_follow",
        of_any_root,
        "test_turning_steps.py::test_what_is_said_of_another_root_is_not_heard",
    ),
]
