"""One small part for each contract, as a method's file would define it.

A drafter that receives the best tokens, a head, a rule on hidden states, and a drafter of skipped layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from outpace.core.drafting import Needs, TargetFeedback
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, DraftState, Observation, Request, Row, Verdict
from outpace.drafters._tree_expander import ExpansionState, TreeExpander, rows_of
from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model
from outpace.rules.base import top_k_rows
from outpace.rules.greedy import Greedy


class Successors(Drafter):
    """Proposes what the target held for the likeliest after the same token, when it last judged it."""

    capabilities = Capabilities((DraftSource("successors"),), Needs(top=2, prompt=True))

    def __init__(self) -> None:
        self._after: dict[int, list[int]] = {}

    def observe(self, state: DraftState, seen: Observation) -> None:
        super().observe(state, seen)
        assert seen.seen is not None
        assert seen.seen.top is not None
        self._after.update(zip(seen.seen.tokens, seen.seen.top.tolist(), strict=True))

    def grow(self, states: Sequence[DraftState], trees: Sequence[TokenTree]) -> None:
        for tree in trees:
            for node in tree.leaves()[:4]:
                for token in self._after.get(tree.tokens[node], ()):
                    tree.add(node, token, tree.scores[node] + math.log(0.4))


@dataclass
class HeadState(DraftState):
    """`last`: the hidden state of the last verified position."""

    last: Tensor | None = None


class Head(Drafter):
    """One matrix on the hidden state of the last verified position and the token after it: the token after that. It is
    fitted to the prompt by least squares."""

    def __init__(self, target: Model, layer: int) -> None:
        self.capabilities = Capabilities((DraftSource("head", runs_model=True),), Needs(layers=(layer,), prompt=True))
        self._vocab = target.vocab_size
        self._inputs: list[Tensor] = []  # one row each: a position's feature and its next token
        self._outputs: list[int] = []  # the token after that

    def open(self, request: Request) -> HeadState:
        return HeadState(request)

    def observe(self, state: HeadState, seen: Observation) -> None:
        super().observe(state, seen)
        assert seen.seen is not None
        assert seen.seen.hidden is not None
        if seen.tokens:
            state.last = torch.as_tensor(seen.seen.hidden[0, list(seen.seen.ids).index(seen.node_ids[-1])])
            return
        for place, feature in zip(seen.seen.ids, torch.as_tensor(seen.seen.hidden[0]), strict=True):  # of the prompt
            state.last = feature
            if place + 2 < len(state.tokens):
                self._inputs.append(self._input(feature, state.tokens[place + 1]))
                self._outputs.append(state.tokens[place + 2])

    def grow(self, states: Sequence[HeadState], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            self._grow_one(state, tree)

    def _grow_one(self, state: HeadState, tree: TokenTree) -> None:
        if len(tree) > 1 or state.last is None or not self._inputs:
            return
        outputs = torch.nn.functional.one_hot(torch.tensor(self._outputs), self._vocab).double()
        matrix = torch.linalg.lstsq(torch.stack(self._inputs), outputs).solution
        chances = self._input(state.last, state.tokens[-1]) @ matrix
        tree.add(0, int(chances.argmax()), math.log(0.5))

    def _input(self, feature: Tensor, token: int) -> Tensor:
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), self._vocab)
        return torch.cat([feature.double(), one_hot.double()])


class Forgiving(Greedy):
    """Lossy: accepts any drafted token where a probe on a hidden state says that it matters little, as in AutoJudge."""

    def __init__(self, layer: int, probe: Sequence[float], threshold: float) -> None:
        self.traits = replace(Greedy.traits, lossless=False, same_text=False, pick=None, hidden_layers=(layer,))
        self._probe, self._threshold = torch.tensor(probe, dtype=torch.float64), threshold

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[int, bool]]:
        hidden = torch.stack([torch.as_tensor(row.hidden[0]) for row in rows if row.hidden is not None])
        forgives = torch.sigmoid(hidden.double() @ self._probe) < self._threshold
        return list(zip(super().reduce(logits, rows), forgives.tolist(), strict=True))

    def walk(self, tree: TokenTree, picks: Sequence[tuple[int, bool]]) -> Verdict:
        path = [0]
        while path[-1] < len(picks):
            pick, forgives = picks[path[-1]]
            child = tree.child(path[-1], pick)
            if child is None and forgives:
                child = next(iter(tree.children(path[-1])), None)
            if child is None:
                return Verdict(path, pick)
            path.append(child)
        return Verdict(path, None)


class Skipping(Drafter):
    """The target without some sublayers, on the target's own session: Draft & Verify's shape."""

    capabilities = Capabilities((DraftSource("skipping", runs_model=True),), Needs(session=24))

    def __init__(self, target: Model, attention: Sequence[int], mlp: Sequence[int], width: int = 1) -> None:
        self._expander = TreeExpander(
            target.skip_sublayers(attention, mlp), width, tree_nodes=24, uses_target_session=True
        )
        self._width = width

    def open(self, request: Request) -> ExpansionState:
        return ExpansionState(request)

    def grow(self, states: Sequence[ExpansionState], trees: Sequence[TokenTree]) -> None:
        jobs = self._expander.jobs(states, trees)
        offers = iter(top_k_rows(self._expander.score(jobs), rows_of(jobs), self._width))
        for _, tree, frontier in jobs:
            for node in frontier:
                for token in next(offers)[0]:
                    tree.add(node, token, tree.scores[node] + math.log(0.6))

    def observe(self, state: ExpansionState, seen: Observation) -> None:
        self._expander.follow(state, seen)


def answered(model: Model, drafter: Drafter, request: Request, decoders: Sequence[ModuleType]) -> list[TokenSequence]:
    """The same request by each of these methods, at once in one engine."""
    with Engine(model, drafter) as engine:
        runs = [engine.submit(request, decoder, decoder.Options()) for decoder in decoders]
        while not all(run.finish_reason for run in runs):
            engine.step()
    return runs


@dataclass
class WitnessState(DraftState):
    """What was shown of each text: (layers, top) by all tokens up to the one that was judged."""

    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of the tree's nodes, by id
    told: list[tuple[list[int], list[int] | None, Tensor | None]] = field(default_factory=list)


class Witness(Drafter):
    """Grows branches from a list and keeps all that it receives about every text."""

    def __init__(self, needs: Needs, branches: Sequence[Sequence[int]]) -> None:
        self.capabilities, self._branches = Capabilities((DraftSource("witness"),), needs), branches
        self.states: list[WitnessState] = []

    def open(self, request: Request) -> WitnessState:
        self.states.append(WitnessState(request))
        return self.states[-1]

    def grow(self, states: Sequence[WitnessState], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            state.paths = {tree.ids[0]: ()}
            for branch in self._branches:
                node = 0
                for token in branch:
                    known = tree.child(node, token)
                    child = tree.add(node, token, tree.scores[node] - 0.5) if known is None else known
                    assert child is not None
                    state.paths[tree.ids[child]] = (*state.paths[tree.ids[node]], token)
                    node = child

    def observe(self, state: WitnessState, seen: Observation) -> None:
        needs = self.capabilities.needs
        if not seen.tokens:
            assert seen.seen is not None
            for number, place in enumerate(seen.seen.ids):
                assert seen.seen.tokens[number] == state.tokens[place]
                self._keep(state, seen.seen, number, state.tokens[: place + 1])
        elif needs.top or needs.layers:
            assert seen.seen is not None
            for number, node in enumerate(seen.seen.ids):
                if node not in state.paths:  # another drafter's, on the same tree
                    continue
                path = state.paths[node]
                assert seen.seen.tokens[number] == [*state.tokens, *path][-1]
                self._keep(state, seen.seen, number, [*state.tokens, *path])
        else:
            assert seen.seen is None
        state.tokens += seen.tokens

    def _keep(self, state: WitnessState, seen: TargetFeedback, number: int, text: list[int]) -> None:
        top = None if seen.top is None else seen.top[number].tolist()
        state.told.append((text, top, None if seen.hidden is None else torch.as_tensor(seen.hidden[:, number])))
