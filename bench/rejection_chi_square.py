"""A rule on SmolLM2: two-token texts over many seeds against their exact probabilities.

Run: python bench/rejection_chi_square.py [--rule rejection] [--samples 20000] [--draft LAYERS] [--draft-length 1]
[--draws 2,1] [--batch 64] [--remember] [--keep FILE]. At temperature 1 and top-k 4, so that the cells can be counted.
`--remember` scores every text once: in exact mode its rows are alike wherever they stand, so the answers are the same
and come ten times as fast. `--keep` writes the counts to a file after every 500 texts, and goes on from there. Prints
the cells and one JSON line last; exit 1 where the statistic lies more than four standard deviations above its mean.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.sampling import Sampling, log_probs
from outpace.core.stats import RunStats, summarize
from outpace.core.types import Request, Rule
from outpace.decoders import speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part, chain
from outpace.models.load import load_draft, load_model
from outpace.models.toy import Toy

PROMPT = (504, 3947, 281, 260, 4081, 314, 1129, 1035)  # "The weather in the north is often very"
DRAFT = "layers:0,1,2,3,4,5,6,7,8,9,20,21,22,23,24,25,26,27,28,29"  # mostly wrong, but not always
SAMPLING = Sampling(1.0, top_k=4)
Pair = tuple[int, ...]


class Remembering(Toy):
    """Another model's scores, each text's computed once."""

    def __init__(self, model: Model) -> None:
        super().__init__(vocab_size=1)
        self.vocab_size = model.vocab_size
        self._model = model
        self._rows: dict[Pair, Tensor] = {}

    @property
    def reach(self) -> int:
        """The whole text."""
        return 1 << 30

    def score(self, forest: Sequence[Part]) -> Tensor:
        return super().score(forest).view(-1, self.vocab_size)

    def _row(self, context: Sequence[int]) -> Tensor:
        text = tuple(int(token) for token in context)
        if text not in self._rows:
            session = self._model.open(len(text), len(text))
            self._rows[text] = self._model.score([chain(session, text, [len(text) - 1])])[0]
        return self._rows[text]


def open_engine(
    draft_layers: str = DRAFT, batch: int = 64, remember: bool = False, nodes: int = 2, draws: str = "1"
) -> Engine:
    """The shipped model with some of its own layers as draft: a pass judges so many nodes of a text, the root's row
    included."""
    loaded = load_model(None)
    target, draft = loaded.model, load_draft(draft_layers, loaded).model
    if remember:
        target, draft = Remembering(target), Remembering(draft)
    drafter = ModelDrafter(draft, Options(width=nodes - 1, tree_nodes=2 * nodes, floor=0.0, draws=draws))
    return Engine(target, drafter, options=EngineOptions(nodes=nodes, rows=nodes * batch, chunk=16, batch=batch))


def exact_pairs(model: Model) -> dict[Pair, float]:
    """p of every pair of tokens that has any, by plain forward passes."""
    first = _p(model, PROMPT)
    pairs = {}
    for token, chance in first.items():
        for other, chance_of_other in _p(model, (*PROMPT, token)).items():
            pairs[token, other] = chance * chance_of_other
    return pairs


def _p(model: Model, text: tuple[int, ...]) -> dict[int, float]:
    logits = model.score([chain(model.open(len(text), len(text)), text, [len(text) - 1])])
    p = torch.exp(log_probs(logits.double(), [SAMPLING]))[0]
    return {token: p[token].item() for token in torch.nonzero(p).flatten().tolist()}


def rule_of(name: str) -> Rule:
    """A rule by name, as it is without options."""
    module = registry.find("rules", name)
    rule: Rule = module.build(module.Options())
    return rule


def count_pairs(
    engine: Engine, seeds: Iterable[int], name: str = "rejection", length: int = 1
) -> tuple[Counter[Pair], RunStats]:
    """What the engine writes, one request a seed, as many at once as its batch holds."""
    rule, options = rule_of(name), speculative.Options(draft_length=length)
    runs = [engine.submit(Request(PROMPT, rule, 2, SAMPLING, seed), speculative, options) for seed in seeds]
    while engine.waiting or engine.running:
        engine.step()
    for run in runs:
        if run.error is not None:
            raise run.error
    return Counter(tuple(run.tokens) for run in runs), summarize(step for run in runs for step in run.history.steps)


def count_on(engine: Engine, args: argparse.Namespace) -> tuple[Counter[Pair], dict[str, int]]:
    """As `count_pairs`, from where a file says that it stands; drafted and accepted tokens beside the pairs."""
    kept: dict[str, Any] = {"done": 0, "drafted": 0, "accepted": 0, "pairs": []}
    if args.keep and args.keep.exists():
        kept = json.loads(args.keep.read_text())
    seen = Counter({tuple(pair): count for pair, count in kept["pairs"]})
    for start in range(kept["done"], args.samples, 500):
        end = min(start + 500, args.samples)
        more, figures = count_pairs(engine, range(start, end), args.rule, args.draft_length)
        seen += more
        drafted, accepted = kept["drafted"] + figures.drafted, kept["accepted"] + figures.accepted
        kept = {"done": end, "drafted": drafted, "accepted": accepted, "pairs": [[*item] for item in seen.items()]}
        if args.keep:
            args.keep.write_text(json.dumps(kept))
    return seen, {name: kept[name] for name in ("drafted", "accepted")}


def chi_square(seen: Mapping[Pair, int], expected: Mapping[Pair, float]) -> tuple[float, int, float]:
    """The statistic, its degrees of freedom, and by how many standard deviations it lies above its mean."""
    total = sum(seen.values())
    if set(seen) - set(expected):
        return math.inf, len(expected) - 1, math.inf
    statistic = sum((seen.get(pair, 0) - total * p) ** 2 / (total * p) for pair, p in expected.items())
    freedom = len(expected) - 1
    cube_root = (statistic / freedom) ** (1 / 3)
    return statistic, freedom, (cube_root - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rule", default="rejection")
    parser.add_argument("--draft-length", type=int, default=1)
    parser.add_argument("--draws", default="2,1")
    parser.add_argument("--remember", action="store_true", help="score every text once")
    parser.add_argument("--keep", type=Path, help="file of the counts, to go on from")
    args = parser.parse_args()
    nodes = 8 if rule_of(args.rule).fan else 1 + args.draft_length
    with closing(open_engine(args.draft, args.batch, args.remember, nodes, args.draws)) as engine:
        expected = exact_pairs(engine.target)
        seen, figures = count_on(engine, args)
    title = f"{args.samples} texts by {args.rule}, draft {args.draft}"
    table = Table("pair", "expected", "counted", "deviations", title=title)
    for pair, p in sorted(expected.items(), key=lambda item: -item[1]):
        mean = args.samples * p
        deviations = (seen[pair] - mean) / math.sqrt(mean * (1 - p))
        table.add_row(str(pair), f"{mean:.1f}", str(seen[pair]), f"{deviations:+.2f}")
    Console(width=100).print(table)
    statistic, freedom, deviations = chi_square(seen, expected)
    row: dict[str, Any] = {"rule": args.rule, "samples": args.samples, "draft": args.draft}
    row |= {"chi_square": statistic, "freedom": freedom, "deviations": deviations, **figures}
    print(json.dumps(row))
    return 0 if deviations < 4.0 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
