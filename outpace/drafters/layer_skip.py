"""The target without some of its attention and MLP sublayers drafts on the target's own KV cache.

Draft & Verify, arXiv:2309.08168, for given layers; SWIFT, arXiv:2410.06916, for layers found while text is written,
here by a local search, which found better sets of 40 simulated layers than a Gaussian process in as many trials, and
sets within 0.011 of its best of 16.

Nothing is loaded and nothing is stored twice: the draft writes into pending slots of the target's session, which are
dropped before the target verifies. A draft ends at the first token whose probability is below a threshold, which adapts
to the acceptance rate of the request's drafts (Draft & Verify, section 4.3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, number, option, whole
from outpace.core.tree import PREFIX, TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, Observation, Request, Row, TopK
from outpace.drafters._model_drafter import PickModels
from outpace.drafters._tree_expander import SPARE, ExpansionJob, ExpansionState, TreeExpander, rows_of
from outpace.models.base import Capability, Model, Part
from outpace.rules.base import top_k_rows

_IDLE = 300  # trials without improvement after which the search ends


class SublayerSearch:
    """Random local search for the best set; SWIFT's trials, all of one size, are random sets or change the best one."""

    def __init__(
        self,
        start: Sublayers,
        num_layers: int,
        trials: int,
        enough: float | None = None,
        others: Iterable[Sublayers] = (),
    ) -> None:
        """`start` and the `others` are tried first. The search ends after `trials` trials, or at a score of `enough`
        (None: any score can be exceeded, and sets may have any size)."""
        self.best, self.score = start, 0.0
        self.count = self._idle = 0  # trials, and trials since the last improvement
        self._others, self._layers = iter(others), searchable_layers(num_layers)
        self._trials, self._enough = trials, enough
        self._random = random.Random(0)

    @property
    def is_over(self) -> bool:
        is_found = False
        if self._enough is not None and self.count:
            is_full = len(self.best.attention) == len(self._layers)  # there is no other set of this size
            is_found = is_full or self.score >= self._enough
        return is_found or self.count >= self._trials or self._idle >= _IDLE

    def propose(self) -> Sublayers:
        """Return the set to try next."""
        if not self.count:
            return self.best
        if (other := next(self._others, None)) is not None:
            return other
        kinds = [set(layers) for layers in self.best]
        if self._enough is None:
            for _ in range(self._random.choice((1, 2))):
                self._random.choice(kinds).symmetric_difference_update([self._random.choice(self._layers)])
        elif self._random.random() < 0.5:
            kinds = [set(self._random.sample(self._layers, len(layers))) for layers in kinds]
        else:  # one other layer in each
            kinds = [self._exchanged(layers) for layers in kinds]
        return Sublayers(*(tuple(sorted(layers)) for layers in kinds))

    def learn(self, sublayers: Sublayers, score: float) -> bool:
        """Record the score of a set; return whether it is the best one now."""
        self.count += 1
        self._idle += 1
        if score <= self.score and self.count > 1:
            return False
        self.best, self.score, self._idle = sublayers, score, 0
        return True

    def _exchanged(self, layers: set[int]) -> set[int]:
        others = sorted(set(self._layers) - layers)
        if not others or not layers:
            return layers
        return {*layers, self._random.choice(others)} - {self._random.choice(sorted(layers))}


class Sublayers(NamedTuple):
    """Layers, numbered from 0, rising: those without attention and those without MLP."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.attention) + len(self.mlp)

    def check(self, num_layers: int) -> None:
        """Raise UserError for a set that skips nothing, everything, or a layer that the model does not have."""
        for name, layers in (("skip_attention", self.attention), ("skip_mlp", self.mlp)):
            beyond = next((layer for layer in layers if layer >= num_layers), None)
            if beyond is not None:
                raise UserError(f"{name} names layer {beyond}, the target has layers 0 to {num_layers - 1}")
        if not self.size:
            raise UserError(
                "skip_attention and skip_mlp name no layer: a draft that leaves out nothing costs as much as the target"
            )
        if self.size == 2 * num_layers:
            raise UserError(
                f"skip_attention and skip_mlp name all {num_layers} layers: at least one attention or MLP must stay"
            )

    def __str__(self) -> str:
        return f"--skip-attention {format_layers(self.attention)} --skip-mlp {format_layers(self.mlp)}"


def check_target(model: Model) -> None:
    """Raise UserError for a model that cannot skip sublayers."""
    model.check_capability(Capability.SKIP_SUBLAYERS)
    model.check_capability(Capability.LENGTH)


def parse_layers(name: str, text: str | None) -> tuple[int, ...]:
    """Parse layers written as "3,5-8"; None or an empty text means none. UserError for any other text."""
    found: set[int] = set()
    for part in (text or "").replace(" ", "").split(",") if text and text.strip() else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or part.endswith("-"):
            raise UserError(f"{name} is {text!r:.200}, it must be layers such as 3,5-8, numbered from 0")
        if int(last or first) < int(first) or int(last or first) > 9999:
            raise UserError(f"{name} has {part!r:.40}, a range rises and ends below 10000")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def format_layers(layers: Sequence[int]) -> str:
    """Format layers so that `parse_layers` reads them; "" for none."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)
    return shown or '""'


