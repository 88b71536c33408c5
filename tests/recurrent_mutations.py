"""Mistakes in recurrent layers by torch, in their states and their files: each must fail the named test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from mutation_checks import Mutation, Original
from part_mutations import mutation, unchanged

from outpace.models.base import Session
from outpace.models.hf import states
from outpace.models.llama.config.recurrence import Recurrence
from outpace.models.llama.torch import recurrent
from outpace.models.llama.torch.recurrent import RecurrentMemory, RecurrentPass, Snapshot

BRANCHES = "test_recurrent.py::test_trees_are_walked_beside_chains"
PARTS = "test_recurrent.py::test_a_part_of_a_chain_may_be_kept"
CUTS = "test_recurrent.py::test_a_state_is_cut_only_where_a_snapshot_is"
PRODUCTS = "test_recurrent.py::test_chains_of_prompts_are_computed_by_products_without_exact_mode"
FILES = "test_recurrent.py::test_a_gguf_file_gives_the_same_logits"
HITS = "test_recurrent.py::test_a_prefix_hit_writes_what_a_fresh_start_writes"
COPIES = "test_recurrent.py::test_transformers_writes_the_same_texts"


def backwards(keep: Original, self: Any, path: Sequence[int], live: Any) -> Any:
    return keep(self, [*reversed(path)], live)


def with_rejected(keep: Original, self: Any, path: Sequence[int], live: Any) -> Any:
    return keep(self, range(len(self.rows)), live)


def of_a_sibling(taps: Original, self: Any, number: int, path: Sequence[int], rows: Any, *rest: Any) -> Any:
    """Take the row before a node's own for its parent's."""
    if len(path) > 1 and (number, path[-1] - 1) in rows:
        path = [*path[:-2], path[-1] - 1, path[-1]]
    return taps(self, number, path, rows, *rest)


def of_the_first_branch(levels: Original, *given: Any) -> Any:
    """Let all nodes of a level continue its first state."""
    for level in levels(*given):
        yield level if level.above is None else level._replace(above=torch.zeros_like(level.above))


def without_history(save: Original, self: Any) -> Snapshot:
    heads, history = save(self)
    return Snapshot(heads, torch.zeros_like(history))


def without_the_last_nodes(save: Original, self: Any) -> Snapshot:
    return Snapshot(self.heads, self.history)


def anywhere(cut_below: Original, self: Any, length: int, total: int | None = None) -> int:
    return length


def undecayed(log_decays: Original, decays: Any) -> Any:
    return torch.zeros_like(log_decays(decays))


def untiled(key_head: Original, sizes: Recurrence, head: int) -> Any:
    return key_head(replace(sizes, is_tiled=False), head)


RECURRENT_MUTATIONS: list[Mutation] = [
    mutation("recurrence: kept nodes are folded in another order", RecurrentMemory, "keep", backwards, PARTS),
    mutation("recurrence: rejected nodes are folded", RecurrentMemory, "keep", with_rejected, PARTS),
    mutation("recurrence: a filter reads a sibling's row", RecurrentPass, "_taps_of", of_a_sibling, BRANCHES),
    mutation("recurrence: branches share a state", recurrent, "_levels", of_the_first_branch, BRANCHES),
    mutation("recurrence: a snapshot without the filter's rows", RecurrentMemory, "save", without_history, CUTS),
    mutation("recurrence: a snapshot without kept nodes", RecurrentMemory, "save", without_the_last_nodes, CUTS),
    mutation("recurrence: a prefix ends anywhere", Session, "cut_below", anywhere, HITS),
    mutation("recurrence: products of chains without decays", recurrent, "log_decays", undecayed, PRODUCTS),
    mutation("recurrence: value heads of files not tiled", Recurrence, "key_head", untiled, FILES),
    mutation("recurrence: states continue without a copy", states, "_copy", unchanged, COPIES),
]
