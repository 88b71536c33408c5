"""What drafters without a model would give: tokens a pass over answers that are written once, plainly, then replayed.

Run: python bench/tokens_a_pass.py [--target T] [--tasks repetition,builtin] [--prompts 5] [--tokens 160]
     [--rows 32] [--least 0.1] [--drafters ngram,suffix,cacheback,prediction+suffix] [--answers FILE.jsonl]
Nothing is timed: a busy machine gives the same numbers. Each round takes the best --rows nodes of the drafter's tree,
of those with a chance of at least --least. Tables that serve all requests keep what they learnt from answer to answer:
the last two columns are the first and the last third of all prompts. The prediction is the answer itself with every
tenth token replaced. --answers keeps the answers of these tasks, and goes on behind those that it has. One JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from outpace.api.load import load
from outpace.bench.tasks import collect
from outpace.core.needs import Given
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Drafter, Observation, Request
from outpace.engine.build import build_drafter
from outpace.rules.greedy import Greedy

AT_ONCE = 16  # answers that are written together; their texts are those of writing them alone


class Answer(NamedTuple):
    """One prompt's task, its tokens, and those of the target's greedy answer."""

    task: str
    prompt: list[int]
    tokens: list[int]


def answers(arguments: argparse.Namespace) -> list[Answer]:
    """Written by plain decoding, or as earlier runs kept them; each is kept as soon as it is there."""
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


def replay(drafter: Drafter, answer: Answer, rows: int, least: float) -> int:
    """Passes that an answer takes."""
    guess = [token if place % 10 else 0 for place, token in enumerate(answer.tokens, 1)]
    request = Request(tuple(answer.prompt), Greedy(), len(answer.tokens), prediction=tuple(guess))
    state, tree = drafter.open(request), TokenTree(answer.prompt[-1])
    written = passes = 0
    while written < len(answer.tokens):
        drafter.grow([state], [tree])
        nodes = [node for node in best_nodes(tree, rows) if not node or math.exp(tree.scores[node]) >= least]
        judged, path = tree.copy(nodes), [0]
        for token in answer.tokens[written:]:
            child = judged.child(path[-1], token)
            if child is None:
                break
            path.append(child)
        tokens = answer.tokens[written : written + len(path)]
        root = TokenTree(tokens[-1], tree.next_id, tree.next_id + 1)
        drafter.observe(state, Observation([judged.ids[node] for node in path], tokens, root))
        tree, written, passes = root, written + len(tokens), passes + 1
    drafter.close(state)
    return passes


def rate(answered: Sequence[tuple[Answer, int]]) -> float:
    """Tokens a pass over several answers."""
    return round(sum(len(a.tokens) for a, _ in answered) / max(sum(passes for _, passes in answered), 1), 2)


def measure(name: str, found: Sequence[Answer], rows: int, least: float) -> dict[str, Any]:
    """One drafter over all answers, as they come."""
    drafter = build_drafter(name, Given(), {})
    done = [(answer, replay(drafter, answer, rows, least)) for answer in found]
    tasks = dict.fromkeys(answer.task for answer in found)
    by_task = {task: rate([one for one in done if one[0].task == task]) for task in tasks}
    third = max(len(done) // 3, 1)
    return {"drafter": name, **by_task, "first third": rate(done[:third]), "last third": rate(done[-third:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--tasks", default="repetition,builtin")
    parser.add_argument("--drafters", default="ngram,suffix,cacheback,prediction,suffix+cacheback,ngram+suffix")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--least", type=float, default=0.1)
    parser.add_argument("--answers", type=Path)
    arguments = parser.parse_args()
    found = answers(arguments)
    table = Table(box=None, title="tokens a pass", title_justify="left")
    made = [measure(name, found, arguments.rows, arguments.least) for name in arguments.drafters.split(",")]
    for column in made[0]:
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in made:
        table.add_row(*(value if isinstance(value, str) else f"{value:.2f}" for value in row.values()))
    Console().print(table)
    print(json.dumps({"rows": made, "answers": len(found), "budget": arguments.rows, "least": arguments.least}))


if __name__ == "__main__":
    main()
