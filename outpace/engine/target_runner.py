"""One pass of the target over prompts' chunks and requests' trees, and what each request gets of it.

Who needs more of the target than its scores is told in the same pass; where nobody does, the target is asked for scores
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from outpace.core.drafting import Needs, TargetFeedback, pick_layers
from outpace.core.lazy import torch
from outpace.core.logits import Scores, TargetOutput, best_tokens, select_rows
from outpace.core.logprobs import token_logprobs
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, LogprobsOptions, Row, tree_rows
from outpace.engine.sequence import TokenSequence, isolate
from outpace.models.base import Model, Part
from outpace.rules.base import FailedRow, reduce_isolated

_ONE = range(1)

Beside = Callable[[Callable[[], tuple[TargetOutput, list[Any]]], int], tuple[TargetOutput, list[Any]]]


class PrefillOutput(NamedTuple):
    """What a pass says of a chunk of a prompt."""

    logits: Scores  # [rows, vocab]; rows where they are reported or needed
    seen: TargetFeedback | None


class VerifyOutput(NamedTuple):
    """One tree after the pass: the rule's reduced rows and, where their scores are reported, the whole pass's, of which
    the tree's begin at `first`."""

    picks: list[Any]
    logits: Scores | None  # [rows of the pass, vocab]
    seen: TargetFeedback | None
    first: int


class _Share(NamedTuple):
    """Where a part's rows lie in the pass."""

    wanted: slice
    shown: slice


class _Forest:
    """The parts of a pass, and where the rows of each lie."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.shares: list[_Share] = []
        self.rows = self.wanted = self.shown = 0

    def add(self, part: Part) -> None:
        """One more part."""
        wanted, shown = self.wanted, self.shown
        self.rows += len(part.tokens)
        self.wanted += len(part.wanted)
        self.shown += len(part.shown)
        self.parts.append(part)
        self.shares.append(_Share(slice(wanted, self.wanted), slice(shown, self.shown)))


class TargetRunner:
    """The target's passes. `layers` are those whose hidden states anybody may need."""

    def __init__(self, target: Model, layers: Sequence[int]) -> None:
        self._target, self._layers = target, layers
        self._tells_best = False  # the last pass told each row's best token, which is what its rule picks

    def run(
        self,
        chunks: Sequence[tuple[TokenSequence, Part]],
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        beside: Beside,
    ) -> tuple[list[PrefillOutput], list[VerifyOutput]]:
        """One forward over all of them and the rules' first half, run by `beside`, which is told the rows' number."""
        forest = _Forest()
        for run, part in chunks:
            forest.add(_of_prompt(run, part))
        before = forest.wanted
        by_score = not before
        for run, _ in trees:
            by_score = by_score and run.picks_by_score
        for run, tree in trees:
            forest.add(_of_tree(run, tree, int(by_score)))
        shares = forest.shares

        def target_pass() -> tuple[TargetOutput, list[Any]]:
            scored = self._score(forest)
            if not forest.wanted:
                _wait_for(self._target.device)  # nobody reads a score: the pass would seem to take no time
            picks = [tokens[0] for tokens, _ in scored.best if tokens] if by_score else []
            self._tells_best = bool(picks)
            if len(picks) < forest.wanted - before:
                picks = self._reduced(trees, shares[len(chunks) :], scored, before)
            return scored, picks

        scored, picks = beside(target_pass, forest.rows)
        reads, judged = [], []
        for (run, part), share in zip(chunks, shares, strict=False):
            reads.append(self._read(run, part, scored, share))
        for (run, tree), share in zip(trees, shares[len(chunks) :], strict=True):
            mine = slice(share.wanted.start - before, share.wanted.stop - before)
            logits = scored.logits if run.request.logprobs else None
            needs, seen = run.draft.needs, None
            if needs.top or needs.layers:
                seen = self._seen(needs, tree.ids[: mine.stop - mine.start], tree.tokens, scored, share)
            judged.append(VerifyOutput(picks[mine], logits, seen, share.wanted.start))
        return reads, judged

    def go_on(self, trees: Sequence[tuple[TokenSequence, TokenTree]], judged: Sequence[VerifyOutput], most: int) -> int:
        """After a pass over roots alone, so many passes at most of plain decoding: each adds below every tree's last
        node the token that was picked there, and the pick that follows. None comes behind a stop token, or a row that
        its rule could not reduce, where a tree may end on a node without a pick. How many passes there were."""
        for count in range(most if self._tells_best else 0):
            for (run, _), its in zip(trees, judged, strict=True):
                if its.picks[-1] in run.request.stop_ids:
                    return count
            parts = []
            for (run, tree), its in zip(trees, judged, strict=True):
                last = len(tree) - 1
                tree.chain(last, its.picks[-1:], (0.0,))
                parts.append(Part(run.storage.session, its.picks[-1:], (last,), _ONE, best=1))
            held = self._target.score_held(parts)
            for row, (run, tree) in enumerate(trees):
                best = held.best[row][0]
                pick = best[0] if best else self._pick(run, tree, held.wide()[row : row + 1])
                if isinstance(pick, FailedRow):
                    return count + 1
                judged[row].picks.append(pick)
        return most if self._tells_best else 0

    def _pick(self, run: TokenSequence, tree: TokenTree, scores: Scores) -> Any:
        """What the rule picks behind a tree's last node. scores [1, vocab]"""
        return reduce_isolated(scores, tree_rows(run.request, run.committed, tree)[-1:])[0]

    def _score(self, forest: _Forest) -> TargetOutput:
        if forest.shown:
            return self._target.score_hidden(forest.parts, self._layers)
        held = self._target.score_held(forest.parts)
        return TargetOutput(held.values if held.ids is None else held.wide(), None, held.best)

    def _reduced(
        self,
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        shares: Sequence[_Share],
        scored: TargetOutput,
        before: int,
    ) -> list[Any]:
        """The rules' first half; the rows of a rule that needs hidden states have theirs."""
        rows: list[Row] = []
        for (run, tree), share in zip(trees, shares, strict=True):
            mine, hidden = tree_rows(run.request, run.committed, tree), scored.hidden
            if hidden is not None:
                own = pick_layers(hidden[:, share.shown], self._layers, run.request.rule.traits.hidden_layers)
                if own is not None:
                    mine = [row._replace(hidden=own[:, node]) for node, row in enumerate(mine)]
            rows += mine
        return reduce_isolated(scored.logits[before:] if before else scored.logits, rows)

    def _read(self, run: TokenSequence, part: Part, scored: TargetOutput, share: _Share) -> PrefillOutput:
        needs, logits = run.draft.needs, scored.logits[share.wanted]
        if not run.tells_prompt:
            return PrefillOutput(logits, None)
        start = run.storage.session.length
        seen = self._seen(needs, range(start, start + len(part.tokens)), part.tokens, scored, share)
        return PrefillOutput(logits, seen or TargetFeedback(range(start, start + len(part.tokens)), part.tokens))

    def _seen(
        self, needs: Needs, ids: Sequence[int], tokens: Sequence[int], scored: TargetOutput, share: _Share
    ) -> TargetFeedback | None:
        """What a drafter is told of these nodes; None where it needs nothing."""
        if not (needs.top or needs.layers):
            return None
        top = best_tokens(scored.logits[share.wanted], needs.top) if needs.top else None
        hidden = None if scored.hidden is None else scored.hidden[:, share.shown]
        return TargetFeedback(ids, tokens[: len(ids)], top, pick_layers(hidden, self._layers, needs.layers))


