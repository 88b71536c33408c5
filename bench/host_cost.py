"""Measure the host's time with models that cost nothing: microseconds per round by method and number of requests.

Run: python bench/host_cost.py [--rounds N]

Both models look their next tokens up in a table; the time of these lookups is subtracted. With "graphs" the models are
those of a GPU, by the stand-in for its CUDA graphs, and the time of the replays is subtracted: what is left is how long
a GPU would wait for the host in a round, without CUDA's own calls. A level is one step of CARD's drafter and its
insertion into the cache. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import parse, run
from outpace_kernels import TopKRows

from outpace.card.cache import CandidateCache
from outpace.card.loop import DraftLoop, Open, SetDirectives
from outpace.core.drafting import BuildContext
from outpace.core.logits import SparseLogits
from outpace.core.types import Request, Verdict
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card, directives
from outpace.decoders.speculative import Speculative
from outpace.drafters import model as draft_model
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part, Session
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.cuda.captures import EagerCapture
from outpace.models.llama.cuda.runtime import GraphLlama
from outpace.rules.greedy import Greedy

VOCAB, OFFERED, WARM_UP = 4096, 128, 32
FEW = 256  # tokens of the vocabulary of models with captured passes, and of prompts
GREEDY = Greedy()  # one for all requests, as in an LLM


class TableSession(Session):
    """Stores nothing."""

    def _resize(self, slots: int) -> None: ...

    def _move(self, source: Sequence[int], start: int) -> None: ...


class TableModel(Model):
    """Knows the best tokens after each token; `agreement`: how often the first is that of agreement 1."""

    vocab_size, max_positions, device, token_bytes, exact = VOCAB, 1 << 20, "cpu", 8, True

    def __init__(self, agreement: float = 1.0) -> None:
        chance = np.random.default_rng(7)
        first = np.where(chance.random(VOCAB) < agreement, chance.permutation(VOCAB), chance.permutation(VOCAB))
        self._best = ((first[:, None] + np.arange(OFFERED) ** 2) % VOCAB).tolist()
        self._values = [float(np.log(0.7)), *np.log(0.3 * 0.5 ** np.arange(1, OFFERED)).tolist()]
        self.spent = 0.0  # seconds of all lookups

    def open(self, capacity: int, max_pending: int) -> TableSession:
        return TableSession(capacity, max_pending)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        for part in forest:
            if part.keep is not None:
                part.session.keep(part.keep)
            part.session.extend_bytes(part.parents)
            part.session.depths_from(part.session.pending - len(part.tokens))
        start, best = time.perf_counter(), []
        for part in forest:
            for node in part.logit_rows:
                best.append((self._best[part.tokens[node]][: max(part.best, 1)], self._values[: max(part.best, 1)]))
        scored = SparseLogits(np.zeros((len(best), 0), np.float32), None, VOCAB, TopKRows(best))
        del best  # within the time of the lookup
        self.spent += time.perf_counter() - start
        return scored


def request(number: int, tokens: int) -> Request:
    """Return a greedy request with a prompt of its own."""
    return Request(tuple((97 * number + n) % FEW for n in range(8)), GREEDY, tokens)


def drafter(model: Model, **options: Any) -> Any:
    """Build the drafter `model` with this draft model."""
    return draft_model.build(draft_model.Options(**options), given=BuildContext(draft=model))


class TimedCapture(EagerCapture):
    """The stand-in for a CUDA graph, which adds up the time of its replays."""

    spent = 0.0  # seconds of all replays

    def replay(self) -> None:
        start = time.perf_counter()
        super().replay()
        TimedCapture.spent += time.perf_counter() - start


@patch("outpace.models.llama.cuda.captures.EagerCapture", TimedCapture)
def graph_seconds(decoder: Any, requests: int, rounds: int) -> float:
    """Return the median time of an engine step with this many requests and captured passes, without their replays. All
    drafts are accepted."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    config = LlamaConfig(
        vocab_size=FEW,
        num_layers=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_positions=1 << 14,
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        **sizes,
    )
    random = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(shape, generator=random) for name, shape in tensor_shapes(config).items()}
    models = [GraphLlama.from_tensors(config, weights.__getitem__, is_eager=True) for _ in range(2)]
    return round_seconds(decoder, requests, rounds, models, lambda: TimedCapture.spent)


