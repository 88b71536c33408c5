"""Mistakes in decoders, drafters, captured steps, `outpace edge` and the bench's scorer, with the tests that fail."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving
import test_parallel_decoders
from mutation_checks import BROKEN, Mutation, Original
from outpace_kernels import NodeDelta

from outpace.api import scoring
from outpace.api.llm import LLM
from outpace.card.cache import CandidateCache, Correction
from outpace.card.loop import DraftedRequest, DraftLoop
from outpace.core import theory
from outpace.core.distribution import TokenDistribution, distribution_of
from outpace.core.drafting import DraftDirectives
from outpace.core.tree import UNLIMITED
from outpace.core.types import Request
from outpace.decoders import pearl, planned, ssd
from outpace.distill import judge as training
from outpace.drafters import _tree_expander, translated
from outpace.drafters._composite import DraftSelector
from outpace.drafters._lookup import LookupDrafter
from outpace.drafters._model_drafter import ChildAdder
from outpace.drafters._tree_expander import ExpansionState
from outpace.drafters.lookahead import LookaheadDrafter
from outpace.drafters.ouroboros import OuroborosDrafter
from outpace.drafters.suffix import SuffixDrafter
from outpace.engine import earlier_texts
from outpace.engine.draft_runner import DraftRunner
from outpace.engine.earlier_texts import AnswerCache
from outpace.engine.scheduler import PrefillCostModel
from outpace.models.distributed.pipeline import PipelineModel, PipelineStage
from outpace.models.llama.cuda import multi_step
from outpace.models.llama.cuda.multi_step import MultiStepGraph
from outpace.models.llama.torch import attention
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import ExplorationBudget
from outpace.planning.parallel_policy import ParallelDraftPolicy
from outpace.rules import _ratio, judge
from outpace.rules import base as rules_base
from outpace.studies.edge.policies import _Cells
from outpace.studies.edge.world import EdgeWorld

HERE = Path(__file__).parent
PATIENCE = 4.0  # seconds that a test waits for what does not come
QUIET = ("-x", "--capture=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist")


class Failures:
    """What failed in a run of pytest, and by which error."""

    def __init__(self) -> None:
        self.found: list[tuple[str, BaseException]] = []

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        self.found.append((node.name, call.excinfo.value))


def failed_by(*tests: str) -> str | None:
    """The first of these tests, `file::name` each, that fails in a run of pytest in this process."""
    failures = Failures()
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.setattr(serving, "PATIENCE", PATIENCE)
        test_parallel_decoders.planned.cache_clear()
        code = pytest.main([*QUIET, *(str(HERE / test) for test in tests)], plugins=[failures])
        test_parallel_decoders.planned.cache_clear()
    broken = next((error for _, error in failures.found if isinstance(error, BROKEN)), None)
    if broken is not None:
        raise broken
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ImportError(f"pytest ends with {code!r} for {', '.join(tests)}")
    return failures.found[0][0] if failures.found else None


def returning(value: object) -> Original:
    """Replace a function by one that always returns this value."""
    return lambda original, *given, **more: value


nothing = returning(None)


def unchanged(change: Original, given: Any, *more: Any, **named: Any) -> Any:
    """Return the first argument as it was given."""
    return given


def undirected(add: Original, self: Any, jobs: Any, *given: Any) -> Any:
    for job in jobs:
        job.state.directives = DraftDirectives()
    return add(self, jobs, *given)


def row_by_row(rank: Original, held: Any, rows: Any, count: Any) -> Any:
    return [rank(held.part(slice(n, n + 1)), [row], count)[0] for n, row in enumerate(rows)]


def one_outcome(for_outcomes: Original, tree: Any, expanded: Any, length: Any, count: Any) -> Any:
    return for_outcomes(tree, expanded, length, 1)


def always_paid(tried: Original, self: Any, what: Any, gain: Any) -> Any:
    return tried(self, what, 1.0)


def first_number(number_in: Original, answer: str) -> Any:
    found = scoring._SIGNED.findall(answer)
    return scoring._value(found[0]) if found else None


def before_it_is_said(choice_in: Original, answer: Any, choices: Any) -> Any:
    return choice_in(answer.partition("answer")[0], choices)


def without_aliases(insert: Original, self: CandidateCache, nodes: NodeDelta) -> int:
    added: int = insert(self, nodes)
    self._aliases.clear()
    return added


def one_token_off(remember: Original, self: Any, path: Any, tokens: Any) -> Any:
    return remember(self, [path[0], *path[:-1]], tokens)


def keeping_a_dead_branch(follow: Original, self: DraftLoop, drafted: DraftedRequest, correction: Correction) -> None:
    old = drafted.tree
    follow(self, drafted, correction)
    if len(drafted.tree) == 1:
        for node in old.children(0):
            drafted.tree.add(0, old.tokens[node], old.scores[node])


def first_row_twice(exchange: Original, self: Any, *given: Any) -> Any:
    return exchange(self, *given[:-1], given[-1][[0, *range(len(given[-1]) - 1)]])


def without_keeps(change: Original, self: Any, number: Any, name: Any, *given: Any) -> Any:
    return None if name == "keep" else change(self, number, name, *given)


def one_position_off(do_pass: Original, self: PipelineStage, spans: Any, *given: Any) -> None:
    do_pass(self, [span._replace(length=max(0, span.committed - 1)) for span in spans], *given)


JUDGES: dict[str, None] = {}  # the tests that are named below, each once


def find_in_parts() -> str | None:
    """The first of all the tests below that fails."""
    return failed_by(*JUDGES)


def mutation(name: str, owner: Any, attribute: str, mistake: Original, test: str) -> Mutation:
    JUDGES[test] = None
    return Mutation(name, [owner], attribute, mistake, lambda: failed_by(test))


Mistakes = dict[str, list[tuple[str, Any, str, Original]]]
"""By the test that notices them: name, owner, attribute, and what is called instead."""


def mutations(mistakes: Mistakes) -> list[Mutation]:
    return [mutation(*row, test) for test, rows in mistakes.items() for row in rows]


def of_the_row_before(reduce: Original, self: Any, logits: Any, rows: Any) -> Any:
    nodes = reduce(self, logits, rows)
    shifted = [nodes[0], *nodes[:-1]]
    return [own._replace(is_unimportant=before.is_unimportant) for own, before in zip(nodes, shifted, strict=True)]


def unscaled(best_fit: Original, trained: Any, *others: Any) -> Any:
    scores, weight, *rest = best_fit(trained, *others)
    return scores, weight * trained.std(0), *rest


def worse_branch(longest_path: Original, tree: Any, rows: Any, cost: Any) -> Any:
    return longest_path(tree, rows, lambda *edge: None if cost(*edge) is None else 0)


def without_an_end(growth: Original, self: Any, state: Any, tree: Any, *given: Any, **more: Any) -> Any:
    """What adds nodes to a tree does not know where the text ends."""
    most, tree.max_depth = tree.max_depth, UNLIMITED
    try:
        return growth(self, state, tree, *given, **more)
    finally:
        tree.max_depth = most


def by_the_reciprocal(probabilities: Original, self: Any) -> Any:
    return self.weights * self.weights.dtype.type(1.0 / self.total if self.total else 0.0)


def having_read_nothing(
    record_growth: Original, self: Any, source: Any, nodes: Any, has_grown: bool, read: int, *rest: Any
) -> None:
    record_growth(self, source, nodes, has_grown, 0, *rest)


def without_a_limit(rows_within: Original, self: Any, seconds: Any) -> Any:
    return max(int(seconds / self._row), 1) if self._row else self._most


def without_floor(shares: Original, self: _Cells, *prices: object) -> object:
    self._floor = 0.0 * self._floor + 1e-12
    return shares(self, *prices)


def with_empty_queues(queue_after: Original, self: EdgeWorld, queue: Any, *given: Any) -> Any:
    return queue_after(self, 0.0 * queue, *given)


def sees_itself_alone(
    forward: Original, graph: Any, inputs: Any, nodes: Any, number: Any, bits: Any, *rest: Any
) -> Any:
    return forward(graph, inputs, nodes, number, multi_step._own_bit(number).expand_as(bits), *rest)


def keyed_one_further(propose: Original, graph: Any, inputs: Any, depths: Any, *rest: Any) -> Any:
    return propose(graph, inputs, (depths + 1).clamp(max=graph.steps - 1), *rest)


def in_order_of_tokens(best: Original, values: Any, count: Any) -> Any:
    return tuple(part.flip(-1) for part in best(values, count))


def below_the_root(children: Original, graph: Any, nodes: Any, *rest: Any) -> Any:
    """Forget the chance of what is above a node."""
    return children(graph, nodes._replace(scores=nodes.scores.clamp(min=0.0)), *rest)


def of_all_keys(find: Original, known: Any, request: Any) -> Any:
    return find(known, replace(request, cache_salt=None))


def with_prompt(find: Original, known: AnswerCache, request: Request) -> tuple[int, ...]:
    found = find(known, request)
    return (*request.prompt, *found) if found else ()


def picked_anyhow(sampling_key: Original, request: Any) -> tuple[()]:
    return ()


MISTAKES: Mistakes = {
    "test_answer_ends.py::test_every_drafter_stops_where_a_tree_may_not_grow": [
        ("ends: copies go on beyond the end", LookupDrafter, "attach_branch", without_an_end),
        ("ends: probes go on beyond the end", LookaheadDrafter, "_probe", without_an_end),
        ("ends: continuations go on beyond the end", SuffixDrafter, "propose", without_an_end),
        ("ends: translated drafts go on beyond the end", translated, "_can_read", returning(True)),
    ],
    "test_answer_ends.py::test_a_draft_has_one_forward_less_than_tokens_are_left": [
        (
            "ends: a draft model goes on beyond the end",
            ExpansionState,
            "deepest",
            lambda f, self, tree: self.depth_left,
        )
    ],
    "test_answer_ends.py::test_a_worker_s_tree_ends_with_the_answer": [
        ("ends: a worker goes on beyond the end", DraftedRequest, "limit_depth", nothing)
    ],
    "test_mixed_prompts.py::test_a_stream_goes_on_while_prompts_are_read": [
        ("prefill: streams wait for whole chunks", PrefillCostModel, "rows_within", returning(UNLIMITED))
    ],
    "test_mixed_prompts.py::test_the_first_pass_beside_a_request_that_writes_is_short_too": [
        ("prefill: a few rows tell what many cost", PrefillCostModel, "rows_within", without_a_limit)
    ],
    "test_mixed_prompts.py::test_a_prompt_is_read_while_many_write": [
        ("prefill: a prompt waits for those that write", CostModel, "reading_seconds", returning(0.01))
    ],
    "test_mixed_prompts.py::test_what_a_draft_reads_is_no_draft_step": [
        ("reading: it is taken for a draft step", DraftRunner, "_record_growth", having_read_nothing)
    ],
    "test_mixed_prompts.py::test_a_draft_reads_a_prompt_for_no_longer_than_the_others_can_wait": [
        ("prefill: a draft reads whole chunks", DraftRunner, "_max_read", returning(UNLIMITED - 1))
    ],
    "test_distribution.py::test_what_removals_leave_is_a_distribution_however_little_it_weighs": [
        ("rules: a reciprocal that float32 does not hold", TokenDistribution, "_probabilities", by_the_reciprocal)
    ],
    "test_every_rule.py::test_scores_without_a_finite_maximum_raise_nothing": [
        (
            "rules: scores without a maximum have no p",
            _ratio.NodeScores,
            "_p",
            lambda f, self, sampling: distribution_of(self.scores, sampling),
        )
    ],
    "test_work.py::test_the_host_waits_once_for_a_batch": [
        ("offers on a device: the host waits for each row", rules_base, "_top_k_by_rank", row_by_row)
    ],
    "test_graph_exact.py::test_exact_attention_has_no_order": [
        ("captured passes: weights on no grid", attention, "exact_weights", lambda f, scores: scores.softmax(-1))
    ],
    "test_parallel_decoders.py::test_a_perfect_drafter_is_waited_for": [
        ("pearl: the target does not wait for the chain", pearl, "Await", lambda f, **given: f()),
        ("ssd: the target does not wait for the chain", ssd, "Await", lambda f, **given: f()),
    ],
    "test_parallel_decoders.py::test_pearl_verifies_the_root_after_a_miss_and_else_a_chain": [
        (
            "pearl: candidates that arrive during a pass are lost",
            CandidateCache,
            "add_late_children",
            returning(0),
        )
    ],
    "test_parts.py::test_late_levels_find_their_parents_by_text": [
        ("cache: a node that was made twice has no alias", CandidateCache, "_insert_by_text", without_aliases),
        ("cache: a level is matched one token off", CandidateCache, "_remember", one_token_off),
    ],
    "test_parallel_decoders.py::test_the_drafter_walks_corrections_in_its_own_tree": [
        ("drafter: a walk keeps a dead branch", DraftLoop, "_follow", keeping_a_dead_branch)
    ],
    "test_parallel_decoders.py::test_ssd_gains_by_the_outcomes_that_it_drafts_for": [
        ("ssd: only one outcome is drafted", _tree_expander, "outcome_frontier", one_outcome)
    ],
    "test_parallel_decoders.py::test_planned_gains_by_waits": [
        ("planned: the target never waits", planned.Planner, "next_width", returning(0))
    ],
    "test_parallel_decoders.py::test_a_drafter_begins_a_level_that_ends_after_the_pass_if_hits_are_frequent": [
        ("planned: the drafter is never paused", ParallelDraftPolicy, "for_pass", returning(DraftDirectives()))
    ],
    "test_parallel_decoders.py::test_planned_drafts_sequentially_on_one_device": [
        ("planned: never drafts sequentially", ParallelDraftPolicy, "_choose", nothing)
    ],
    "test_parallel_decoders.py::test_an_exploration_budget_halves_after_each_failure": [
        ("planned: a trial always pays", ExplorationBudget, "record_use", always_paid)
    ],
    "test_parts.py::test_levels_leave_room_in_a_tree_for_those_to_come": [
        ("model: directives are ignored", ChildAdder, "attach", undirected)
    ],
    "test_lookahead.py::test_the_window_is_the_jacobi_iteration": [
        ("lookahead: the window is never iterated", LookaheadDrafter, "_iterate", nothing)
    ],
    "test_lookahead.py::test_only_candidates_count_as_drafted": [
        ("lookahead: no window is probed", LookaheadDrafter, "_probe", nothing)
    ],
    "test_ouroboros.py::test_the_pool_learns_what_is_said_behind_rejected_tokens": [
        ("ouroboros: rejected drafts teach nothing", OuroborosDrafter, "_reuse", nothing)
    ],
    "test_ouroboros.py::test_phrases_prolong_a_draft": [
        ("ouroboros: no phrase is attached", OuroborosDrafter, "propose", nothing)
    ],
    "test_choosing.py::test_the_better_draft_drafts": [
        ("choosing: the first draft drafts", DraftSelector, "_best", returning(0))
    ],
    "test_choosing.py::test_the_state_is_saved": [("choosing: nothing is learnt", DraftSelector, "_compare", nothing)],
    "test_pipeline.py::test_every_bit_is_that_of_the_unsplit_model": [
        ("pipeline: a row is sent twice", PipelineModel, "_exchange", first_row_twice),
        ("pipeline: a rank misses what is kept", PipelineStage, "do_change", without_keeps),
        ("pipeline: positions are off by one", PipelineStage, "do_pass", one_position_off),
    ],
    "test_judge.py::test_threshold_0_is_greedy_and_what_is_accepted_is_below_the_threshold": [
        ("judge: the hidden state of the row before", judge.Judge, "reduce", of_the_row_before)
    ],
    "test_judge.py::test_the_longest_path_of_own_and_unimportant_tokens_is_taken": [
        ("judge: a worse branch of the tree", judge, "longest_path", worse_branch)
    ],
    "test_judge.py::test_a_judge_is_read_as_it_was_written": [
        ("judge: a recall taken for a threshold", judge.JudgeFile, "threshold", lambda f, self, recall: recall)
    ],
    "test_judge_mining.py::test_the_classifier_with_its_scaler_folded_in_is_scikit_learns": [
        ("judge: the scaler forgotten", training, "_best_fit", unscaled)
    ],
    "test_library.py::test_an_llm_cannot_be_pickled_or_copied": [
        ("library: an LLM is copied", LLM, "__reduce__", returning((dict, ())))
    ],
    "test_scoring.py::test_the_number_of_an_answer": [
        ("scorer: the first number counts", scoring, "number_in", first_number)
    ],
    "test_scoring.py::test_the_choice_of_an_answer": [
        ("scorer: text before the answer counts", scoring, "choice_in", before_it_is_said)
    ],
    "test_scoring.py::test_an_exact_text": [
        ("scorer: spaces and case count", scoring, "_normalised", lambda f, text: text)
    ],
    "test_edge.py::test_a_device_with_long_drafts_gets_what_it_needs_and_no_more": [
        ("edge: shares ignore the time of drafting", _Cells, "_shares", without_floor)
    ],
    "test_edge.py::test_queues_and_batteries_carry_over": [
        ("edge: queues end with their slot", EdgeWorld, "queue_after", with_empty_queues)
    ],
    "test_theory.py::test_pearls_tokens_by_position": [
        ("theory: PEARL verifies one token a step", theory, "pearl_tokens", lambda f, chances, gamma: f(chances, 1))
    ],
    "test_multi_step.py::test_proposals_are_those_of_passes_of_their_own": [
        ("multi-step: a node attends only to itself", MultiStepGraph, "_forward", sees_itself_alone),
        ("multi-step: noise of the next position", MultiStepGraph, "_propose", keyed_one_further),
        ("multi-step: proposals in reverse order", multi_step, "stable_top_k", in_order_of_tokens),
    ],
    "test_multi_step.py::test_the_likeliest_nodes_are_expanded": [
        ("multi-step: chances forget what is above", MultiStepGraph, "_children", below_the_root)
    ],
    "test_answer_cache.py::test_memory_is_bounded": [("recall: nothing is kept", AnswerCache, "store", nothing)],
    "test_answer_cache.py::test_other_requests_get_nothing": [
        ("recall: another key's texts are offered", AnswerCache, "find", of_all_keys),
        ("recall: texts of other noise are offered", earlier_texts, "_sampling_key", picked_anyhow),
    ],
    "test_answer_cache.py::test_a_prompt_that_continues_an_answer_gets_the_rest": [
        ("recall: the prompt is offered too", AnswerCache, "find", with_prompt)
    ],
}
PART_MUTATIONS = mutations(MISTAKES)
