"""Whole rounds of a draft model and its target that the kernels run: what the drafter's side of a request adds to a
planner's plan, and how the drafter follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from outpace.core.carried import NO_COPIES, Carried, Carrier, Carrying, Copied, Growing, Reading
from outpace.drafters._tree_expander import CHUNK

if TYPE_CHECKING:
    from outpace.core.types import Request
    from outpace.drafters._calibration import PickModels
    from outpace.drafters._tree_expander import TreeExpander

Parts = Sequence[tuple[Carrying, Reading]]


class NativeModelPair(Protocol):
    """Two models that can run whole rounds together, see `models/llama/native/pair.py`."""

    def carry(self, growing: Growing, parts: Parts, rounds: int, seconds: float) -> list[list[Carried]]:
        """Run up to this many rounds of all requests; return the results round by round."""

    def copies(self, longest: int, tokens: int, branches: int, places: int, window: int, least: float) -> Any:
        """Return a native lookup drafter that copies from a request's text, like drafter `ngram` with these options."""

    def adjusting(self, request: Request) -> Any:
        """Return an object that adjusts logits for this request, once it has its text."""


class ModelCarrier(Carrier):
    """Runs whole native rounds for a `ModelDrafter`, with the drafter's sessions and fitted probabilities."""

    copied: Collection[str] = ()

    def __init__(self, pair: NativeModelPair, expander: TreeExpander, pick_models: PickModels) -> None:
        self.pair, self._expander, self._pick_models = pair, expander, pick_models

    def carry(
        self, states: Sequence[Any], asked: Sequence[Carrying], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        return self.carry_copied(states, asked, [NO_COPIES] * len(states), rounds, seconds)

    def carry_copied(
        self,
        states: Sequence[Any],
        asked: Sequence[Carrying],
        copied: Sequence[Copied],
        rounds: int,
        seconds: float,
    ) -> list[list[Carried]]:
        """Like `carry`, with a native lookup drafter for each request's text."""
        parts = []
        for state, one, copies in zip(states, asked, copied, strict=True):
            if state.session.pending:
                return []
            if one.ask.plan.deepest and not self._is_close(state):
                return []
            parts.append((one, self._reading(state, one, copies, rounds)))
        done = self.pair.carry(self._expander.growing, parts, rounds, seconds)
        for carried in done:
            for state, its in zip(states, carried, strict=True):
                self._pick_models.note(state.pick_model, its.picked)
        return done

    def settle(self, state: Any, ids: Sequence[int], carried: Carried) -> None:
        """Do nothing: `carry` has noted the picks already."""

    def _is_close(self, state: Any) -> bool:
        """Whether the draft has read nearly all of a text and has space left in its context. More than one chunk is
        read in a normal step, where it is timed and other requests do not wait for all of it."""
        self._expander.begin(state)
        return state.missing <= CHUNK and state.room >= 0

    def _reading(self, state: Any, asked: Carrying, copied: Copied, rounds: int) -> Reading:
        """Return the draft's side of a request, after reserving slots in its session."""
        session, growing, trust, plan = state.session, self._expander.growing, state.pick_model.trust, asked.ask.plan
        missing = list[int]()
        if plan.deepest:
            missing = self._expander.clamp_ids(state.tokens[state.start + session.length :])[:-1]
            expanded = min(growing.width * plan.deepest, growing.tree_nodes)
            grown = len(missing) + rounds * plan.most + expanded
            session.reserve(min(session.length + grown, session.capacity + session.max_pending))
        return Reading(session, missing, state.room, trust, copied, self._adjusting(state))

    def _adjusting(self, state: Any) -> Any:
        """Return the object that adjusts a request's logits, up to date with its text; None if nothing is adjusted."""
        if state.request.adjustments is None:
            return None
        if state.adjusting is None:
            state.adjusting = self.pair.adjusting(state.request)
        state.adjusting.extend(state.tokens[state.adjusting.size :])
        return state.adjusting


class CopiesText:
    """A drafter without a model whose copies the kernels can make, like drafter `ngram`."""

    name: str
    can_be_copied = True

    def copied(self, state: Any, text: Sequence[int], made: Callable[..., Any]) -> Copied:
        """Return the native lookup drafter for this text; `made` is `NativeModelPair.copies`."""
        raise NotImplementedError

    def note(self, state: Any, ids: Sequence[int], planted: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Note the tokens that were proposed below the nodes with these ids, with their kinds."""
        raise NotImplementedError


class PartCarrier(Carrier):
    """Like `ModelCarrier`, for a drafter that shares its tree with others, one may copy from the text."""

    def __init__(
        self,
        inner: ModelCarrier,
        observed: Callable[[Any, int], Any],
        number: int,
        copier: tuple[int, CopiesText] | None,
    ) -> None:
        """`observed(state, number)`: returns a part's state after it has observed everything pending; `number` is the
        model's part. `copier`: number and drafter of the part that copies."""
        self._inner, self._observed, self._number, self._copier = inner, observed, number, copier
        self.copied = () if copier is None else (copier[1].name,)

    def carry(
        self, states: Sequence[Any], asked: Sequence[Carrying], rounds: int, seconds: float
    ) -> list[list[Carried]]:
        parts = [self._observed(state, self._number) for state in states]
        copied = []
        for state, part, one in zip(states, parts, asked, strict=True):
            copied.append(self._copies(state, part.tokens) if one.ask.plan.copies else NO_COPIES)
        return self._inner.carry_copied(parts, asked, copied, rounds, seconds)

    def settle(self, state: Any, ids: Sequence[int], carried: Carried) -> None:
        if self._copier is not None and carried.planted:
            self._copier[1].note(state.parts[self._copier[0]], ids, carried.planted)

    def _copies(self, state: Any, text: Sequence[int]) -> Copied:
        """Return the native lookup drafter for a request's text."""
        assert self._copier is not None
        number, copier = self._copier
        return copier.copied(self._observed(state, number), text, self._inner.pair.copies)
