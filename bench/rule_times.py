"""The host's milliseconds a round for each rule: what the target's rows take to be judged, and the draft's to be drawn.

Run: python bench/rule_times.py [--vocab 49152] [--nodes 8,32] [--rounds 30]. Made-up scores of a target and a draft
that mostly agree; a chain for rules that take chains, else a tree, so many nodes with the root. Prints medians and one
JSON line last. Nothing is run by a model: a pass comes on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings, TokenTree, best_nodes, path_to
from outpace.core.types import Request, Row, Rule, tree_rows
from outpace.drafters._sampled import DrawCounts, draw_layer
from outpace.rules.base import reduce_rows, top_k_rows

PROMPT = tuple(range(32))
AGREEMENT = 0.9


class Pair:
    """Scores of a target and a draft, made up for each round."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._generator = vocab, torch.Generator().manual_seed(seed)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The target's and the draft's, as the native runtime gives them. float32 [count, vocab] both"""
        own, other = (4.0 * torch.randn(count, self._vocab, generator=self._generator).numpy() for _ in range(2))
        return own, np.float32(AGREEMENT) * own + np.float32(1.0 - AGREEMENT) * other


def round_of(rule: Rule, request: Request, pair: Pair, nodes: int) -> tuple[float, float, int]:
    """Seconds of drafting on the host and of judging, and the tokens accepted."""
    logits, drafts = pair.rows(nodes)
    tree = TokenTree(PROMPT[-1])
    began = time.perf_counter()
    if rule.siblings is Siblings.PICKED:
        _pick(tree, request, drafts, nodes)
    else:
        _draw(tree, request, drafts, nodes)
        tree = tree.copy(best_nodes(tree, nodes, rule.leaf_q))
    drafted = time.perf_counter()
    picks = reduce_rows(logits[: len(tree)], tree_rows(request, PROMPT, tree))
    verdict = rule.walk(tree, picks)
    return drafted - began, time.perf_counter() - drafted, len(verdict.path) - 1


def _pick(tree: TokenTree, request: Request, drafts: np.ndarray, nodes: int) -> None:
    """The two best below each node, breadth first."""
    for node in range(nodes):
        row = _row(request, tree, node)
        tokens, _ = top_k_rows(SparseLogits(drafts[node : node + 1], None, drafts.shape[1]), [row], 2)[0]
        for token in tokens:
            if len(tree) < nodes:
                tree.add(node, token, tree.scores[node] - 0.5)


def _draw(tree: TokenTree, request: Request, drafts: np.ndarray, nodes: int) -> None:
    """Node by node, as many draws as a tree of this size has."""
    draws, node, drawn = DrawCounts.read("3,2,1"), 0, 1
    while node < len(tree) and drawn < nodes + request.rule.leaf_q:
        row = _row(request, tree, node)
        draw_layer(tree, [node], SparseLogits(drafts[node : node + 1], None, drafts.shape[1]), [row], draws)
        drawn += len(tree.drawn[node].tokens)
        node += 1


def _row(request: Request, tree: TokenTree, node: int) -> Row:
    path = tuple(tree.tokens[one] for one in path_to(tree, node)[1:])
    return Row(request, PROMPT, path, tree.ids[node])


def measure(name: str, vocab: int, nodes: int, rounds: int) -> dict[str, Any]:
    """Medians of one rule."""
    module = registry.find("rules", name)
    rule: Rule = module.build(module.Options())
    temperature = 0.0 if rule.judges_greedy and not rule.judges_sampled else 0.8
    times = []
    for seed in range(rounds + 3):
        request = Request(PROMPT, rule, sampling=Sampling(temperature), seed=seed)
        times.append(round_of(rule, request, Pair(vocab, seed), nodes + rule.leaf_q))
    drafting, judging, accepted = zip(*times[3:], strict=True)  # the first ones warm up
    return {
        "rule": name,
        "nodes": nodes,
        "drafting_ms": 1e3 * statistics.median(drafting),
        "judging_ms": 1e3 * statistics.median(judging),
        "accepted": statistics.mean(accepted),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--nodes", default="8,32")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("rule", "nodes", "drawing, ms", "judging, ms", "accepted", title=f"vocabulary {args.vocab}")
    rows = []
    for name in registry.names("rules"):
        for nodes in map(int, args.nodes.split(",")):
            row = measure(name, args.vocab, nodes, args.rounds)
            rows.append(row)
            cells = (f"{row[part]:.2f}" for part in ("drafting_ms", "judging_ms", "accepted"))
            table.add_row(name, str(nodes), *cells)
    Console(width=100).print(table)
    print(json.dumps({"vocab": args.vocab, "rounds": args.rounds, "rows": rows}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
