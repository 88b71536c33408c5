"""A draft model whose drafts are extended by phrases: several tokens in a forward of the draft, and longer drafts.

Ouroboros: Zhao et al., 2024, arXiv:2402.13720; no training beyond the draft model's.

Phrases of the pool that follow the last token, and those that follow the draft's end, hang on the tree. The draft's
next forward reads all of them beside the end itself, and the draft goes on behind the last token that it would have
proposed too; the others stay as suffixes for the target to judge. The pool learns from texts, and from what the target
says behind rejected tokens. It serves all requests of the same reuse key. In the paper the draft model also looks
ahead by Jacobi iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.cache_salt import PerSalt
from outpace.core.drafting import BuildContext, Needs
from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request, Source, TopK
from outpace.drafters._calibration import PickModels
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, kind_of
from outpace.drafters._phrases import PhraseTable, open_phrase_file
from outpace.drafters._tree_expander import ExpansionJob, ExpansionState, TreeExpander, rows_of
from outpace.models.base import Model
from outpace.rules.base import top_k_rows

COST = "a forward of the draft model for each piece, which may have several tokens"
_SCORED = 5  # proposals of which the best is taken, so that its share of the chance is known


@dataclass(frozen=True)
class Options:
    """`suffixes`: phrases proposed after a token; `phrase`: the most tokens of a phrase; `width`: nodes in a forward of
    the draft; `tree_nodes`: the largest tree; `floor`: nodes that the target is less likely to reach are not expanded;
    `leaders`: tokens in the table of phrases; `followers`: phrases kept for each; `phrases`: a file that keeps the
    table between runs; the default is no file; `draft_window`: as for drafter model."""

    suffixes: int = 3
    phrase: int = 4
    width: int = 16
    tree_nodes: int = 256
    floor: float = 0.005
    leaders: int = 32768
    followers: int = 8
    phrases: str = ""
    draft_window: int | None = None

    def __post_init__(self) -> None:
        check_whole("suffixes", self.suffixes, 0, 64)
        check_whole("phrase", self.phrase, 1, 64)
        check_whole("width", self.width, 1, 512)
        check_whole("tree_nodes", self.tree_nodes, 2, 16384)
        check_range("floor", self.floor, 0.0, 1.0)
        check_whole("leaders", self.leaders, 1)
        check_whole("followers", self.followers, 1, 256)
        if self.draft_window is not None:
            check_whole("draft_window", self.draft_window, 0)


@dataclass
class OuroborosState(LookupState, ExpansionState):
    """`offers`: what the draft proposed below a node, by id. `last`: the end of the text, whose phrases are not
    complete. `tree`: the one that was grown last; `end`: the id of the node where the draft goes on. `pool`: that of
    the request's reuse key."""

    offers: dict[int, TopK] = field(default_factory=dict)
    last: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    end: int = -1  # -1: the root
    pool: PhraseTable = field(default_factory=lambda: PhraseTable(1, 1))


