"""Measure tokens per pass of drafters without a model, by replaying answers that plain decoding wrote once.

Run: python bench/tokens_a_pass.py [--target T] [--tasks repetition,builtin] [--prompts 5] [--tokens 160]
     [--rows 32] [--least 0.1] [--drafters ngram,suffix,cacheback,prediction+suffix] [--answers FILE.jsonl]
Nothing is timed, so a busy machine gives the same numbers. Each round verifies the best --rows nodes of the drafter's
tree with an estimated probability of at least --least. Shared tables learn from answer to answer; the last columns
show the fifths of all prompts in order. The prediction is the answer with every tenth token replaced. --answers keeps
the answers in a file, and a later run adds the missing ones. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, parse, run, show
from rich.console import Console
from rich.progress import track

from outpace.api.llm import load
from outpace.bench.tasks import collect
from outpace.core.drafting import BuildContext
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Drafter, Observation, Request
from outpace.engine.build import build_drafter
from outpace.models.load import load_model
from outpace.rules.greedy import Greedy

DEPTHS, FIFTHS = (1, 2, 3, 4, 6, 8, 12, 16), 5
AT_ONCE = 16  # batch size for writing the answers


class Answer(NamedTuple):
    """A prompt with its task, and the target's greedy answer."""

    task: str
    prompt: list[int]
    tokens: list[int]


def answers(arguments: argparse.Namespace) -> list[Answer]:
    """Read the kept answers and write the missing ones by plain decoding."""
    asked, kept = collect(arguments.tasks.split(","), arguments.prompts), arguments.answers
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    found = [Answer(**json.loads(line)) for line in lines]
    if len(found) == len(asked):
        return found
    with load(arguments.target, method="autoregressive") as llm:
        for start in track(range(len(found), len(asked), AT_ONCE), "answers", console=Console(stderr=True)):
            some = asked[start : start + AT_ONCE]
            prompts = [llm.tokenizer.encode_prompt(one.text) for one in some]
            written = llm.generate(prompts, max_tokens=arguments.tokens)
            made = [
                Answer(*one) for one in zip((o.task for o in some), prompts, (w.tokens for w in written), strict=True)
            ]
            found += made
            if kept:
                with kept.open("a") as file:
                    file.writelines(json.dumps(answer._asdict()) + "\n" for answer in made)
    return found


@dataclass
class Replayed:
    """The replay of one answer: passes, written tokens by source, and by depth the tokens verified and written."""

    answer: Answer
    passes: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)


def replay(drafter: Drafter, answer: Answer, rows: int, least: float) -> Replayed:
    """Replay one answer as the engine would write it."""
    guess = [token if place % 10 else 0 for place, token in enumerate(answer.tokens, 1)]
    request = Request(tuple(answer.prompt), Greedy(), len(answer.tokens), prediction=tuple(guess))
    state, tree, done = drafter.open(request), TokenTree(answer.prompt[-1]), Replayed(answer)
    written = 0
    while written < len(answer.tokens):
        tree.current_source = drafter.name
        drafter.grow([state], [tree])
        nodes = [node for node in best_nodes(tree, rows) if not node or math.exp(tree.scores[node]) >= least]
        judged, path = tree.copy(nodes), [0]
        for token in answer.tokens[written:]:
            done.reached[len(path)] += bool(judged.children(path[-1]))
            child = judged.child(path[-1], token)
            if child is None:
                break
            done.kept[len(path)] += 1
            done.sources[judged.sources[child]] += 1
            path.append(child)
        tokens = answer.tokens[written : written + len(path)]
        root = TokenTree(tokens[-1], tree.next_id, tree.next_id + 1)
        drafter.observe(state, Observation([judged.ids[node] for node in path], tokens, root))
        tree, written, done.passes = root, written + len(tokens), done.passes + 1
    drafter.close(state)
    return done


def rate(done: Sequence[Replayed]) -> float:
    """Return the tokens per pass of several answers."""
    return round(sum(len(one.answer.tokens) for one in done) / max(sum(one.passes for one in done), 1), 2)


def measure(
    name: str, found: Sequence[Answer], rows: int, least: float, given: BuildContext
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replay all answers with one drafter. Return tokens per pass, and shares by depth and by source."""
    drafter = build_drafter(name, given, {})
    done = [replay(drafter, answer, rows, least) for answer in found]
    tasks = dict.fromkeys(answer.task for answer in found)
    by_task = {task: rate([one for one in done if one.answer.task == task]) for task in tasks}
    fifths = [done[len(done) * n // FIFTHS : len(done) * (n + 1) // FIFTHS] for n in range(FIFTHS)]
    seen = {f"{n + 1}/{FIFTHS}": rate(some) for n, some in enumerate(fifths)}
    kept, reached, sources = (sum((getattr(o, n) for o in done), Counter()) for n in ("kept", "reached", "sources"))
    depths = {str(depth): round(kept[depth] / reached[depth], 2) for depth in DEPTHS if reached[depth]}
    total = sum(len(answer.tokens) for answer in found)
    shares = {source: round(count / total, 2) for source, count in sources.most_common()}
    return {"drafter": name, **by_task, "all": rate(done), **seen}, {
        "drafter": name,
        "depths": depths,
        "sources": shares,
    }


def main() -> int:
    """Run the command."""
    drafters = "ngram,suffix,cacheback,prediction,suffix+cacheback,ngram+suffix"
    options: dict[str, Any] = {"target": str, "tasks": "repetition,builtin", "drafters": drafters, "prompts": 5}
    args = parse(__doc__, **options, tokens=160, rows=32, least=0.1, answers=Path)
    found = answers(args)
    given = BuildContext(tokenizer=load_model(args.target).tokenizer)  # drafters find their files by it
    made = [measure(name, found, args.rows, args.least, given) for name in args.drafters.split(",")]
    show([row for row, _ in made], "tokens per pass; then by fifths of all prompts")
    show(
        [{"drafter": one["drafter"], **one["depths"]} for _, one in made], "written share of verified tokens, by depth"
    )
    show([{"drafter": one["drafter"], "by": json.dumps(one["sources"])} for _, one in made], "written share by source")
    kept = {"rows": [row for row, _ in made], "more": [one for _, one in made]}
    return finish(kept | {"answers": len(found), "budget": args.rows, "least": args.least}, False)


if __name__ == "__main__":
    run(main)
