"""What rounds cost and what they give, learnt while they run: the numbers by which the planner chooses. All of them are
medians or running means over the recent past, so that a machine which others use too is followed. What was never
measured is taken to go on as what is known does: so it is tried, and then it is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from outpace.core.carried import PassTimes
from outpace.core.types import Source
from outpace.planning.estimators import DecayedMean, RollingMedian
from outpace.planning.latency_curve import LatencyCurve

_TRUST_FADE = 0.99  # the same for trust: a profile is about a pair, not about the last answer's end
_GROWTH_FADE = 0.9  # the same where samples are rare: a few trials must undo what bad first rounds said
_EVERY = 12  # of so many rounds one may be for the sake of knowing its time
_COPIES, _HELD = 0.2, 8.0  # tokens that copies are held to give a round, and of how many rounds' weight that is
GROWS = 0.6  # of the chance at the leaves that a layer is held to put below them
_ONE_FADE = 0.97  # of the past's weight in how far one request's drafts are trusted: a few bad rounds are chance
_ONE_GROWTH_FADE = 0.93  # the same in what layers gave it: a draft that turns bad and promises little is left too
_FAILURES = 5  # that are counted
LAYERS = 4  # of a draft, whose growth is known apart; deeper ones go with the last


class Prices(NamedTuple):
    """What plans of a round go by."""

    second: float  # tokens that are written in one
    plain: float  # seconds of a plain round; 0: unknown
    row: float  # seconds of one more than each request's root; 0: unknown
    is_known: bool  # whether a plain round was timed


class CostModel:
    """Seconds by what is done, tokens by seconds, and how far the drafter's promises are kept. Not for two threads.

    `rows` are those of the whole pass, of all requests together.
    """

    def __init__(self) -> None:
        self._rounds = LatencyCurve()
        self.latest_draft = 0.0  # seconds of the last growth, a request's share of them
        self.latest_round = 0.0  # seconds of the last round, waits and drafting among them
        self.latest_pass = 0.0  # without them
        self._tried = 0  # the last round that was for the sake of knowing its time
        self._planned = -1  # rounds that were seen when the last plan was made
        self._draft = defaultdict[str, RollingMedian](
            RollingMedian
        )  # by source and requests: a request's share of a step
        self._readers: set[str] = set()  # see `reads`
        self._is_step = True  # see `stepped`
        self._shares: dict[str, float] = {}  # by source, of a pass: what a step is held to cost until it was timed
        self._most_read: dict[str, int] = {}  # by source: tokens of a text that it reads at most
        self._reading = DecayedMean(0.0, 0.0)  # seconds of the target a token of prompt
        self._elapsed = 0.0  # seconds of rounds, drafting not counted
        self._failures: dict[tuple[str, int], tuple[int, int]] = {}  # by source and requests: how many, the last round
        self._asked: dict[str, float] = {}  # by source: when it grew last, in these seconds
        self._rates = defaultdict[int, DecayedMean](
            partial(DecayedMean, 0.0, 0.0)
        )  # requests -> tokens a second of all of them
        self._trust = defaultdict[str, DecayedMean](partial(DecayedMean, 1.0, 2.0, _TRUST_FADE))  # by source
        self._growth: dict[str, dict[int, list[DecayedMean]]] = {}  # by source, requests and layer
        self._prices: dict[int, Prices] = {}  # by requests, until a round is over
        copies = partial(DecayedMean, _COPIES, _HELD, _TRUST_FADE)
        self._copies = defaultdict[tuple[str, int], DecayedMean](copies)  # by source and requests
        self._modes: dict[str, DecayedMean] = {}  # see `mode`
        self._found: dict[str, DecayedMean] = {}  # by source

    @property
    def seen(self) -> int:
        """Rounds so far."""
        return self._rounds.seen

    def round(
        self, requests: int, rows: int, tokens: int, seconds: float, drafting: float, is_first: bool = True
    ) -> None:
        """A round is over: `tokens` written by all requests, `drafting` seconds of it before the pass; of rounds of one
        plan `is_first` is the first."""
        if is_first:
            self._planned = self.seen
        self.latest_round, self.latest_pass = seconds, seconds - drafting
        self._elapsed += seconds - drafting
        known = self._prices.get(requests)
        if self._rounds.learn(rows, seconds - drafting) or known is None or not known.is_known:
            self._prices.clear()
        self._rates[requests].learn(tokens, seconds)

    def is_turn(self, every: int) -> bool:
        """Whether the next plan is that of which there is one in so many rounds."""
        return self.seen // every > self._planned // every

    def is_worth_trying(self, rows: int) -> bool:
        """Whether the time of so many rows is not known, or not any more; one round in `_EVERY` at most."""
        due = self.seen - self._tried >= _EVERY and self._rounds.is_untimed(rows)
        if due:
            self.tries()
        return due

    def tries(self) -> None:
        """In the next round rows are verified for the sake of knowing their time."""
        self._tried = self.seen

    def pass_times(self, rows: int) -> PassTimes:
        """What is known of rounds over up to so many rows, for whoever plans some of them."""
        untimed = self._rounds.untimed(rows // 2 + 1) if self.seen - self._tried >= _EVERY else ()  # half are tried
        return PassTimes(self._rounds.table(rows), self._rounds.widest, untimed)

    def prices(self, requests: int) -> Prices:
        """What holds in the next round of so many requests: the same answer to all of them, and taken anew in one of
        some rounds."""
        prices = self._prices.get(requests)
        if prices is None:
            row = self.more(requests, 1)[0] if self._rounds.has_slope else 0.0
            plain, is_known = self.target(requests), self.knows(requests, 1)
            prices = self._prices[requests] = Prices(self.price(requests), plain, row, is_known)
        return prices

    def is_stale(self, requests: int) -> bool:
        """Whether all of so many requests should write plainly for once, because none did for long."""
        return self.is_turn(_EVERY) and self._rounds.is_stale(requests)

    def trust(self, source: str) -> DecayedMean:
        """Accepted tokens over the chances that were given them, of the source with this name."""
        return self._trust[source]

    def trust_of_one(self, source: str) -> DecayedMean:
        """The same for a request that begins."""
        return DecayedMean(self.trust(source).value, 4.0, _ONE_FADE)

    def copies(self, source: str, requests: int) -> DecayedMean:
        """What this source, which runs no model, gives a round in which it is asked, while so many requests write:
        tokens, less what their rows cost."""
        return self._copies[source, requests]

    def copies_of_one(self, source: str, requests: int) -> DecayedMean:
        """The same for a request that begins."""
        return DecayedMean(self.copies(source, requests).value, _HELD)

    def mode(self, name: str, prior: float = 0.0, weight: float = 0.0) -> DecayedMean:
        """What is known of one of several ways of working, whatever that is."""
        return self._modes.setdefault(name, DecayedMean(prior, weight, _GROWTH_FADE))

    def found(self, source: Source) -> DecayedMean:
        """In what share of the requests this source's model paid, of those that tried it at their beginning."""
        return self._found.setdefault(source.name, DecayedMean(0.5, 4.0))

    def growth(self, source: Source, layer: int, requests: int = 1) -> DecayedMean:
        """Of the chance at the leaves, what the source's layer of this number puts below them, its rows paid, while so
        many requests write; at first what it was with about as many."""
        known = self._growth.setdefault(source.name, {})
        if requests not in known:
            before = known[_nearest(known, requests)] if known else [DecayedMean(GROWS, 2.0)] * LAYERS
            known[requests] = [DecayedMean(mean.value, 2.0, _GROWTH_FADE) for mean in before]
        layers = known[requests]
        return layers[min(layer, len(layers) - 1)]

    def growth_of_one(self, source: Source, layer: int) -> DecayedMean:
        """The same for a request that begins and writes alone."""
        return DecayedMean(self.growth(source, layer).value, 2.0, _ONE_GROWTH_FADE)

    def drafted(self, seconds: float, requests: int, source: Source | None) -> None:
        """So many requests' trees were grown once by a source, or by all (None)."""
        self.latest_draft, self._is_step = seconds / requests, True
        if source is None:
            return
        self._asked[source.name] = self._elapsed
        if not source.runs_model:
            self.stepped(source, 1)
        elif source.name in self._readers:
            self._readers.remove(source.name)
            self._is_step = False

    def reads(self, source: Source) -> None:
        """In its next growth this source's model reads more, for one of the requests, than what it proposed last."""
        self._readers.add(source.name)

    def idle(self, source: Source) -> float:
        """Seconds of rounds since any request's tree was grown by this source."""
        return self._elapsed - self._asked.get(source.name, 0.0)

    def tried(self, source: Source, requests: int, pays: bool) -> None:
        """A request's tree was grown by this source because that pays, or to see whether it does."""
        count, last = self._failures.get((source.name, requests), (0, -1))
        more = last != self.seen  # all that try in a round try once
        self._failures[source.name, requests] = 0 if pays else min(count + more, _FAILURES), self.seen

    def failures(self, source: Source, requests: int) -> int:
        """Rounds in a row in which so many requests tried this source, and it paid for none of them. What one alone
        tried says nothing of the next, which writes another text."""
        return self._failures.get((source.name, requests), (0, 0))[0] if requests > 1 else 0

    def stepped(self, source: Source, requests: int) -> None:
        """The latest growth was one of this source, while so many requests write. It counts where the model read
        nothing, for any of them, but what it had proposed."""
        if not self._is_step:
            return
        self._draft[source.name].learn(requests, self.latest_draft)

    def expect(self, source: Source, share: float, most_read: int | None = None) -> None:
        """A step of this source is held to cost such a share of a pass, until it was timed; of a text it reads
        `most_read` tokens at most."""
        self._shares[source.name] = share
        if most_read is not None:
            self._most_read[source.name] = most_read

    def draft(self, source: Source, requests: int = 1) -> float:
        """Seconds of one growth, a request's share of it while so many write; 0 until anything is known. A model's
        forward is taken to cost the same for any number of requests until it was timed with as many."""
        known = self._draft[source.name].medians if source.name in self._draft else {}
        if not known:
            return self._shares.get(source.name, 0.0) * self.target(1) / requests
        count = requests if requests in known else _nearest(known, requests)
        return known[count] * (count / requests if source.runs_model else 1.0)

    def read(self, tokens: int, seconds: float) -> None:
        """The target has read so many tokens of prompts, in a pass over nothing else."""
        self._reading.learn(seconds, tokens)
        self._rounds.read(tokens, seconds)
        self._prices.clear()

    def reading(self, source: Source, tokens: int) -> float:
        """Seconds that a source's model is held to take for reading so many tokens."""
        read = min(tokens, self._most_read.get(source.name, tokens))
        return self._shares.get(source.name, 0.0) * self._reading.value * read

    def knows(self, rows: int, samples: int) -> bool:
        """Whether a pass over so many rows was timed, so often."""
        return self._rounds.knows(rows, samples)

    def target(self, rows: int) -> float:
        """Seconds of a round over so many rows, its drafting not counted; 0 until anything is known."""
        return self._rounds.target(rows)

    def more(self, rows: int, count: int) -> Sequence[float]:
        """By how much rounds over 1, 2, ... up to `count` more rows than `rows` take longer than one over `rows`."""
        return self._rounds.more(rows, count)

    def most_more(self, others: int) -> int:
        """Rows beside a request's root that may be tried, with so many rows of others: twice as many as are known."""
        return self._rounds.most_more(others)

    def best(self, chances: Sequence[float], others: int, price: float) -> tuple[int, float]:
        """The best rows of nodes with these falling chances, with so many rows of others: see `best_rows`."""
        more = self.more(others + 1, min(self.most_more(others), len(chances)))
        return best_rows(chances, more, price)

    def price(self, requests: int) -> float:
        """Tokens a second: what a second is worth. What is written now, at least plain decoding's; 0: unknown."""
        plain = self.target(requests)
        measured = self._rates[requests].value if requests in self._rates else 0.0
        return max(measured, requests / plain if plain else 0.0)

    def forget_rates(self) -> None:
        """What was written lately says nothing of what comes."""
        self._rates.clear()
        self._prices.clear()

    def speedup(self, requests: int) -> float:
        """Over plain decoding of so many requests: what is written lately, by what these would write; 0: unknown."""
        plain = self.target(requests)
        return self._rates[requests].value * plain / requests if requests in self._rates else 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        growth = {name: [mean.value for mean in known[min(known)]] for name, known in self._growth.items()}
        trust = {name: mean.value for name, mean in self._trust.items()}
        draft = {}
        for name, steps in self._draft.items():
            if known := steps.medians:
                draft[name] = known[min(known)] * min(known)
        return {"rounds": self._rounds.state_dict(), "draft": draft, "trust": trust, "growth": growth}

    def load_state_dict(self, profile: Mapping[str, Any]) -> None:
        """Begins with what a profile holds."""
        self._rounds.load_state_dict(profile["rounds"])
        for name, seconds in profile["draft"].items():
            self._draft[name] = RollingMedian()
            self._draft[name].expect(1, float(seconds))
        self._trust |= {name: DecayedMean(float(value), 2.0, _TRUST_FADE) for name, value in profile["trust"].items()}
        for name, values in profile["growth"].items():
            self._growth[name] = {1: [DecayedMean(float(value), 4.0, _GROWTH_FADE) for value in values]}
        self._prices.clear()


def _nearest(known: Iterable[int], requests: int) -> int:
    """The number of requests that is nearest to this one, of those that are known; of two the smaller."""
    return min(known, key=lambda count: (abs(count - requests), count))


def best_rows(chances: Sequence[float], more: Sequence[float], price: float) -> tuple[int, float]:
    """How many rows pay, the root's included, and what they bring above their price: of nodes with these falling
    chances, `more` being what 1, 2, ... rows beside the root's take."""
    best, best_worth, gain = 0, 0.0, 0.0
    for count, (chance, seconds) in enumerate(zip(chances, more, strict=False), 1):
        gain += chance
        worth = gain - price * seconds
        if worth > best_worth:
            best, best_worth = count, worth
    return best + 1, best_worth
