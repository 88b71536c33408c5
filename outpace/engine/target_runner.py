"""The target's passes over chunks of prompts and token trees, and the output for each sequence.

Hidden states and full logits are computed only if some sequence of the pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from outpace.core.arrays import torch
from outpace.core.drafting import Needs, TargetFeedback, pick_layers
from outpace.core.logits import Scores, TargetOutput, best_tokens, select_rows
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, LogprobsOptions, Row, tree_rows
from outpace.engine.sequence import TokenSequence, run_guarded
from outpace.models.base import Model, Part
from outpace.rules.base import reduce_isolated


class PrefillOutput(NamedTuple):
    """The output of a pass for one chunk of a prompt."""

    logits: Scores  # [rows, vocab]; only rows that are reported or needed
    feedback: TargetFeedback | None  # for the drafter


class VerifyOutput(NamedTuple):
    """The output of a pass for one tree. `logits`, if the request needs log-probabilities, are those of the whole pass;
    the tree's rows begin at `first`."""

    picks: list[Any]  # the rule's reduced rows
    logits: Scores | None  # [rows of the pass, vocab]
    feedback: TargetFeedback | None  # for the drafter
    first: int


class _PartRows(NamedTuple):
    """The rows of one part in the output of a pass."""

    logit_rows: slice
    hidden_rows: slice


class _PassParts:
    """The parts of a pass, and the rows of each part in its output."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.part_rows: list[_PartRows] = []
        self.num_logit_rows = self.num_hidden_rows = 0

    def add(self, part: Part) -> None:
        logits, hidden = self.num_logit_rows, self.num_hidden_rows
        self.num_logit_rows += len(part.logit_rows)
        self.num_hidden_rows += len(part.hidden_rows)
        self.parts.append(part)
        self.part_rows.append(_PartRows(slice(logits, self.num_logit_rows), slice(hidden, self.num_hidden_rows)))


class TargetRunner:
    """Runs the target. `layers` are those whose hidden states some sequence may need."""

    def __init__(self, target: Model, layers: Sequence[int]) -> None:
        self._target, self._layers = target, layers

    def run(
        self,
        chunks: Sequence[tuple[TokenSequence, Part]],
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[PrefillOutput], list[VerifyOutput]]:
        """Run one forward over all chunks and trees, call `meanwhile`, and reduce the trees' rows by the rules. Nothing
        waits for the device before `meanwhile` has returned."""
        inputs = _PassParts()
        for sequence, part in chunks:
            inputs.add(_chunk_part(sequence, part))
        before = inputs.num_logit_rows
        by_score = not before
        for sequence, _ in trees:
            by_score = by_score and sequence.picks_by_score
        for sequence, tree in trees:
            inputs.add(_tree_part(sequence, tree, int(by_score)))
        tree_part_rows = inputs.part_rows[len(chunks) :]
        output = self._score(inputs)
        if meanwhile is not None:
            meanwhile()
        if not inputs.num_logit_rows:
            _synchronize(self._target.device)  # no score is read: the pass would seem to take no time
        picks = [tokens[0] for tokens, _ in output.best if tokens] if by_score else []
        if len(picks) < inputs.num_logit_rows - before:
            picks = self._reduce(trees, tree_part_rows, output, before)
        prefilled, verified = [], []
        for (sequence, part), rows in zip(chunks, inputs.part_rows, strict=False):
            prefilled.append(self._prefill_output(sequence, part, output, rows))
        for (sequence, tree), rows in zip(trees, tree_part_rows, strict=True):
            own = slice(rows.logit_rows.start - before, rows.logit_rows.stop - before)
            logits = output.logits if sequence.request.logprobs else None
            needs, feedback = sequence.draft.needs, None
            if needs.top or needs.layers:
                feedback = self._feedback(needs, tree.ids[: own.stop - own.start], tree.tokens, output, rows)
            verified.append(VerifyOutput(picks[own], logits, feedback, rows.logit_rows.start))
        return prefilled, verified

    def _score(self, inputs: _PassParts) -> TargetOutput:
        if inputs.num_hidden_rows:
            return self._target.score_hidden(inputs.parts, self._layers)
        sparse = self._target.score_sparse(inputs.parts)
        return TargetOutput(sparse.to_dense(), None, sparse.best)

    def _reduce(
        self,
        trees: Sequence[tuple[TokenSequence, TokenTree]],
        part_rows: Sequence[_PartRows],
        output: TargetOutput,
        before: int,
    ) -> list[Any]:
        """Reduce the trees' rows by their rules; a rule that needs hidden states gets those of its rows."""
        rows: list[Row] = []
        for (sequence, tree), its_rows in zip(trees, part_rows, strict=True):
            own, hidden = tree_rows(sequence.request, sequence.committed, tree), output.hidden
            if hidden is not None:
                layers = sequence.request.rule.traits.hidden_layers
                needed = pick_layers(hidden[:, its_rows.hidden_rows], self._layers, layers)
                if needed is not None:
                    own = [row._replace(hidden=needed[:, node]) for node, row in enumerate(own)]
            rows += own
        return reduce_isolated(output.logits[before:] if before else output.logits, rows)

    def _prefill_output(
        self, sequence: TokenSequence, part: Part, output: TargetOutput, rows: _PartRows
    ) -> PrefillOutput:
        needs, logits = sequence.draft.needs, output.logits[rows.logit_rows]
        if not sequence.needs_prompt_feedback:
            return PrefillOutput(logits, None)
        start = sequence.kv.session.length
        positions = range(start, start + len(part.tokens))
        feedback = self._feedback(needs, positions, part.tokens, output, rows)
        return PrefillOutput(logits, feedback or TargetFeedback(positions, part.tokens))

    def _feedback(
        self, needs: Needs, ids: Sequence[int], tokens: Sequence[int], output: TargetOutput, rows: _PartRows
    ) -> TargetFeedback | None:
        """Return the output that a drafter needs of these nodes; None if it needs none."""
        if not (needs.top or needs.layers):
            return None
        top = best_tokens(output.logits[rows.logit_rows], needs.top) if needs.top else None
        hidden = None if output.hidden is None else output.hidden[:, rows.hidden_rows]
        return TargetFeedback(ids, tokens[: len(ids)], top, pick_layers(hidden, self._layers, needs.layers))


