"""Mistakes in options, rejection, stop strings and reuse: those of `mutations` that have checks of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mutation_checks import Mutation, Original
from option_checks import find_in_memory, find_in_options, find_in_rejection

from outpace.api import text
from outpace.core import adjust, distribution, logprobs, noise
from outpace.core.constraints import BannedText
from outpace.core.distribution import RandomSource, TokenDistribution
from outpace.core.tree import DrawnChildren, Siblings, TokenTree
from outpace.core.types import Row, Verdict
from outpace.drafters._tree_expander import TreeExpander
from outpace.engine import kv_memory
from outpace.engine import sequence as running
from outpace.engine.draft_runner import DraftRunner
from outpace.rules import _ratio, greedy, gumbel, match

ADJUSTING = (greedy, gumbel, match, _ratio, logprobs)


def without_path(adjusted: Original, logits: Any, rows: Any) -> Any:
    return adjusted(logits, [row._replace(path=()) for row in rows])


def by_the_neighbour(adjusted: Original, logits: Any, rows: Any) -> Any:
    return adjusted(logits, [*rows[1:], *rows[:1]])


def never(adjusted: Original, logits: Any, rows: Any) -> Any:
    return logits


def counting_the_prompt(adjust_rows: Original, scores: Any, rows: Sequence[Row], settings: Any, places: Any) -> None:
    bare = replace(rows[0].request, prompt=())
    adjust_rows(scores, [row._replace(request=bare) for row in rows], settings, places)


def committed_only(backwards: Original, row: Any) -> Any:
    return backwards(row._replace(path=()))


def of_the_next_row(token_logprobs: Original, logits: Any, rows: Any, tokens: Any, options: Any) -> Any:
    return token_logprobs(logits.roll(-1, 0), rows, tokens, options)


def always_raw(token_logprobs: Original, logits: Any, rows: Any, tokens: Any, options: Any) -> Any:
    return token_logprobs(logits, rows, tokens, replace(options, processed=False))


def not_cut(commit: Original, run: Any, tree: TokenTree, verdict: Verdict, drafted: int) -> Any:
    records = list(run.history.logprobs)
    tokens = commit(run, tree, verdict, drafted)
    run.history.logprobs[:] = records
    return tokens


def unfiltered_q(draw: Original, self: Any, parent: int, drawn: DrawnChildren, siblings: Siblings) -> int:
    """The children are drawn from q as filtered, and judged by a q that gives something to every token."""
    return int(draw(self, parent, drawn._replace(q=TokenDistribution(drawn.q.to_dense(4) + 0.1)), siblings))


def no_bonus(walk: Original, self: Any, tree: TokenTree, picks: Sequence[Any]) -> Verdict:
    verdict = walk(self, tree, picks)
    is_leaf = len(verdict.path) > 1 and not tree.children(verdict.path[-1])
    return verdict._replace(next_token=None) if is_leaf else verdict


def with_key(is_draw: bool, change: Callable[[Any], dict[str, int]]) -> Original:
    """Random numbers whose keys are changed, those of draws or all others."""
    return lambda number, self, key: number(
        self, key._replace(**change(key)) if (key.purpose == noise.DRAW) == is_draw else key
    )


def in_its_round(key: Any) -> dict[str, int]:
    """The node's place among those of a round, so that it returns in the next."""
    return {"node_id": key.node_id % 4}


def one_purpose(key: Any) -> dict[str, int]:
    return {"purpose": noise.ACCEPT}


def key_without(part: int) -> Original:
    """Noise whose key lacks one of seed, choice, and position or node."""
    return lambda keyed, *parts: keyed(*(0 if n == part else value for n, value in enumerate(parts)))


def one_too_far(best_start: Original, self: Any, run: Any) -> Any:
    holder, length = best_start(self, run)
    more = holder is not None and length < min(getattr(holder, "kv", holder).session.length, len(run.committed) - 1)
    return holder, length + more


