"""What lossy rules give up for what they save: a rule's rejections and its loss, position by position, on real texts.

Run: python bench/pareto.py [--tasks builtin] [--prompts 10] [--tokens 48] [--temperature 0.8] [--top-k 50]
     [--draft DRAFT] [--plot FILE]
Tasks are those of `outpace bench`, with commas between them; --prompts: of each. The shipped pair, teacher-forced on
texts that the target wrote itself. Of every position: TV(p, q), the ratio rule's chance to
reject; and for each dial the chance that a drafted token is rejected and how far what is written lies from p. Nothing
lies below Yin's line, P(reject) + TV(p, written) = TV(p, q). Prints a table, the rejections that the ratio rule expects
and how many tokens a pass they allow, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.bench.tasks import TaskPrompt, collect
from outpace.core import registry
from outpace.core.distribution import UNFILTERED, TokenDistribution, distribution_of
from outpace.core.errors import UserError
from outpace.core.logits import host_array
from outpace.core.sampling import Sampling
from outpace.core.theory import expected_rejections, ideal_speedup, min_distance
from outpace.core.tree import DrawnChildren, TokenTree
from outpace.core.types import Request, Row
from outpace.models.base import Model, chain
from outpace.rules._ratio import NodeScores, TopDown, residual
from outpace.rules._relaxed import Relaxed

DIALS: list[tuple[str, dict[str, Any]]] = [
    ("rejection", {}),
    *(("lenience", {"lenience": value}) for value in (0.1, 0.3, 0.5, 0.7, 0.9)),
    *(("adaptive", {"most_lenience": value}) for value in (0.1, 0.3, 0.5, 0.7, 0.9)),
    *(("typical", {"epsilon": value, "delta": value**0.5}) for value in (0.01, 0.03, 0.09, 0.3)),
    *(("rollback", {"rollback": value}) for value in (1.0, 2.0, 5.0)),
    *(
        ("cascade", {"defer": kind, "alpha": value})
        for kind in ("chow", "diff", "opt", "token_v1", "token_v2", "token_v3")
        for value in (0.1, 0.3, 0.5)
    ),
]


class Place(NamedTuple):
    """One position of a text: its target row and the draft's q, as processed and as they are."""

    judged: NodeScores
    tree: TokenTree
    q: TokenDistribution


def places(llm: LLM, prompts: Sequence[TaskPrompt], sampling: Sampling, tokens: int) -> Iterator[Place]:
    """Every position of the texts that the target writes after the prompts."""
    draft, rule = llm.draft, registry.find("rules", "gumbel").build(registry.find("rules", "gumbel").Options())
    assert draft is not None
    for prompt in track(prompts, "texts", console=Console(stderr=True)):
        asked: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
        params = SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, max_tokens=tokens)
        request = Request(llm.prepare(asked, params).request.prompt, rule, sampling=sampling)
        text = (*request.prompt, *llm.stream(asked, params).finish().tokens)
        own, other = (_rows(model, text, len(request.prompt) - 1) for model in (llm.target.model, draft.model))
        for number, (target_row, draft_row) in enumerate(zip(own, other, strict=True)):
            row = Row(request, text[: len(request.prompt) + number])
            scores = host_array(draft_row)
            tree, q = TokenTree(text[len(request.prompt) + number - 1]), distribution_of(scores, sampling)
            tree.drawn[0] = DrawnChildren(q, (), partial(distribution_of, scores, UNFILTERED))
            yield Place(NodeScores(row, target_row), tree, q)


def _rows(model: Model, text: Sequence[int], first: int) -> Tensor:
    """Scores of all positions from `first` on but for the last token's. [positions, vocab]"""
    session = model.open(len(text), len(text))
    return model.score([chain(session, text, range(first, len(text) - 1))])


