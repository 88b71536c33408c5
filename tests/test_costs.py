"""The cost model: medians, unknown things are assumed to be cheap, and a profile restores what was learnt."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from toy import Toy

from outpace.api import profile as profiles
from outpace.core.stats import DecayedMean
from outpace.core.types import DraftSource
from outpace.drafters._model_drafter import PickModels
from outpace.models.load import Loaded
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import LevelMeans

COPIES, DRAFT = DraftSource("ngram", False), DraftSource("model", True)


def costs_of(*rounds: tuple[int, float], samples: int = 2, requests: int = 1) -> CostModel:
    """Return a cost model that knows rounds of (rows, seconds), each timed `samples` times."""
    costs = CostModel()
    for rows, seconds in rounds:
        record_rounds(costs, rows, seconds, samples, requests)
    return costs


def record_rounds(costs: CostModel, rows: int, seconds: float, samples: int = 2, requests: int = 1) -> None:
    """Record timed rounds, as if others of their kind had come before them, without which they are not timed."""
    costs._num_plain = 1000 if rows <= requests else 0
    for _ in range(samples):
        costs.record_round(requests, rows, requests, seconds, 0.0)


def record_steps(costs: CostModel, *seconds: float, width: int = 1) -> None:
    for each in seconds:
        costs.record_draft(DRAFT, each, width)


def test_outliers_do_not_move_the_time_of_a_pass() -> None:
    assert 5.9 <= costs_of((1, 6.0), (1, 60.0), (1, 6.2), (1, 5.9), (1, 6.1), samples=1).pass_seconds(1) <= 6.1
    slow = costs_of((2, 6.0), (8, 60.0), samples=1)
    record_rounds(slow, 2, 6.0)
    assert 6.0 < slow.pass_seconds(8) < 8.2, "one slow sample does not make a row count expensive"


def test_a_pass_takes_longer_with_more_tokens_in_the_texts() -> None:
    """A pass takes 5 ms, and 2 us for each token: what was timed with short texts holds for long ones, of both kinds,
    and what was timed with long texts for short ones."""
    costs, chance = CostModel(), Random(0)
    for number in range(160):
        tokens = 100 + 5 * number if number % 2 else chance.randrange(100, 900)
        costs.set_context(tokens)
        rows = 4 if number % 40 < 25 else 8
        seconds = 0.005 + 0.001 * (rows - 4) / 4 + 2e-6 * tokens
        record_rounds(costs, rows, seconds * (3.0 if number % 13 == 7 else 1.0), samples=1, requests=4)
    for tokens in (0, 1000, 3000):
        costs.set_context(tokens)
        assert costs.plain_seconds(4) == pytest.approx(0.005 + 2e-6 * tokens, rel=0.08)
        assert costs.pass_seconds(8) == pytest.approx(0.006 + 2e-6 * tokens, rel=0.08)


def test_tokens_that_cost_nothing_change_no_time() -> None:
    costs, chance = CostModel(), Random(1)
    for _ in range(64):
        costs.set_context(chance.randrange(10, 1000))
        record_rounds(costs, 1, 0.01, samples=1)
    costs.set_context(5000)
    assert costs.plain_seconds(1) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("seconds", "settling"), [(0.004, 20), (0.02, 4), (1.0, 1)])
def test_plain_decoding_is_timed_when_it_has_settled(seconds: float, settling: int) -> None:
    """After drafts passes of plain decoding take twice as long for a while."""
    costs = costs_of((1, seconds), (4, 2 * seconds))
    for number in range(settling + 2):
        costs.record_round(1, 1, 1, seconds * (2.0 if number < settling else 1.0), 0.0)
    assert costs.plain_seconds(1) == pytest.approx(seconds, rel=0.01)


def test_timing_plain_decoding_again_costs_little_of_the_time() -> None:
    """With drafts twice as fast, half a percent; with drafts that are hardly faster, more often."""
    shares = []
    for tokens in (2, 1.02):
        costs, plain = costs_of((1, 0.1), samples=4), 0
        for _ in range(4000):
            costs.begin_round(None)
            is_plain = costs.needs_plain_round(1)
            plain += is_plain
            costs.record_round(1, 1 if is_plain else 3, 1 if is_plain else tokens, 0.1, 0.0)  # type: ignore[arg-type]
        shares.append(plain / 4000)
    assert 0.002 < shares[0] < 0.008
    assert 0.1 < shares[1] < 0.25


def test_times_between_known_rows_are_interpolated_and_never_fall() -> None:
    costs = costs_of((1, 6.0), (2, 6.5), (7, 9.0), (5, 12.0))
    assert costs.pass_seconds(7) == 9.0
    assert costs.pass_seconds(3) == pytest.approx(7.0)
    assert costs.pass_seconds(1) == costs.plain_seconds(1) == 6.0
    times = [costs.pass_seconds(rows) for rows in range(1, 12)]
    assert times == sorted(times)


def test_no_row_is_free_because_few_samples_say_so() -> None:
    """True times of 6 + rows, but those of 4 rows were taken in a slow moment: up to 6 nothing would cost anything."""
    costs = costs_of(*((rows, 6.0 + rows + (2.0 if rows == 4 else 0.0)) for rows in (2, 3, 4, 5, 6, 8)))
    assert costs.extra_seconds(3, 4) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    slopes = [costs.extra_seconds(rows, 1)[0] for rows in range(1, 12)]
    assert slopes == pytest.approx(sorted(slopes)), "what a row costs never falls with the rows before it"
    assert costs_of((2, 6.0), (6, 7.0), (7, 7.0)).pass_seconds(16) == pytest.approx(7.0 + 9 * 0.2)


def test_old_times_of_many_rows_are_forgotten_and_those_of_few_rows_are_not() -> None:
    costs = costs_of((2, 6.0), (4, 7.0), (8, 100.0))
    assert costs.pass_seconds(8) == 100.0
    record_rounds(costs, 4, 7.0, samples=110)
    assert costs.pass_seconds(8) == pytest.approx(9.0), "the machine was busy then"
    assert costs.pass_seconds(2) == 6.0


def test_a_prefill_shows_what_many_rows_cost() -> None:
    """Passes of 6 + .5 for each token beyond the first."""
    costs = costs_of((1, 6.0))
    costs.record_prefill(8, 100.0)
    assert costs.pass_seconds(2) == pytest.approx(6.3), "a pass over few tokens says little"
    costs.record_prefill(21, 16.0)
    assert costs.pass_seconds(2) == pytest.approx(6.5)
    record_rounds(costs, 3, 6.2)
    record_rounds(costs, 5, 6.4)
    assert costs.pass_seconds(4) == pytest.approx(6.3), "what was timed counts"
    assert costs.pass_seconds(9) == pytest.approx(6.4 + 4 * 0.5)


def test_drafting_is_not_part_of_a_round() -> None:
    costs = costs_of((1, 5.0))
    costs.record_round(1, 2, 2, 10.0, 5.0)
    costs.record_round(1, 2, 2, 10.0, 4.0)
    assert costs.pass_seconds(2) == 6.0
    assert costs.tokens_per_second(1) == pytest.approx(0.2)


def test_the_price_is_at_least_that_of_plain_decoding() -> None:
    costs = costs_of((1, 5.0), (4, 50.0))
    assert costs.tokens_per_second(1) == pytest.approx(0.2)
    record_rounds(costs, 4, 50.0, requests=4)
    assert costs.tokens_per_second(4) == pytest.approx(4 / 50.0)


def test_lookups_are_timed_by_request() -> None:
    costs = CostModel()
    assert costs.draft_seconds(COPIES) == 0.0
    for seconds in (0.4, 0.6, 0.6, 0.6, 0.8):
        costs.record_draft(COPIES, seconds, 1, requests=2)
    assert costs.draft_seconds(COPIES, 2) == pytest.approx(0.3)


def test_a_draft_step_is_timed_by_the_nodes_that_all_requests_expand() -> None:
    """Until wider steps are timed, more nodes are assumed to cost what more rows cost the target."""
    costs = costs_of((1, 6.0), (2, 6.5), (3, 7.0), (6, 8.5))
    costs.expect(DRAFT, 0.1)
    record_steps(costs, 0.9, 0.9, 0.9)
    assert costs.draft_seconds(DRAFT, 3) == pytest.approx(0.3 * 7.0 / 6.0)
    assert costs.draft_seconds(DRAFT, 1, width=3) == pytest.approx(0.9 * 7.0 / 6.0)
    record_steps(costs, 1.5, 1.5, 1.5, width=6)
    assert costs.draft_seconds(DRAFT, 3, width=2) == pytest.approx(0.5)
    assert costs.draft_seconds(DRAFT) == pytest.approx(0.9)
    assert costs.state_dict()["draft"] == {"model": {"1": 0.9, "6": 1.5}}


def test_a_mean_forgets() -> None:
    mean = DecayedMean(1.0, 2.0, fade=0.9)
    for _ in range(100):
        mean.learn(0.0)
    assert mean.value < 1e-4


def test_costs_of_a_draft_follow_from_its_weights_until_they_are_timed() -> None:
    costs = costs_of((1, 6.0))
    costs.expect(DRAFT, 0.15)
    assert costs.draft_seconds(DRAFT) == pytest.approx(0.9)
    assert costs.draft_prefill_seconds(DRAFT, 100) == 0.0, "no prompt was read yet"
    costs.record_prefill(200, 4.0)
    assert costs.draft_prefill_seconds(DRAFT, 100) == pytest.approx(0.3)
    assert costs.draft_prefill_seconds(COPIES, 100) == 0.0
    record_steps(costs, 2.0, 2.0)
    assert costs.draft_seconds(DRAFT) == 2.0


def test_the_acceptance_of_a_level_starts_from_that_of_the_level_above() -> None:
    means = LevelMeans(0.6)
    assert means.state_dict() == [pytest.approx(0.6)] * 8
    for accepted in (1.0, 1.0):
        means.learn(0, accepted)
    assert [means.value(level) for level in range(6)] == [pytest.approx((1.95 + 1.2) / (1.95 + 2))] * 6
    for _ in range(40):
        means.learn(1, 0.0)
    assert means.value(0) > 0.7
    assert means.value(5) == means.value(1) < 0.1
    for _ in range(20):
        means.learn(9, 1.0)
    assert means.value(20) > 0.7, "deep levels share one estimate"
    again = LevelMeans(0.1)
    again.load_state_dict([0.5] * 8)
    assert again.value(3) > 0.4


def test_the_requests_of_a_round_together_fade_as_much_as_one() -> None:
    """Otherwise the acceptance of 32 requests would be that of their last round."""
    one, many = LevelMeans(0.6), LevelMeans(0.6)
    for accepted in (1.0, 0.0):
        for _ in range(30):
            one.learn(0, accepted)
            for _ in range(32):
                many.learn(0, accepted, requests=32)
    assert many.value(0) == pytest.approx(one.value(0), abs=0.06)


LEARNT = {
    "plain": {"1": 6.0},
    "rounds": {"4": 6.5, "8": 7.5},
    "draft": {"model": {"1": 0.8, "4": 1.0}, "ngram": {"1": 0.05}},
    "trust": {"ngram": 0.5, "model": 0.9},
    "acceptance": {"model": [0.6] * 8},
    "method": "auto",
    "drafters": {},
}
YIELDS = json.dumps([0.6] * 8)
ABOUT = {"target": {"name": "a"}, "cores": 2}


def test_a_profile_restores_what_was_stored(tmp_path: Path) -> None:
    costs = CostModel()
    costs.load_state_dict(LEARNT)
    assert profiles.write(ABOUT, costs.state_dict() | {"method": "auto", "drafters": {}}, tmp_path)
    assert profiles.read(ABOUT, tmp_path) == LEARNT
    assert profiles.read(ABOUT | {"cores": 4}, tmp_path) is None
    (tmp_path / "file").write_text("")
    assert profiles.write(ABOUT, LEARNT, tmp_path / "file") is None, "a folder that cannot be written is no error"


def test_times_of_a_profile_are_scaled_to_those_of_this_run() -> None:
    """A profile that was made on a busy machine must not make drafts look too expensive to be tried."""
    costs = CostModel()
    costs.load_state_dict(LEARNT | {"rounds": {"2": 0.3, "3": 0.36, "6": 0.69}, "plain": {"1": 0.25}})
    assert costs.pass_seconds(6) == pytest.approx(0.69)
    record_rounds(costs, 2, 0.05)
    assert costs.pass_seconds(6) == pytest.approx(0.115)
    record_rounds(costs, 3, 0.055)
    assert costs.pass_seconds(3) == pytest.approx(0.055)
    assert costs.pass_seconds(6) == pytest.approx(0.69 * 0.105 / 0.66)


@pytest.mark.parametrize("kept", [3, "x", {"greedy": 3}, {"greedy": {"coverage": None, "temperature": 1.0}}], ids=str)
def test_a_profile_with_a_drafters_damaged_part_is_deleted_with_a_warning(tmp_path: Path, kept: Any) -> None:
    about = profiles.subject(Loaded(Toy(8), None, "a model"), None)
    profiles.write(about, LEARNT | {"drafters": {"model": kept}}, tmp_path)
    known = Mock(capabilities=Mock(learnt=PickModels()))
    known.name = "model"
    costs = CostModel()
    with pytest.warns(UserWarning, match=r"are damaged \(drafters\.model: .*; the file was deleted"):
        assert profiles.Profile(about, tmp_path).load(costs, [known])
    assert costs.is_timed(1, 1)
    assert profiles.read(about, tmp_path) is None


def test_several_damaged_parts_of_drafters_are_one_warning(tmp_path: Path) -> None:
    about = profiles.subject(Loaded(Toy(8), None, "a model"), None)
    path = profiles.write(about, LEARNT | {"drafters": {"model": 3, "steered": 4}}, tmp_path)
    drafters = [Mock(capabilities=Mock(learnt=PickModels())) for _ in range(2)]
    drafters[0].name, drafters[1].name = "model", "steered"
    with pytest.warns(UserWarning, match=r"drafters\.model: .*drafters\.steered: .*was deleted") as said:
        profiles.Profile(about, tmp_path).load(CostModel(), drafters)
    assert len(said) == 1
    assert path is not None
    assert not path.exists()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_stored_is_read_again(tmp_path: Path, seed: int) -> None:
    """Whatever was learnt, also by a clock that saw no time pass."""
    random, costs = Random(seed), CostModel()
    sources = (DraftSource("model", True), DraftSource("ngram"))
    for _ in range(80):
        requests, source = random.choice([1, 2, 8]), random.choice(sources)
        rows, seconds = requests * random.randrange(1, 12), random.choice([0.0, 1e-9, random.random(), 1e5])
        costs.record_round(requests, rows, rows, seconds, seconds * random.choice([0.0, 0.5, 1.0]), every=True)
        costs.record_draft(source, random.choice([0.0, random.random()]), random.randrange(1, 16), requests)
        costs.calibration_factor(source.name, random.randrange(9000)).learn(random.randrange(4), random.random())
        costs.acceptance(source).learn(random.randrange(12), random.random() < 0.6, requests)
    learnt = costs.state_dict() | {"method": None, "drafters": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiles.write(ABOUT, learnt, tmp_path)
        assert profiles.read(ABOUT, tmp_path) == learnt
    again = CostModel()
    again.load_state_dict(learnt)
    assert all(0.0 <= again.pass_seconds(rows) < math.inf for rows in range(1, 100))


def test_a_profile_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers may mean something else; it causes no warning, and its file remains."""
    target = Loaded(Toy(8), None, "a model")
    monkeypatch.setattr(profiles, "VERSION", profiles.VERSION - 1)
    before = profiles.write(profiles.subject(target, None), LEARNT, tmp_path)
    assert profiles.read(profiles.subject(target, None), tmp_path) == LEARNT
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiles.read(profiles.subject(target, None), tmp_path) is None
    after = profiles.write(profiles.subject(target, None), LEARNT, tmp_path)
    assert before is not None
    assert {before, after} == set(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, ""),
        (None, '{"about": {"target"'),
        ("6.0", "-6.0"),
        ('"8"', '"eight"'),
        ('"model": 0.9', '"model": "much"'),
        ('"trust"', '"thrust"'),
        (YIELDS, "[]"),
        ('"name": "a"', '"name": "b"'),
        ("6.0", "1" + 400 * "0"),
        ('"8"', f'"1{400 * "0"}"'),
        ('"model": 0.9', '"model": 1e308'),
        ('"model": 0.9', '"model": NaN'),
        ('"draft": {', '"draft": {"eagle": 3, '),
        ('"method": "auto"', '"method": "nosuch"'),
        (None, 100_000 * "["),
    ],
)
def test_a_damaged_or_foreign_profile_is_deleted_with_a_warning(tmp_path: Path, old: str | None, new: str) -> None:
    path = profiles.write(ABOUT, LEARNT, tmp_path)
    assert path is not None
    text = json.dumps({"about": ABOUT, "learnt": LEARNT})
    path.write_text(new if old is None else text.replace(old, new))
    with pytest.warns(UserWarning, match=r"are damaged \(.*; the file was deleted"):
        assert profiles.read(ABOUT, tmp_path) is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("acceptance", {"model": [-3.6, 0.1]}),
        ("acceptance", {"model": [float("nan")]}),
        ("rounds", {"1": 0.0}),
        ("draft", {"model": {"1": float("inf")}}),
        ("trust", {"model": -0.1}),
        ("method", "nosuch"),
    ],
)
def test_what_the_reader_would_refuse_is_not_stored(tmp_path: Path, part: str, value: Any) -> None:
    assert profiles.write(ABOUT, LEARNT | {part: value}, tmp_path) is None
    assert not list(tmp_path.rglob("*.json"))
