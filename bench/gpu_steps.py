"""The part of bench/gpu.py on draft steps: what one costs alone, and what several in one graph do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu_clock import Bench, Row

from outpace.core.drafting import BuildContext
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import model as model_drafter
from outpace.rules import greedy, gumbel

LAYERS = 8  # that a round drafts
RULES: Sequence[tuple[str, Any, Sampling]] = (("greedy", greedy, GREEDY), ("sampled", gumbel, Sampling(0.8)))


def drafter_of(model: Any, steps: int, is_beside: bool = False) -> Any:
    """The drafter `model`, which takes so many steps at once; beside a target it asks at each where that went."""
    drafter = model_drafter.build(model_drafter.Options(steps=steps, floor=0.0), given=BuildContext(draft=model))
    if is_beside:
        drafter.begin_concurrent()
    return drafter


def trees(drafter: Any, request: Request) -> TokenTree:
    """The tree of one round of so many layers."""
    state, tree = drafter.open(request), TokenTree(request.prompt[-1])
    for _ in range(LAYERS):
        drafter.grow([state], [tree])
    return tree


def draft_steps(bench: Bench, model: Any) -> Iterator[Row]:
    """Milliseconds a step, and whether the tree is that of single steps: with graphs it is, to rounding."""
    prompt = tuple(range(1, 65))
    for name, module, sampling in RULES:
        request = Request(prompt, module.build(module.Options()), 256, sampling)
        alone, single = 0.0, trees(drafter_of(model, 1), request)
        for steps, is_beside in ((1, False), (2, False), (4, False), (8, False), (4, True), (8, True)):
            drafter = drafter_of(model, steps, is_beside)
            tree = trees(drafter, request)
            state = drafter.open(request)

            def round_of(drafter: Any = drafter, state: Any = state) -> None:
                tree = TokenTree(state.tokens[-1])
                for _ in range(LAYERS):
                    drafter.grow([state], [tree])
                drafter.observe(state, Observation([tree.ids[0]], [1], TokenTree(1, tree.next_id, tree.next_id + 1)))

            seconds = bench.seconds(round_of, min(bench.args.rounds, 50)) / LAYERS
            alone = alone or seconds
            same = (tree.tokens, tree.parents) == (single.tokens, single.parents)
            yield {
                "rule": name,
                "steps": steps,
                "beside": is_beside,
                "ms_a_step": 1e3 * seconds,
                "times_single": alone / seconds,
                "same_tree": same,
            }