def table_seconds(decoder: Any, requests: int, rounds: int) -> float:
    """Return the median time of an engine step with this many requests, without the models' lookups."""
    tables = [TableModel(), TableModel(0.8)]
    return round_seconds(decoder, requests, rounds, tables, lambda: sum(table.spent for table in tables))


def round_seconds(
    decoder: Any, requests: int, rounds: int, models: Sequence[Model], spent: Callable[[], float]
) -> float:
    """Return the median time of an engine step with a target and a draft, without the seconds added to `spent`."""
    options, times = EngineOptions(batch=requests, rows=8 * requests, reuse=False), []
    with Engine(models[0], drafter(models[1]), options=options) as engine:
        for number in range(requests):
            engine.submit(request(number, 16 * (rounds + WARM_UP)), decoder, decoder.Options())
        for _ in range(rounds + WARM_UP):
            start, before = time.perf_counter(), spent()
            engine.step()
            times.append(time.perf_counter() - start - (spent() - before))
    return statistics.median(times[WARM_UP:])


def level_seconds(width: int, rounds: int) -> float:
    """Return the median time of a level in trees as method card drafts them."""
    levels, table = [], TableModel(0.8)
    for number in range(rounds):
        loop, cache = card_loop(number, table, width, Card.Options())
        while loop.has_work:
            start, spent = time.perf_counter(), table.spent
            for _, level in loop.grow():
                cache.insert(level)
            levels.append(time.perf_counter() - start - (table.spent - spent))
    return statistics.median(levels)


def target_seconds(nodes: int, rounds: int) -> float:
    """Return the median time of CARD's query, late children and correction with `nodes` nodes in the cache."""
    sides, table = [], TableModel(0.8)
    for number in range(rounds):
        loop, cache = card_loop(number, table, 16, Card.Options(), tree_nodes=2 * nodes)
        while len(cache) < nodes:
            for _, level in loop.grow():
                cache.insert(level)
        start = time.perf_counter()
        cache.add_late_children(tree := cache.query(16))
        cache.correct(tree, Verdict([0, tree.children(0)[0]], VOCAB), len(tree))
        sides.append(time.perf_counter() - start)
    return statistics.median(sides)


def card_loop(
    number: int, table: TableModel, width: int, options: Any, **more: int
) -> tuple[DraftLoop, CandidateCache]:
    """Return the loop of a drafter with one request, and the request's cache."""
    asked = request(number, 64)
    loop = DraftLoop(drafter(table, **Card.drafter_defaults(options) | {"width": width} | more))
    loop.post(Open(number, asked))
    loop.post(SetDirectives(number, directives(options)))
    return loop, CandidateCache(asked.prompt[-1])


def main() -> None:
    """Print the table."""
    rounds = parse(__doc__, rounds=300).rounds
    for requests in (1, 8, 32):
        for decoder in (Autoregressive, Speculative, Auto):
            for kind, seconds in (("", table_seconds), ("graphs, ", graph_seconds)):
                name, micros = f"{kind}{decoder.name}, {requests} at once", 1e6 * seconds(decoder, requests, rounds)
                print(name.ljust(40), f"{micros:8.0f} us a round", flush=True)
    for width in (4, 16, 64):
        print(f"CARD, width {width}".ljust(40), f"{1e6 * level_seconds(width, 20):8.0f} us a level", flush=True)
    print("CARD, 2000 nodes".ljust(40), f"{1e6 * target_seconds(2000, 40):8.0f} us for query and correct")


if __name__ == "__main__":
    run(main)