class OuroborosDrafter(LookupDrafter[OuroborosState]):
    """Keeps a session of the draft model for each request, and one pool for each reuse key."""

    name = "ouroboros"
    runs_model = True
    is_fitted = False  # the draft model's nodes stand among its phrases
    needs = Needs(top=1)

    def __init__(self, model: Model, options: Options, given: BuildContext | None = None) -> None:
        super().__init__()
        self._options = options
        window = model.draft_window if options.draft_window is None else options.draft_window
        self._grower = TreeExpander(model, options.width, options.tree_nodes, options.floor, window)
        self._choices = PickModels()
        self._pools = PerSalt(lambda: PhraseTable(options.leaders, options.followers))
        self._kept = open_phrase_file(options.phrases, given, self._pools.shared)

    def weight_bytes(self, source: Source) -> int | None:
        """Those of the draft model."""
        return self._grower.model.weight_bytes

    def reads_at_most(self, source: Source) -> int | None:
        """Its window."""
        return self._grower.window or None

    def open(self, request: Request) -> OuroborosState:
        pool = self._pools.of(request.cache_salt)
        state = OuroborosState(request, list(request.prompt), session=self._grower.open(request), pool=pool)
        state.last = state.pool.read((), request.prompt, self._options.phrase)
        return state

    def grow(self, states: Sequence[OuroborosState], trees: Sequence[TokenTree]) -> list[int]:
        """One forward of the draft model over the ends of all drafts and what hangs there; nodes added to each tree.
        Another one for a draft that did not get further."""
        before = [len(tree) for tree in trees]
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree
            if state.end not in tree.ids:
                state.end = tree.ids[0]
                self.propose(state, tree)
        waiting, beside = states, trees
        while jobs := self._grower.jobs(waiting, beside):
            ends = [job.state.end for job in jobs]
            self._expand(jobs)
            again = [job for job, end in zip(jobs, ends, strict=True) if job.state.end == end]
            waiting, beside = [job.state for job in again], [job.tree for job in again]
        return [len(tree) - count for tree, count in zip(trees, before, strict=True)]

    def propose(self, state: OuroborosState, tree: TokenTree) -> None:
        """Hangs phrases behind the draft's end."""
        end, grade = tree.ids.index(state.end), Certainty.SURE
        for phrase in state.pool.followers(tree.tokens[end])[: self._options.suffixes]:
            node = end
            for place, token in enumerate(phrase):
                if len(tree) >= self._options.tree_nodes:
                    return
                is_new = token not in state.planted.get(tree.ids[node], ())
                node = self.plant(state, tree, node, token, kind_of(1 + place, grade))
                grade = Certainty.SURE if is_new else grade
            grade = Certainty.OTHER

    def observe(self, state: OuroborosState, seen: Observation) -> None:
        self._choices.learn(state.request, state.offers, seen)
        self.learn(state, seen)
        self._reuse(state, seen)
        self._grower.follow(state, seen)
        state.last = state.pool.read(state.last, seen.tokens, self._options.phrase)
        state.offers = {node: state.offers[node] for node in state.slots if node in state.offers}
        state.tree, state.end = None, -1

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        return self._grower.stored_bytes(lengths)

    def pause(self, state: OuroborosState) -> None:
        self._grower.pause(state)

    def close(self, state: OuroborosState) -> None:
        state.session = None

    def end(self) -> None:
        if self._kept is not None:
            self._kept.write(self._pools.shared)

    def state_dict(self) -> dict[str, Any]:
        """What a profile keeps: how the draft's chances and the phrases came true."""
        return {"choices": self._choices.state_dict(), "rates": super().state_dict()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Begins from a profile."""
        self._choices.load_state_dict(kept["choices"])
        super().load_state_dict(kept["rates"])

    def _expand(self, jobs: Sequence[ExpansionJob]) -> None:
        """One forward; each draft goes on as far as it agrees with what hangs at its end, and one token further."""
        offers, first = top_k_rows(self._grower.score(jobs), rows_of(jobs), _SCORED), 0
        for state, tree, frontier in jobs:
            for node, offer in zip(frontier, offers[first:], strict=False):
                state.offers[tree.ids[node]] = offer
            first += len(frontier)
            if self._go_on(state, tree):
                self.propose(state, tree)

    def _go_on(self, state: OuroborosState, tree: TokenTree) -> bool:
        """Moves the end to what the draft holds likeliest; whether it moved."""
        choice, began = self._choices.of(state.request), state.end
        node = tree.ids.index(state.end)
        while (offer := state.offers.get(tree.ids[node], ([], [])))[0] and len(tree) < self._options.tree_nodes:
            token, score = offer[0][0], tree.scores[node] + choice.log_chances(offer[1], 1)[0]
            child = tree.child(node, token)
            if child is None:
                child = tree.add(node, token, score)
                assert child is not None
            tree.scores[child] = max(tree.scores[child], min(score, tree.scores[node]))  # a phrase that is agreed on
            node = child
        state.end = tree.ids[node]
        state.open, state.seen = [], 0  # scores have changed
        return state.end != began

    def _reuse(self, state: OuroborosState, seen: Observation) -> None:
        """Learns what the target says behind rejected nodes, as far as the draft has it too: suffixes that stood in
        the wrong place."""
        tree = state.tree
        if tree is None or seen.seen is None or seen.seen.top is None:
            return
        said = dict(zip(seen.seen.ids, seen.seen.top[:, 0].tolist(), strict=True))
        walked = set(seen.path)
        for node, name in enumerate(tree.ids):
            if name in said and name not in walked:
                phrase, below = [said[name]], tree.child(node, said[name])
                while below is not None and tree.ids[below] in said and len(phrase) < self._options.phrase:
                    phrase.append(said[tree.ids[below]])
                    below = tree.child(below, phrase[-1])
                if len(phrase) > 1:
                    state.pool.learn(tree.tokens[node], tuple(phrase))


def build(options: Options, *, given: BuildContext) -> OuroborosDrafter:
    """The drafter for the draft model; UserError without one."""
    if given.draft is None:
        raise UserError("drafter ouroboros needs a draft model, name one with --draft (or draft=...)")
    return OuroborosDrafter(given.draft, options, given)