def record_logprobs(sequences: Sequence[TokenSequence], verified: Sequence[VerifyOutput]) -> None:
    """Record the log-probabilities of the tokens that these sequences' verdicts emit, where they are requested. Those
    with equal options are computed together, so that a device is waited for once."""
    groups: dict[LogprobsOptions, list[tuple[TokenSequence, VerifyOutput]]] = {}
    for sequence, output in zip(sequences, verified, strict=True):
        if sequence.request.logprobs is not None and isinstance(sequence.action, Commit):
            groups.setdefault(sequence.request.logprobs, []).append((sequence, output))
    for options, group in groups.items():
        try:
            _record(group, options)
        except Exception:  # for instance of one request's constraint: it must not affect the others
            for sequence, output in group:
                run_guarded(sequence, _record, [(sequence, output)], options)


def _record(group: Sequence[tuple[TokenSequence, VerifyOutput]], options: LogprobsOptions) -> None:
    """Record the log-probabilities of all of these sequences, or of none if it raises."""
    from outpace.core.logprobs import token_logprobs

    emitted = [sequence.emitted_rows(len(output.picks)) for sequence, output in group]
    places = [output.first + node for (_, output), its in zip(group, emitted, strict=True) for node in its.nodes]
    rows = [row for its in emitted for row in its.rows]
    tokens = [token for its in emitted for token in its.tokens]
    logits = group[0][1].logits
    assert logits is not None
    records = iter(token_logprobs(select_rows(logits, places), rows, tokens, options))
    for (sequence, _), its in zip(group, emitted, strict=True):
        sequence.history.logprobs += islice(records, len(its.tokens))


def _synchronize(device: Any) -> None:
    if str(device).startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


def _chunk_part(sequence: TokenSequence, part: Part) -> Part:
    """Return the part of a chunk, with the rows that the sequence's drafter needs."""
    needs = sequence.draft.needs
    if not sequence.needs_prompt_feedback:
        return part
    every = range(len(part.tokens))
    return part._replace(logit_rows=every if needs.top else part.logit_rows, hidden_rows=every if needs.layers else ())


def _tree_part(sequence: TokenSequence, tree: TokenTree, best: int) -> Part:
    every, kv = range(len(tree)), sequence.kv
    hidden_rows = every if sequence.draft.needs.layers or sequence.request.rule.traits.hidden_layers else ()
    return Part(kv.session, tuple(tree.tokens), tuple(tree.parents), every, kv.keep, hidden_rows, best=best)
