"""Measure the host's time per round, with models that cost nothing: microseconds by method, requests and width.

    python bench/host_cost.py [--rounds N] [--json FILE]

The target and the draft model look their next token up in a table, so that all that is measured is the engine, the
planner, the drafter and the token trees. `layer` is one step of CARD's drafter with its insertion into the candidate
cache, by tree width; `query` is the target's side of a round at a cache of 2,000 nodes. Medians over rounds; the
machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.card.cache import CandidateCache
from outpace.card.loop import DraftLoop, Open
from outpace.core.drafting import BuildContext
from outpace.core.logits import SparseLogits
from outpace.core.types import Request, Verdict
from outpace.decoders import Auto, Autoregressive, Speculative
from outpace.drafters import model as draft_model
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part, Session
from outpace.rules.greedy import Greedy

VOCAB = 4096


class TableSession(Session):
    """Stores nothing."""

    def _resize(self, slots: int) -> None:
        pass

    def _move(self, source: Sequence[int], start: int) -> None:
        pass

    def _copy(self, other: Any, length: int) -> None:
        pass


class TableModel(Model):
    """Gives the best tokens of each row by a table: after a token the same ones, whatever came before.

    `agreement`: the fraction of tokens after which the best token is that of the table with agreement 1.
    """

    vocab_size, max_positions, device, token_bytes, exact = VOCAB, 1 << 20, "cpu", 8, True

    def __init__(self, agreement: float = 1.0) -> None:
        chance = np.random.default_rng(7)
        right, wrong = chance.integers(0, VOCAB, VOCAB), chance.integers(0, VOCAB, VOCAB)
        first = np.where(chance.random(VOCAB) < agreement, right, wrong)
        others = (first[:, None] + chance.permuted(np.arange(1, VOCAB))[:127]) % VOCAB
        self._best = np.concatenate([first[:, None], others], axis=1).tolist()
        self._values = [float(np.log(0.7)), *np.log(0.3 * 0.5 ** np.arange(1, 128)).tolist()]

    def open(self, capacity: int, max_pending: int) -> TableSession:
        return TableSession(capacity, max_pending)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        best = []
        for part in forest:
            if part.keep is not None:
                part.session.keep(part.keep)
            part.session.extend_bytes(part.parents)
            for node in part.wanted:
                count = max(part.best, 1)
                best.append((self._best[part.tokens[node]][:count], self._values[:count]))
        return SparseLogits(np.zeros((len(best), 0), np.float32), None, VOCAB, best)


def request(number: int, tokens: int) -> Request:
    """Return a greedy request with a prompt of its own."""
    return Request(tuple((97 * number + n) % VOCAB for n in range(8)), Greedy(), tokens)


def round_microseconds(decoder: Any, requests: int, rounds: int) -> float:
    """Return the median time of an engine step with this many requests."""
    drafter = draft_model.build(draft_model.Options(), given=BuildContext(draft=TableModel(0.8)))
    with Engine(TableModel(), drafter, options=EngineOptions(batch=requests, rows=8 * requests, reuse=False)) as engine:
        runs = [engine.submit(request(n, 16 * rounds + 64), decoder, decoder.Options()) for n in range(requests)]
        times = []
        for _ in range(rounds + 32):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        assert not [run.error for run in runs if run.error]
    return 1e6 * statistics.median(times[32:])


def layer_microseconds(width: int, layers: int) -> float:
    """Return the median time of one step of CARD's drafter and its insertion into the cache."""
    options = draft_model.Options(width=width, tree_nodes=16384, floor=0.0)
    loop = DraftLoop(draft_model.build(options, given=BuildContext(draft=TableModel(0.8))))
    cache = CandidateCache(5)
    loop.post(Open(0, request(0, 1 << 16)))
    times = []
    for _ in range(layers):
        start = time.perf_counter()
        for _, layer in loop.grow():
            cache.insert(layer)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def query_microseconds(nodes: int, rounds: int) -> float:
    """Return the median time of a query, of adding late children and of a correction at a cache of `nodes` nodes."""
    options = draft_model.Options(width=16, tree_nodes=16384, floor=0.0)
    loop = DraftLoop(draft_model.build(options, given=BuildContext(draft=TableModel(0.8))))
    times = []
    for number in range(rounds):
        cache = CandidateCache(request(number, 64).prompt[-1])
        loop.post(Open(number, request(number, 64)))
        while len(cache) < nodes:
            for _, layer in loop.grow():
                cache.insert(layer)
        start = time.perf_counter()
        tree = cache.query(16)
        cache.add_late_children(tree)
        first = tree.children(0)[0]
        cache.correct(tree, Verdict([0, first], VOCAB - 1 if tree.tokens[first] else 0), len(tree))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="rounds of each measurement (default: 300)")
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    for requests in (1, 8, 32):
        for decoder in (Autoregressive, Speculative, Auto):
            name = f"{decoder.name}, {requests} at once"
            figures[name] = round_microseconds(decoder, requests, given.rounds)
            print(f"{name:32} {figures[name]:8.0f} us a round", flush=True)
    for width in (4, 16, 64):
        figures[f"layer of width {width}"] = layer_microseconds(width, 12)
        print(f"{f'layer of width {width}':32} {figures[f'layer of width {width}']:8.0f} us", flush=True)
    figures["query and correct, 2000 nodes"] = query_microseconds(2000, 8)
    print(f"{'query and correct, 2000 nodes':32} {figures['query and correct, 2000 nodes']:8.0f} us")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