def after(change: Callable[[Any], object]) -> Original:
    """A method that first changes its request."""

    def mistake(method: Original, self: Any, run: Any) -> None:
        change(run)
        method(self, run)

    return mistake


def settle(run: Any) -> None:
    run.kv.commit_pending()


def with_what_was_accepted(release: Original, self: Any, run: Any) -> None:
    kept = run.kv.keep
    release(self, run)
    run.kv.keep = kept


def beyond_the_budget(fit: Original, self: Any, run: Any, rows: int) -> bool:
    run.kv.session.reserve(run.prefilled + rows)
    return True


def forget_what_is_held(push: Original, self: Any, text: str, may_end: bool = True) -> Any:
    self._held, held = "", self._held
    return held + push(self, text, may_end)


def ending_at_once(push: Original, self: Any, text: Any, may_end: Any = True) -> Any:
    return push(self, text)


def read_on(watch: Original, self: Any, tokens: Sequence[int], drafted: int) -> None:
    watch(self, tokens, drafted)


def mutation(name: str, owner: Any, attribute: str, mistake: Original) -> Mutation:
    owners = owner if isinstance(owner, tuple) else (owner,)
    find = find_in_options
    if name.startswith("rejection"):
        find = find_in_rejection
    elif name.startswith("reuse"):
        find = find_in_memory
    return Mutation(name, owners, attribute, mistake, find)


OPTION_MUTATIONS = [
    mutation("options: penalties without the path", ADJUSTING, "adjust_logits", without_path),
    mutation("options: bias of the neighbour's row", ADJUSTING, "adjust_logits", by_the_neighbour),
    mutation("options: nothing is adjusted", ADJUSTING, "adjust_logits", never),
    mutation("options: the prompt counts as written", adjust, "_adjust", counting_the_prompt),
    mutation("options: a bad word is not seen in the path", adjust, "_answer_backwards", committed_only),
    mutation("options: a bad word is not seen across tokens", BannedText, "after", lambda f, *parts: []),
    mutation("logprobs: of the wrong row", logprobs, "token_logprobs", of_the_next_row),
    mutation("logprobs: raw where processed ones are asked", logprobs, "token_logprobs", always_raw),
    mutation("logprobs: not cut with the text", running.TokenSequence, "commit", not_cut),
    mutation("stops: nothing is held back", text, "held_back", lambda f, text, stop: 0),
    mutation("stops: what was held is forgotten in the search", text.StopStrings, "push", forget_what_is_held),
    mutation("stops: one ends the text before min_tokens", text.StopStrings, "push", ending_at_once),
    mutation("stops: the text goes on behind one", text.TextAssembler, "watch", read_on),
    mutation("rejection: drop the residual", _ratio, "residual", lambda f, p, q: p),
    mutation("rejection: keys return in a later round", RandomSource, "number", with_key(False, in_its_round)),
    mutation("rejection: one key for two purposes", RandomSource, "number", with_key(False, one_purpose)),
    mutation("rejection: reuse noise across choices", distribution, "uniform", key_without(1)),
    mutation("rejection: draws return in a later round", RandomSource, "number", with_key(True, in_its_round)),
    mutation("reuse: a prefix copied one token too far", kv_memory.KVMemory, "_best_start", one_too_far),
    mutation("reuse: what an end cut off is kept", kv_memory.KVMemory, "close", after(settle)),
    mutation("reuse: what was accepted before a pause", kv_memory.KVMemory, "release", with_what_was_accepted),
    mutation("reuse: slots beyond the budget", kv_memory.KVMemory, "fit", beyond_the_budget),
    mutation("reuse: drafts count nothing", DraftRunner, "stored_bytes", lambda f, self, texts: 0),
    mutation("reuse: a pause leaves the draft its session", TreeExpander, "pause", lambda f, self, state: None),
    mutation("reuse: a prompt that is reported on", kv_memory.KVMemory, "_may_reuse", lambda f, self, run: True),
]