def note_logprobs(runs: Sequence[TokenSequence], judged: Sequence[VerifyOutput]) -> None:
    """Records the log-probabilities of what these requests' verdicts write, where they are asked for. Those of equal
    options go together, so that a device is waited for once."""
    groups: dict[LogprobsOptions, list[tuple[TokenSequence, VerifyOutput]]] = {}
    for run, its in zip(runs, judged, strict=True):
        if run.request.logprobs is not None and isinstance(run.ask, Commit):
            groups.setdefault(run.request.logprobs, []).append((run, its))
    for options, some in groups.items():
        try:
            _note(some, options)
        except Exception:  # one request's constraint, for instance: it must not spoil the others
            for run, its in some:
                isolate(run, _note, [(run, its)], options)


def _note(some: Sequence[tuple[TokenSequence, VerifyOutput]], options: LogprobsOptions) -> None:
    """All of these, or none."""
    reports = [run.report(len(its.picks)) for run, its in some]
    places = [its.first + node for (_, its), report in zip(some, reports, strict=True) for node in report.nodes]
    rows = [row for report in reports for row in report.rows]
    tokens = [token for report in reports for token in report.tokens]
    logits = some[0][1].logits
    assert logits is not None
    records = iter(token_logprobs(select_rows(logits, places), rows, tokens, options))
    for (run, _), report in zip(some, reports, strict=True):
        run.history.logprobs += islice(records, len(report.tokens))


def _wait_for(device: Any) -> None:
    """Until a GPU has done what it was given."""
    if str(device).startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


def _of_prompt(run: TokenSequence, part: Part) -> Part:
    """A chunk, with the rows that the request's drafter needs of it."""
    needs = run.draft.needs
    if not run.tells_prompt:
        return part
    every = range(len(part.tokens))
    return part._replace(wanted=every if needs.top else part.wanted, shown=every if needs.layers else ())


def _of_tree(run: TokenSequence, tree: TokenTree, best: int) -> Part:
    every, storage = range(len(tree)), run.storage
    shown = every if run.draft.needs.layers or run.request.rule.traits.hidden_layers else ()
    return Part(storage.session, tuple(tree.tokens), tuple(tree.parents), every, storage.keep, shown, best=best)
