"""What a planner knows of the sources of one request's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.types import Source
from outpace.decoders.base import RequestContext
from outpace.planning.cost_model import LAYERS
from outpace.planning.estimators import DecayedMean

_SKIPS, _MOST_SKIPS = 8, 64  # rounds until a source that gains nothing is asked again: at first, and at last
_REPEATED, _KNOWN = 4, 8192  # tokens that stood before are a repetition; tokens of the text in which they are sought
_EXPLORED = 3  # rounds at the beginning of an answer that tell what a model is worth in its text
_SAVED = 0.15  # of plain decoding's time, that a model is held to save where its reading of the text is weighed


class RepetitionDetector:
    """Whether a text repeats itself, which costs less than asking those who copy."""

    def __init__(self, text: Sequence[int]) -> None:
        """`text` grows; it is read when this is asked for, and not before."""
        self._text = text
        self._read = -1  # so much of it
        self._seen: set[int] = set()  # hashes
        self._run = 0  # tokens in a row that ended what stood before

    def follow(self) -> int:
        """So many of the last tokens stood before, about; 0: fewer than are a repetition."""
        text = self._text
        start = max(len(text) - _KNOWN, 0) if self._read < 0 else self._read
        for end in range(max(start + 1, _REPEATED), len(text) + 1):
            key = hash(tuple(text[end - _REPEATED : end]))
            self._run = self._run + 1 if key in self._seen else 0
            self._seen.add(key)
        self._read = len(text)
        return self._run + _REPEATED - 1 if self._run else 0


class LookupSource:
    """A source that runs no model, and what this request had of it.

    While it gains nothing it is asked ever more seldom; and as soon as the text repeats itself, by more than it did
    when that was in vain.
    """

    def __init__(self, source: Source, gain: DecayedMean) -> None:
        self.source = source
        self.gain = gain  # tokens that it gives a round in which it is asked, less what its rows cost
        self.is_asked = False  # in this round
        self._skipped = 0  # rounds since it was asked
        self._wait = _SKIPS  # rounds until it is asked again
        self._enough = _REPEATED  # tokens that must have stood before

    def is_due(self, repeats: RepetitionDetector) -> bool:
        """Whether it is asked although it gains nothing."""
        self._skipped += 1
        return self._skipped >= self._wait or repeats.follow() >= self._enough

    @property
    def rests(self) -> int:
        """Rounds until it is asked again, if nothing repeats."""
        return max(self._wait - self._skipped, 1)

    def skipped(self, rounds: int) -> None:
        """So many more rounds are over in which it was not asked."""
        self._skipped += rounds

    def asked(self, gains: bool, repeats: RepetitionDetector) -> None:
        """It was asked, and it does gain, or does not."""
        if gains:
            self._wait, self._enough = _SKIPS, _REPEATED
        elif self._skipped >= self._wait:
            self._wait = min(2 * self._wait, _MOST_SKIPS)
        elif self._skipped:
            self._enough = 2 * max(repeats.follow(), _REPEATED)
        self._skipped = 0


class ModelSource:
    """A source that runs a model, and how its layers did for this request.

    A request that writes alone finds out in its first rounds what the model gives in its text, whatever that gave in
    others: where these rounds cost less than the model is held to save, as often as it did.
    """

    def __init__(self, source: Source, deepest: int, place: RequestContext) -> None:
        self.source = source
        self.layers = 0  # that it grew in this round
        self.is_trial = False  # the last of them does not pay, as far as is known
        self.grown = [0.0] * deepest  # by layer: when it was grown last, in seconds of rounds
        self.failures = 0  # trials since a layer last paid
        self.trial_cost = 0.0  # seconds that the last trial took: it reads what was written since the one before
        self.is_following = False  # it has read all but what was written in the last round
        self.has_read = False  # the prompt
        self._place, self._costs = place, place.costs
        self._growth: dict[int, DecayedMean] = {}  # by layer: what this request had of it
        self._rounds = 0  # in which it grew

    @property
    def tries(self) -> bool:
        """Whether its first layer is a trial."""
        return self.is_trial and self.layers == 1

    @property
    def growth(self) -> DecayedMean:
        """Of the chance at the leaves, what the next layer puts below them: in this request, which begins with what it
        was in others; in company the same for all."""
        return self._growth_of(self.layers)

    @property
    def growths(self) -> list[float]:
        """The same of each layer from the first on; the last holds for all deeper ones."""
        known = max(LAYERS, max(self._growth, default=0) + 1)
        return [self._growth_of(layer).value for layer in range(known)]

    @property
    def explored(self) -> int:
        """Rounds to come whose first layer is grown to see what it gives in this text."""
        return _EXPLORED - self._rounds if self.explores() else 0

    def _growth_of(self, layer: int) -> DecayedMean:
        if self._place.requests > 1:
            return self._costs.growth(self.source, layer, self._place.requests)
        if layer not in self._growth:
            self._growth[layer] = self._costs.growth_of_one(self.source, layer)
        return self._growth[layer]

    def gave(self, worth: float, at_leaves: float) -> None:
        """So much the next layer has put below leaves with this chance."""
        self._costs.growth(self.source, self.layers, self._place.requests).learn(worth, at_leaves)
        if self._place.requests == 1:
            self.growth.learn(worth, at_leaves)

    @property
    def reading(self) -> float:
        """Seconds that it takes to read the text, if it has not."""
        return 0.0 if self.has_read else self._costs.reading(self.source, len(self._place.committed))

    def is_worth_reading(self) -> bool:
        """Whether what may still be written is long enough for reading all that stands before it."""
        return self.reading <= self._may_save

    @property
    def _may_save(self) -> float:
        """Seconds that it is held to save in what may still be written."""
        place = self._place
        return _SAVED * place.left * self._costs.target(place.requests) / place.requests

    def explores(self) -> bool:
        """Whether the first layer is grown to see what it gives in this text."""
        if self.layers or self._rounds >= _EXPLORED or self._place.requests > 1:
            return False
        cost = _EXPLORED * 2 * self._costs.draft(self.source) + self.reading  # a step, and about as much for its rows
        return cost < self._costs.found(self.source).value * self._may_save

    def judged(self, price: float) -> None:
        """A round in which it grew is over; the last of those that explore says to other requests what was found."""
        self._rounds += 1
        if self._rounds == _EXPLORED and 0 in self._growth:
            pays = self._growth[0].value > price * self._costs.draft(self.source)
            self._costs.found(self.source).learn(float(pays))
