"""Mistakes in mixtures of experts: each must fail the named test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from part_mutations import mutation

from outpace.models.llama.torch import experts
from outpace.models.llama.torch.attention import ExactAttention
from outpace.models.llama.torch.experts import ExpertProduct, ExpertWeights

FORMULA = "test_experts.py::test_the_mixture_is_that_of_the_formula"
BRANCHES = "test_experts.py::test_trees_and_batches_give_the_bits_of_their_branches"
LOGITS = "test_experts.py::test_logits_are_those_of_transformers"
TIES = "test_experts.py::test_ties_go_to_the_lower_number_and_a_correction_only_chooses"


def not_normed(choose: Original, logits: Any, sizes: Any, correction: Any) -> Any:
    return choose(logits, replace(sizes, norms_weights=False), correction)


def in_another_order(choose: Original, logits: Any, *rest: Any) -> Any:
    """Add the experts of every second row of a pass in falling order."""
    ids, weights = choose(logits, *rest)
    ids[1::2], weights[1::2] = ids[1::2].flip(1), weights[1::2].flip(1)
    return ids, weights


def of_another_row(apply: Original, product: Any, rows: Any, *rest: Any) -> Any:
    return apply(product, rows.roll(1, 0), *rest)


def unsorted_ties(choose: Original, logits: Any, *rest: Any) -> Any:
    ids, weights = choose(logits.flip(1), *rest)
    return (logits.shape[1] - 1 - ids).flip(1), weights.flip(1)


def unlimited(activate: Original, weights: Any, *rest: Any) -> Any:
    return activate(replace(weights, sizes=replace(weights.sizes, limit=1000000.0)), *rest)


def without_sinks(attend: Original, attention: Any, *rest: Any) -> None:
    attention._sinks = None
    attend(attention, *rest)


EXPERT_MUTATIONS: list[Mutation] = [
    mutation("experts: weights not normed", experts, "choose", not_normed, FORMULA),
    mutation("experts: another order of sums in every second row", experts, "choose", in_another_order, BRANCHES),
    mutation("experts: an expert's row of another token", ExpertProduct, "__call__", of_another_row, FORMULA),
    mutation("experts: ties go to the higher number", experts, "choose", unsorted_ties, TIES),
    mutation("experts: gates without a limit", ExpertWeights, "_activate", unlimited, FORMULA),
    mutation("experts: no attention sinks", ExactAttention, "attend", without_sinks, LOGITS),
]
