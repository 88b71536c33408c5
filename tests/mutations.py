"""Named mistakes, put into the library one at a time: the losslessness checks must notice every one.

Run `python tests/mutations.py` for the table; exit status 1 if a mistake survives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from encoder_decoder_mutations import ENCODER_DECODER_MUTATIONS
from expert_mutations import EXPERT_MUTATIONS
from file_mutations import FILE_MUTATIONS
from forecast_mutations import FORECAST_MUTATIONS
from gemma_mutations import GEMMA_MUTATIONS
from head_mutations import HEAD_MUTATIONS
from mutation_checks import Mutation, Original, find_difference, judge
from option_checks import find_in_memory, find_in_options, find_in_rejection
from option_mutations import OPTION_MUTATIONS, key_without
from outpace_kernels import NodeDelta
from part_mutations import PART_MUTATIONS, find_in_parts
from planner_mutations import PLANNER_MUTATIONS
from recurrent_mutations import RECURRENT_MUTATIONS
from rich.console import Console
from rich.table import Table
from rule_mutations import RULE_MUTATIONS
from server_mutations import SERVER_MUTATIONS
from skip_mutations import SKIP_MUTATIONS, find_in_skipping

from outpace.card import cache
from outpace.core import types
from outpace.core.sampling import Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Row, Verdict
from outpace.engine import sequence as running
from outpace.engine import target_runner
from outpace.models import base as models
from outpace.rules import gumbel, match
from outpace.rules.greedy import Greedy


def walked(tree: TokenTree, picks: Sequence[int], step: Callable[[int], int | None]) -> list[int]:
    """The path of a walk that goes from every node with a row to `step(node)`."""
    path = [0]
    while path[-1] < len(picks) and (child := step(path[-1])) is not None:
        path.append(child)
    return path


def ends(path: list[int], picks: Sequence[int]) -> Verdict:
    return Verdict(path, picks[path[-1]] if path[-1] < len(picks) else None)


def drop_own_token(after_rejection: bool) -> Original:
    def drop(commit: Original, run: Any, tree: TokenTree, verdict: Verdict, drafted: int) -> Any:
        rejected = bool(tree.children(verdict.path[-1]))
        if len(verdict.path) > 1 and verdict.next_token is not None and rejected == after_rejection:
            verdict = verdict._replace(next_token=None)
        return commit(run, tree, verdict, drafted)

    return drop


def shift_scores(reduce_apart: Original, logits: Any, rows: Sequence[Row]) -> list[int]:
    picks = reduce_apart(logits, rows)
    return picks[1:] + picks[:1]


def swap_requests(reduce_apart: Original, logits: Any, rows: Sequence[Row]) -> list[int]:
    picks = reduce_apart(logits, rows)
    first = {id(row.request): number for number, row in reversed(list(enumerate(rows)))}
    places = sorted(first.values())
    for place, pick in zip(places, [picks[p] for p in places[1:] + places[:1]], strict=True):
        picks[place] = pick
    return picks


def key_by_call_order() -> Original:
    calls = iter(range(1 << 62))
    return lambda keyed, seed, choice, position: keyed(seed, choice, next(calls))


def hang_dead_on_root(insert: Original, self: Any, level: Any) -> int:
    root, known, moved = self._tree.ids[0], {*self._tree.ids}, []
    ids, parents, *others = level.nodes
    for node_id, parent in zip(ids, parents, strict=True):
        moved.append(parent if parent in known else root)
        known.add(node_id)
    return insert(self, level._replace(nodes=NodeDelta((ids, moved, *others))))


def orphans() -> str | None:
    """Return what is wrong if a candidate whose parent is gone is offered to the target."""
    candidates = cache.CandidateCache(0)
    candidates.insert(cache.CandidateLevel(0, NodeDelta(((1,), (9,), (5,), (0,), (-0.1,)))))
    found = candidates.query(8).tokens
    return None if [*found] == [0] else f"the target is offered {found}"


def keep_wrong_node(keep: Original, self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
    others = [node for node in range(self.pending) if node not in path]
    if len(path) > 1 and others:
        path = [*path[:-1], others[0]]
    keep(self, path, live)


def keep_root_only(keep: Original, self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
    keep(self, path if len(path) == self.pending else path[:1], live)


def keep_no_prompt(keep: Original, self: Any, path: Sequence[int], live: Sequence[int] = ()) -> None:
    keep(self, () if isinstance(path, range) else path, live)


def see_siblings(extend: Original, self: Any, parents: Sequence[int]) -> np.ndarray:
    sees = extend(self, parents).copy()
    before = sees.shape[1] - sees.shape[0]
    for node in range(sees.shape[0]):
        sees[node, : before + node + 1] = True
    return sees


def positions_off_by_one(tree_rows: Original, *tree: Any) -> Any:
    return [row._replace(path=(*row.path, *row.path[-1:])) for row in tree_rows(*tree)]


def accept_any_child(walk: Original, rule: Any, tree: TokenTree, picks: Sequence[int]) -> Verdict:
    return ends(walked(tree, picks, lambda node: next(iter(tree.children(node)), None)), picks)


def accept_any_late_child(walk: Original, rule: Any, tree: TokenTree, picks: Sequence[int]) -> Verdict:
    def step(node: int) -> int | None:
        late = (child for child in tree.children(node) if child >= len(picks))
        child = tree.child(node, picks[node])
        return child if child is not None else next(late, None)

    return ends(walked(tree, picks, step), picks)


def late() -> str | None:
    """Return what is wrong if a late child whose token is not the pick is accepted."""
    tree = TokenTree(1)
    tree.add(0, 5, -0.1)  # came after the root was verified
    path = Greedy().walk(tree, [7]).path
    return None if path == [0] else f"the path is {path}"


def recover_from_root(walk: Original, rule: Any, tree: TokenTree, picks: Sequence[int]) -> Verdict:
    verdict: Verdict = walk(rule, tree, picks)
    return verdict if verdict.next_token is None else Verdict(verdict.path, picks[0])


def ignore_stop(commit: Original, run: Any, tree: TokenTree, verdict: Verdict, drafted: int) -> Any:
    """All tokens of the round in which a stop token ends the text, also those behind it."""
    before, tokens = len(run.committed), [tree.tokens[node] for node in verdict.path[1:]]
    result = commit(run, tree, verdict, drafted)
    if run.finish_reason == "stop":
        run.committed[before:] = tokens if verdict.next_token is None else [*tokens, verdict.next_token]
    return result


def allow_one_more(commit: Original, run: Any, *given: Any) -> Any:
    asked = run.request
    run.request = replace(asked, max_tokens=asked.max_tokens + 1)
    try:
        return commit(run, *given)
    finally:
        run.request = asked


def reroot_at_sibling(move: Original, self: Any, root: int | None, token: int) -> None:
    if root is not None and root:
        siblings = self._tree.children(self._tree.parents[root])
        root = siblings[(siblings.index(root) + 1) % len(siblings)]
    move(self, root, token)


def reroot_at_grandchild(move: Original, self: Any, root: int | None, token: int) -> None:
    below = [] if root is None else self._tree.children(root)
    move(self, below[0] if below else root, token)


def skip_an_ancestor(best_copy: Original, tree: TokenTree, count: int) -> TokenTree:
    nodes = tree.best(count)
    inner = [node for node in nodes[1:] if any(child in nodes for child in tree.children(node))]
    return tree.copy([node for node in nodes if node not in inner[:1]])


def unfiltered(processed: Original, logits: Any, samplings: Any) -> Any:
    return processed(logits, [Sampling(s.temperature) for s in samplings])


def without_temperature(processed: Original, logits: Any, samplings: Any) -> Any:
    return processed(logits, [Sampling(1.0, s.top_k, s.top_p, s.min_p) for s in samplings])


MUTATIONS = [
    Mutation("drop the recovery token", [running.TokenSequence], "commit", drop_own_token(True)),
    Mutation("drop the bonus token", [running.TokenSequence], "commit", drop_own_token(False)),
    Mutation("shift scores by one", [target_runner], "reduce_isolated", shift_scores),
    Mutation("batch rows handed to the wrong request", [target_runner], "reduce_isolated", swap_requests),
    Mutation("gumbel: reuse noise across seeds", [types], "row_key", key_without(0)),
    Mutation("gumbel: reuse noise across choices", [types], "row_key", key_without(1)),
    Mutation("gumbel: reuse noise across positions", [types], "row_key", key_without(2)),
    Mutation("gumbel: noise keyed by call order", [types], "row_key", key_by_call_order()),
    Mutation("match: reuse noise across choices", [match], "uniform", key_without(1)),
    Mutation("match: reuse noise across positions", [match], "uniform", key_without(2)),
    Mutation("match: noise keyed by call order", [match], "uniform", key_by_call_order()),
    Mutation("accept a dead child (hung on the root)", [cache.CandidateCache], "insert", hang_dead_on_root, orphans),
    Mutation("keep a wrong path", [models.Session], "keep", keep_wrong_node),
    Mutation("forget to keep the accepted path", [models.Session], "keep", keep_root_only),
    Mutation("forget to keep the prompt's pieces", [models.Session], "keep", keep_no_prompt),
    Mutation("tree mask sees siblings", [models.Session], "extend", see_siblings),
    Mutation("positions off by one in rows", [target_runner], "tree_rows", positions_off_by_one),
    Mutation("accept a child without looking at its token", [types.Rule], "walk", accept_any_child),
    Mutation("accept a late child whose token differs", [types.Rule], "walk", accept_any_late_child, late),
    Mutation("recovery token taken from the root's row", [types.Rule], "walk", recover_from_root),
    Mutation("text after the stop token", [running.TokenSequence], "commit", ignore_stop),
    Mutation("text after max_tokens", [running.TokenSequence], "commit", allow_one_more),
    Mutation("correct() re-roots at a sibling", [cache.CandidateCache], "_move", reroot_at_sibling),
    Mutation("correct() re-roots at a grandchild", [cache.CandidateCache], "_move", reroot_at_grandchild),
    Mutation("query not closed under ancestors", [TokenTree], "best_copy", skip_an_ancestor),
    Mutation("gumbel: p unfiltered in reduce", [gumbel], "log_probs", unfiltered),
    Mutation("match: p unfiltered in reduce", [match], "log_probs", unfiltered),
    Mutation("gumbel: p without temperature in reduce", [gumbel], "log_probs", without_temperature),
    *OPTION_MUTATIONS,
    *PLANNER_MUTATIONS,
    *RULE_MUTATIONS,
    *PART_MUTATIONS,
    *SERVER_MUTATIONS,
    *FILE_MUTATIONS,
    *SKIP_MUTATIONS,
    *FORECAST_MUTATIONS,
    *HEAD_MUTATIONS,
    *EXPERT_MUTATIONS,
    *RECURRENT_MUTATIONS,
    *GEMMA_MUTATIONS,
    *ENCODER_DECODER_MUTATIONS,
]


def main() -> int:
    """Prints the table; 1 if any mistake survives, or if the library fails without one."""
    console = Console(width=150)
    finders = (find_difference, find_in_options, find_in_rejection, find_in_memory, find_in_parts)
    finders = (*finders, find_in_skipping)
    unmutated = next((found for find in finders if (found := find()) is not None), None)
    if unmutated is not None:
        console.print(f"the unmutated library fails: {unmutated}")
        return 1
    table = Table("mutation", "verdict", "by")
    verdicts = [(mutation, *judge(mutation)) for mutation in MUTATIONS]
    for mutation, caught, by in verdicts:
        table.add_row(mutation.name, "caught" if caught else "[bold red]SURVIVED", by)
    console.print(table)
    survived = sum(not caught for _, caught, _ in verdicts)
    console.print(f"{len(verdicts) - survived} of {len(verdicts)} caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