def point(rule: Any, place: Place) -> tuple[float, float, float]:
    """TV(p, q), the chance that a drafted token is rejected, and TV(p, written)."""
    p, q, vocab = place.judged.p, place.q, place.judged.logits.shape[-1]
    assert q.tokens is not None
    if isinstance(rule, Relaxed):
        is_good, rest = rule.acceptable(place.judged), p
        accepted = {token: float(is_good(token)) for token in q.tokens.tolist()}
    else:
        assert isinstance(rule, TopDown)
        goal = rule.goal(place.tree, 0, place.judged, p)
        accepted = {token: min(1.0, rule.acceptance(goal, q, token)) for token in q.tokens.tolist()}
        rest = residual(goal, q)
    taken = q.wide(vocab).astype(np.float64)
    taken[q.tokens] *= list(accepted.values())
    rejected = 1.0 - float(taken.sum())
    written = taken + rejected * rest.wide(vocab)
    return _distance(p.wide(vocab), q.wide(vocab)), rejected, _distance(p.wide(vocab), written)


def _distance(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.maximum(p.astype(np.float64) - q, 0.0).sum())


def measure(found: Sequence[Place]) -> list[dict[str, Any]]:
    """One row a dial: means over all positions."""
    rows = []
    for name, options in DIALS:
        module = registry.find("rules", name)
        rule = module.build(module.Options(**options))
        points = [point(rule, place) for place in found]
        below = min(loss - min_distance(distance, rejected) for distance, rejected, loss in points)
        assert below > -1e-6, f"{name} {options} lies {-below} below the line"
        distance, rejected, loss = (sum(column) / len(points) for column in zip(*points, strict=True))
        slack = rejected + loss - distance
        rows.append({"rule": name, **options, "rejected": rejected, "loss": loss, "above_the_line": slack})
    return rows


def draw(rows: Sequence[dict[str, Any]], distance: float, file: Path) -> None:
    """Loss over rejections, a colour a rule, and the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [0, distance],
        [distance, 0],
        color="#333333",
        linestyle=":",
        linewidth=1,
        label="Yin's line: nothing lies below",
    )
    for label in dict.fromkeys(_label(row) for row in rows):
        some = sorted((row["rejected"], row["loss"]) for row in rows if _label(row) == label)
        color = "#333333" if label == "rejection" else None  # the others are as many as there are colours
        axes.plot(*zip(*some, strict=True), marker="o", markersize=4, linewidth=1, color=color, label=label)
    axes.set_xlabel("chance that a drafted token is rejected")
    axes.set_ylabel("total variation from the target")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def _label(row: dict[str, Any]) -> str:
    return f"{row['rule']} {row['defer']}" if "defer" in row else str(row["rule"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="builtin")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--draft", default=None)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.top_k < 1:
        parser.error(f"--top-k is {args.top_k}, it must be at least 1, for each token that the draft keeps is judged")
    prompts = collect(args.tasks.split(","), args.prompts)
    with LLM(None, args.draft, method="speculative") as llm:
        found = list(places(llm, prompts, Sampling(args.temperature, args.top_k), args.tokens))
    rows = measure(found)
    distances = [place.judged.p.above(place.q).total for place in found]
    rejections = expected_rejections(distances)
    bound = ideal_speedup(len(found), rejections)
    distance = rejections / len(found)
    table = Table("rule", "dials", "rejected", "loss", "above the line")
    for row in rows:
        dials = ", ".join(f"{name} {value:g}" for name, value in row.items() if name in _dials(row))
        cells = (f"{row[name]:.3f}" for name in ("rejected", "loss", "above_the_line"))
        table.add_row(_label(row), dials, *cells)
    Console(width=100).print(table)
    print(f"{len(found)} tokens, {rejections:.1f} rejections by the ratio rule: at most {bound:.2f} tokens a pass")
    if args.plot:
        draw(rows, distance, args.plot)
    print(json.dumps({"tokens": len(found), "rejections": rejections, "bound": bound, "rows": rows}))
    return 0


def _dials(row: dict[str, Any]) -> list[str]:
    return [name for name in row if name not in ("rule", "defer", "rejected", "loss", "above_the_line")]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
