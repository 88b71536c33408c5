"""A draft model whose drafts are extended by phrases: several tokens per draft step, and longer drafts.

Ouroboros: Zhao et al., 2024, arXiv:2402.13720, without its Jacobi iteration: between phrases the draft model drafts one
token at a time; no training beyond the draft model's.

Phrases of the pool that follow the last token, and those that follow the draft's end, are attached to the tree. The
next forward of the draft reads all of them together with the end itself, and the draft continues after the last token
that it would have proposed too; the others remain as suffixes for the target to verify. The pool learns from texts, and
from the target's tokens after rejected ones. Each cache salt has its own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, option, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, DraftSource, Observation, Request, TopK
from outpace.drafters._composite import JoinedState
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState
from outpace.drafters._model_drafter import PickModels
from outpace.drafters._phrases import FOLLOWERS, LEADERS, PHRASES_FILE, PhraseTable, PhraseTables
from outpace.drafters._tree_expander import ExpansionJob, ExpansionState, TreeExpander, rows_of
from outpace.models.base import Model
from outpace.rules.base import top_k_rows

_SUFFIXES = 3  # phrases proposed after a token
_FLOOR = 0.005  # nodes that the target reaches with a lower probability are not expanded
_SCORED = 5  # proposals that are scored, so that the share of the best one is known


@dataclass(frozen=True)
class Options(MethodOptions):
    """The phrases, and how the draft model drafts."""

    phrase: int = whole(4, 1, 64, help="most tokens of a phrase")
    width: int = whole(16, 1, 512, help="nodes in a forward of the draft")
    tree_nodes: int = whole(256, 2, 16384, help="maximum size of the tree")
    phrases: str = option("", PHRASES_FILE)
    draft_window: int | None = whole(None, 0, help="as for other draft models")


@dataclass
class OuroborosState(LookupState, ExpansionState):
    """`offers`: the draft's proposals below a node, by id. `last`: the end of the text, whose phrases are incomplete.
    `tree`: the tree that was grown last. `end`: the id of the node where the draft continues (-1: the root). `pool`:
    the phrases of the request's cache salt."""

    offers: dict[int, TopK] = field(default_factory=dict)
    last: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    end: int = -1
    pool: PhraseTable = field(default_factory=lambda: PhraseTable(1, 1))


class OuroborosDrafter(LookupDrafter[OuroborosState]):
    """Keeps a session of the draft model for each request, and a pool for each cache salt."""

    capabilities = Capabilities(
        (DraftSource("ouroboros", runs_model=True),),  # not calibrated: its trees contain the draft model's nodes too
        Needs(top=1),
        cost="a forward of the draft model for each piece, which may have several tokens",
    )

    def __init__(self, model: Model, options: Options, given: BuildContext | None = None) -> None:
        super().__init__(options)
        window = model.draft_window if options.draft_window is None else options.draft_window
        self._expander = TreeExpander(model, options.width, options.tree_nodes, _FLOOR, window)
        self._pick_models = PickModels()
        self._pools = PhraseTables(LEADERS, FOLLOWERS, options.phrases, given)
        learnt = JoinedState([self._pick_models, self])
        self.capabilities = self._expander.capabilities(self.capabilities, learnt, save=self._pools.save)

    def open(self, request: Request) -> OuroborosState:
        pool = self._pools.for_salt(request.cache_salt)
        state = OuroborosState(request, session=self._expander.open(request), pool=pool)
        state.last = state.pool.read((), request.prompt, self._options.phrase)
        return state

    def grow(self, states: Sequence[OuroborosState], trees: Sequence[TokenTree]) -> None:
        """Run one forward of the draft model over the ends of all drafts and the phrases below them, and another one
        for a draft that did not advance."""
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree
            if state.end not in tree.ids:
                state.end = tree.ids[0]
                self.propose(state, tree)
        if jobs := self._expander.jobs(states, trees):
            self._expand(jobs)

    def propose(self, state: OuroborosState, tree: TokenTree) -> None:
        """Attach phrases after the draft's end."""
        end, grade = tree.ids.index(state.end), Certainty.SURE
        for phrase in state.pool.followers(tree.tokens[end])[:_SUFFIXES]:
            self.attach_branch(state, tree, phrase, 1, grade, node=end, max_nodes=self._options.tree_nodes)
            grade = Certainty.OTHER

    def observe(self, state: OuroborosState, seen: Observation) -> None:
        self._pick_models.learn(state.request, state.offers, seen)
        self.learn(state, seen)
        self._reuse(state, seen)
        self._expander.follow(state, seen)
        state.last = state.pool.read(state.last, seen.tokens, self._options.phrase)
        state.offers = {node: offer for node, offer in state.offers.items() if node in state.slots}
        state.tree, state.end = None, -1

    def pause(self, state: OuroborosState) -> None:
        self._expander.pause(state)

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """Run one forward; each draft advances as far as it agrees with the phrases at its end, and one token
        further."""
        offers, first = top_k_rows(self._expander.score(jobs), rows_of(jobs), _SCORED), 0
        for state, tree, frontier in jobs:
            for node, offer in zip(frontier, offers[first:], strict=False):
                state.offers[tree.ids[node]] = offer
            first += len(frontier)
            if self._advance(state, tree):
                self.propose(state, tree)

    def _advance(self, state: OuroborosState, tree: TokenTree) -> bool:
        """Move the end along the draft's likeliest tokens; return whether it moved."""
        pick_model, began = self._pick_models.for_request(state.request), state.end
        node = tree.ids.index(state.end)
        while (offer := state.offers.get(tree.ids[node], ([], [])))[0] and len(tree) < self._options.tree_nodes:
            if tree.depth(node) >= tree.max_depth:
                break
            token, score = offer[0][0], tree.scores[node] + pick_model.log_chances(offer[1], 1)[0]
            child = tree.child(node, token)
            if child is None:
                child = tree.add(node, token, score)
                assert child is not None
            agreed = min(score, tree.scores[node])  # the draft agrees with the phrase
            tree.scores[child] = max(tree.scores[child], agreed)
            node = child
        state.end = tree.ids[node]
        state.slots.reset()  # scores have changed
        return state.end != began

    def _reuse(self, state: OuroborosState, seen: Observation) -> None:
        """Learn the target's tokens after rejected nodes as far as the draft has them too: suffixes that were proposed
        in the wrong place."""
        tree = state.tree
        if tree is None or seen.seen is None or seen.seen.top is None:
            return
        said = dict(zip(seen.seen.ids, seen.seen.top[:, 0].tolist(), strict=True))
        walked = set(seen.node_ids)
        for node, name in enumerate(tree.ids):
            if name in said and name not in walked:
                phrase, below = [said[name]], tree.child(node, said[name])
                while below is not None and tree.ids[below] in said and len(phrase) < self._options.phrase:
                    phrase.append(said[tree.ids[below]])
                    below = tree.child(below, phrase[-1])
                if len(phrase) > 1:
                    state.pool.learn(tree.tokens[node], tuple(phrase))


def build(options: Options, *, given: BuildContext) -> OuroborosDrafter:
    """Build the drafter for the draft model; UserError without one."""
    if given.draft is None:
        raise UserError("drafter ouroboros needs a draft model, name one with --draft (or draft=...)")
    return OuroborosDrafter(given.draft, options, given)