def searchable_layers(num_layers: int) -> range:
    """Return the layers that a search may skip: all but the first and the last. UserError if there are none."""
    if num_layers < 3:
        raise UserError(
            f"the target has {num_layers} layers, and a search keeps the first and the last: name the layers to skip"
            " with skip_attention or skip_mlp"
        )
    return range(1, num_layers - 1)


def evenly_spaced(num_layers: int, ratio: float) -> Sublayers:
    """Skip attention and MLP in this share of all layers, at least one, evenly spaced between the first and the
    last."""
    layers = searchable_layers(num_layers)
    count = min(max(round(ratio * num_layers), 1), len(layers))
    chosen = tuple(layers[number * len(layers) // count] for number in range(count))
    return Sublayers(chosen, chosen)


def find_agreements(model: Model, session: Any, request: Request, text: Sequence[int], count: int) -> list[bool]:
    """Return, for each of the text's last `count` tokens, whether a model proposes it given the tokens before it.

    This takes one forward in pending slots of the target's session, which holds all tokens but the last; it starts
    `count` tokens earlier, so stored keys of these tokens are not read and nothing is changed.
    """
    start = len(text) - 1 - count
    part = Part(session, text[start:-1], range(PREFIX, count - 1), range(count), length=start)
    held = model.score_sparse([part])
    session.keep(())
    rows = [Row(request, text[: start + place + 1]) for place in range(count)]
    offers = top_k_rows(held, rows, 1)
    return [offer[0][:1] == [token] for offer, token in zip(offers, text[start + 1 :], strict=True)]


_WINDOW = 50  # tokens of an answer on which a set is tried
_EVERY = 4  # drafted rounds for each that tries a set
_ACCEPTANCE_TARGET = 0.9  # acceptance rate below which the threshold rises
_CONFIDENCE_STEP = 0.01  # by which it moves, before smoothing
_RATE_KEPT, _CONFIDENCE_KEPT = 0.5, 0.9  # per round, of the acceptance rate and of the threshold (beta 1 and beta 2)


@dataclass(frozen=True)
class Options(MethodOptions):
    """What is skipped, how that is searched for, and where a draft ends."""

    skip_attention: str | None = option(None, "layers whose attention is skipped, as in 3,5-8")
    skip_mlp: str | None = option(
        None,
        "layers whose MLP is skipped; if neither is given, sets are tried on the last 50 tokens of answers, in one of"
        " four drafted rounds",
    )
    skip_ratio: float = number(
        0.45, 0.01, 0.99, help="share of the layers in these sets, at first spread evenly, later others"
    )
    skip_enough: float = number(0.93, 0.0, 1.0, help="rate of agreement with the target at which the search ends")
    skip_trials: int = whole(1000, 1, help="sets after which it ends in any case")
    confidence: float = number(
        0.8,
        0.0,
        1.0,
        help="a draft ends at the first token whose probability is below a threshold, initially this; it rises while"
        " the acceptance rate is below 0.9, and falls otherwise if it ended the draft",
    )
    width: int = whole(1, 1, 512, help="tokens proposed at each place")
    tree_nodes: int = whole(256, 2, 16384, help="maximum size of the tree")

    def __post_init__(self) -> None:
        self.named()
        super().__post_init__()

    def named(self) -> Sublayers | None:
        """Return the given sublayers; None if neither option is set."""
        if self.skip_attention is None and self.skip_mlp is None:
            return None
        return Sublayers(parse_layers("skip_attention", self.skip_attention), parse_layers("skip_mlp", self.skip_mlp))


@dataclass
class SkipState(ExpansionState):
    """`confidence`: the threshold at which drafts end. `acceptance`: the acceptance rate of recent drafts. `layers`:
    length of this round's draft so far. `offers`: the proposals below a tree node, by id. `is_unsure`: the draft is
    over for this round. `rounds`: rounds drafted since a set was tried on this text."""

    confidence: float = 0.0
    acceptance: float = 0.0
    layers: int = 0
    offers: dict[int, TopK] = field(default_factory=dict)
    is_unsure: bool = False
    rounds: int = 0


class LayerSkipDrafter(Drafter):
    """Drafts with the target without some sublayers. `search`: looks for better sublayers; None keeps them fixed."""

    capabilities = Capabilities(
        (DraftSource("layer_skip", runs_model=True, reads=0),),  # the target has read the text
        Needs(session=1),  # replaced by each instance, according to its options
        cost="a forward of a part of the target for each token",
    )

    def __init__(
        self, target: Model, sublayers: Sublayers, options: Options, search: SublayerSearch | None = None
    ) -> None:
        self._target, self._options, self.search = target, options, search
        self._expander = TreeExpander(target, options.width, options.tree_nodes, uses_target_session=True)
        self._pick_models = PickModels()
        self._choose(sublayers)
        kept = 1 - sublayers.size / (2 * target.num_layers)  # as if all sublayers had one size and no others weights
        size = round(target.weight_bytes * kept) if target.weight_bytes else None
        self.capabilities = replace(
            self.capabilities,
            sources=(self.capabilities.sources[0]._replace(width=options.width, weight_bytes=size),),
            needs=Needs(session=max(options.tree_nodes, 0 if search is None else _WINDOW)),
            models=(target,),
            learnt=self._pick_models,
        )

    def open(self, request: Request) -> SkipState:
        return SkipState(request, confidence=self._options.confidence, acceptance=_ACCEPTANCE_TARGET)

    def grow(self, states: Sequence[SkipState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the shortened target over the frontiers of all trees, and another one for a tree that
        already had all proposals."""
        for state in states:
            self._try(state)
        sure = [n for n, state in enumerate(states) if not state.is_unsure]
        if jobs := self._expander.jobs([states[n] for n in sure], [trees[n] for n in sure]):
            self._expand(jobs)

    def observe(self, state: SkipState, seen: Observation) -> None:
        self._pick_models.learn(state.request, state.offers, seen)
        if state.layers:
            self._adapt(state, seen)
        self._expander.follow(state, seen)
        state.offers, state.is_unsure, state.layers = {}, False, 0

    def pause(self, state: SkipState) -> None:
        self._expander.pause(state)

    def _choose(self, sublayers: Sublayers) -> None:
        self.sublayers = sublayers
        self._expander.model = self._target.skip_sublayers(*sublayers)

    def _adapt(self, state: SkipState, seen: Observation) -> None:
        """Update the acceptance rate and the threshold after a draft, by the rules of Draft & Verify."""
        offers = state.offers
        walked = [
            (offers[node][0], token) for node, token in zip(seen.node_ids, seen.tokens, strict=True) if node in offers
        ]
        accepted = sum(token in tokens[: self._options.width] for tokens, token in walked)
        state.acceptance += (1.0 - _RATE_KEPT) * (accepted / state.layers - state.acceptance)
        step = (1.0 - _CONFIDENCE_KEPT) * _CONFIDENCE_STEP
        if state.acceptance < _ACCEPTANCE_TARGET:
            state.confidence = min(state.confidence + step, 1.0)
        elif state.is_unsure:
            state.confidence = max(state.confidence - step, 0.0)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward and add the children; a draft ends where none is likely enough."""
        offers = iter(top_k_rows(self._expander.score(jobs), rows_of(jobs), self._options.width + SPARE))
        for state, tree, frontier in jobs:
            pick_model, surest = self._pick_models.for_request(state.request), -math.inf
            for node in frontier:
                tokens, values = next(offers)
                if not tokens:
                    continue  # a constraint allows nothing here
                state.offers[tree.ids[node]] = (tokens, values)
                chances = pick_model.log_chances(values, self._options.width)
                surest = max(surest, chances[0])
                children = [(tree.scores[node] + c, node, t) for t, c in zip(tokens, chances, strict=False)]
                tree.attach_children(children[: self._options.tree_nodes - len(tree)], self._options.width)
            state.layers += 1
            state.is_unsure = surest < (math.log(state.confidence) if state.confidence else -math.inf)

    def _try(self, state: SkipState) -> None:
        """Make one trial of the search if one is due: before a round's first draft, when nothing is pending."""
        if self.search is None or self.search.is_over or state.slots or state.is_unsure:
            return
        state.rounds += 1
        session, count = state.target_session, _WINDOW
        has_text = session is not None and not session.pending and session.length == len(state.tokens) - 1
        has_text = has_text and len(state.tokens) - len(state.request.prompt) >= count and session.free >= count
        if state.rounds < _EVERY or not has_text:
            return
        state.rounds = 0
        tried = self.search.propose()
        found = find_agreements(self._target.skip_sublayers(*tried), session, state.request, state.tokens, count)
        if self.search.learn(tried, sum(found) / count):
            self._choose(tried)


def build(options: Options, *, given: BuildContext) -> LayerSkipDrafter:
    """Build the drafter; UserError for a target that cannot skip sublayers, and for layers that do not fit it."""
    target = given.target
    if target is None:
        raise UserError(
            "drafter layer_skip drafts on the target's own session, a worker has none: use method auto or speculative"
        )
    check_target(target)
    sublayers = options.named()
    if sublayers is not None:
        sublayers.check(target.num_layers)
        return LayerSkipDrafter(target, sublayers, options)
    start = evenly_spaced(target.num_layers, options.skip_ratio)
    search = SublayerSearch(start, target.num_layers, options.skip_trials, options.skip_enough)
    return LayerSkipDrafter(target, search.best, options, search)
