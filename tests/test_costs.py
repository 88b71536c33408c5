"""The cost model: medians, unknown things are assumed to be cheap, and a profile restores what was learnt."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from outpace.core.types import Source
from outpace.models.load import Loaded
from outpace.models.toy import Toy
from outpace.planning import profile as profiles
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import DecayedMean


def costs_of(*rounds: tuple[int, float]) -> CostModel:
    costs = CostModel()
    for rows, seconds in rounds:
        costs.record_round(1, rows, 1, seconds, 0.0)
    return costs


def test_nothing_is_known_at_first() -> None:
    assert CostModel().pass_seconds(4) == CostModel().draft_seconds(DRAFT) == CostModel().tokens_per_second(1) == 0.0


def test_medians_stand_against_outliers() -> None:
    costs = costs_of((1, 6.0), (1, 60.0), (1, 6.2), (1, 5.9), (1, 6.1))
    assert costs.pass_seconds(1) == 6.1


def test_times_between_known_rows_are_interpolated_and_never_fall() -> None:
    costs = costs_of((1, 6.0), (1, 6.0), (7, 9.0), (7, 9.0), (5, 12.0), (5, 12.0))
    assert costs.pass_seconds(7) == 9.0
    assert costs.pass_seconds(3) == pytest.approx(7.0)
    assert [costs.pass_seconds(rows) for rows in range(1, 12)] == sorted(
        costs.pass_seconds(rows) for rows in range(1, 12)
    )


def test_no_row_is_free_because_few_samples_say_so() -> None:
    """True times of 6 + rows, but those of 4 rows were taken in a slow moment: up to 6 nothing would cost anything."""
    times = [(rows, 6.0 + rows + (2.0 if rows == 4 else 0.0)) for rows in (1, 2, 3, 4, 5, 6, 8)]
    costs = costs_of(*times, *times)
    assert costs.extra_seconds(3, 4) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    slopes = [costs.extra_seconds(rows, 1)[0] for rows in range(1, 12)]
    assert slopes == pytest.approx(sorted(slopes)), "what a row costs never falls with the rows before it"


def test_what_many_rows_took_long_ago_is_forgotten_and_what_few_took_is_not() -> None:
    costs = costs_of((1, 6.0), (1, 6.0), (4, 7.0), (4, 7.0), (8, 100.0), (8, 100.0))
    assert costs.pass_seconds(8) == 100.0
    for _ in range(600):
        costs.record_round(1, 4, 1, 7.0, 0.0)
    assert costs.pass_seconds(8) < 9.0, "the machine was busy then"
    assert costs.pass_seconds(1) == 6.0


def test_unknown_rows_are_held_to_be_cheap_so_that_they_are_tried() -> None:
    costs = costs_of((1, 6.0), (1, 6.0))
    assert 6.0 < costs.pass_seconds(8) < 8.2


def test_a_prompts_pass_says_what_many_rows_cost() -> None:
    """Passes of 6 + .5 for each token beyond the first: before any drafts half of that is believed."""
    costs = costs_of((1, 6.0), (1, 6.0))
    costs.record_prefill(8, 100.0)
    assert costs.pass_seconds(2) == pytest.approx(6.3), "a pass over few tokens says little"
    costs.record_prefill(21, 16.0)
    assert costs.pass_seconds(2) == pytest.approx(6.0 + (0.3 + 0.5) / 2)
    for _ in range(2):
        costs.record_round(1, 5, 1, 6.4, 0.0)
    assert costs.pass_seconds(3) == pytest.approx(6.2), "what was timed counts"
    assert costs.pass_seconds(9) == pytest.approx(6.4 + 4 * 0.5)


def test_rows_that_cost_more_than_a_prompts_tokens_go_on_to_cost_it() -> None:
    costs = costs_of((1, 6.0), (1, 6.0), (5, 14.0), (5, 14.0))
    costs.record_prefill(21, 16.0)
    assert costs.pass_seconds(7) == pytest.approx(18.0)


def test_one_slow_sample_does_not_make_a_row_count_dear() -> None:
    costs = costs_of((1, 6.0), (1, 6.0), (8, 60.0))
    assert costs.pass_seconds(8) < 8.2


def test_drafting_is_not_part_of_a_round() -> None:
    costs = CostModel()
    costs.record_round(1, 2, 2, 10.0, 4.0)
    assert costs.pass_seconds(2) == 6.0
    assert costs.tokens_per_second(1) == pytest.approx(0.2)


def test_the_price_is_at_least_plain_decodings() -> None:
    costs = costs_of((1, 5.0), (1, 5.0), (4, 50.0), (4, 50.0))
    assert costs.tokens_per_second(1) == pytest.approx(0.2)
    assert costs.tokens_per_second(4) == pytest.approx(4 / 50.0)


def test_only_steps_of_the_draft_count_as_such() -> None:
    costs = CostModel()
    assert costs.draft_seconds(DRAFT) == 0.0
    for seconds, is_step in ((30.0, False), (0.8, True), (0.7, True), (0.9, True)):
        costs.record_draft(2 * seconds, 2, DRAFT)
        if is_step:
            costs.record_step(DRAFT, 1)
    assert costs.draft_seconds(DRAFT) == 0.8
    assert costs.draft_seconds(COPIES) == 0.0
    for seconds in (0.2, 0.3, 0.4):
        costs.record_draft(seconds, 1, COPIES)
    assert costs.draft_seconds(COPIES) == pytest.approx(0.3), "what runs no model has no other growth than steps"


def test_what_a_step_takes_is_known_by_the_requests_that_share_it() -> None:
    """Timed alone, a step is assumed to take as long for several requests; once timed with several, that counts."""
    costs = CostModel()
    for _ in range(3):
        costs.record_draft(0.9, 1, DRAFT)
        costs.record_step(DRAFT, 1)
    assert costs.draft_seconds(DRAFT, 3) == pytest.approx(0.3)
    for _ in range(3):
        costs.record_draft(1.5, 3, DRAFT)
        costs.record_step(DRAFT, 3)
    assert costs.draft_seconds(DRAFT, 3) == pytest.approx(0.5)
    assert costs.draft_seconds(DRAFT, 1) == pytest.approx(0.9)
    assert costs.state_dict()["draft"] == {"model": pytest.approx(0.9)}


def test_a_growth_in_which_another_request_reads_is_no_step() -> None:
    costs = CostModel()
    for seconds, reads in ((0.8, False), (9.0, True), (0.8, False), (9.0, True), (9.0, True)):
        if reads:
            costs.note_catch_up(DRAFT)
        costs.record_draft(seconds, 1, DRAFT)
        costs.record_step(DRAFT, 1)
    assert costs.draft_seconds(DRAFT) == 0.8


def test_what_a_layer_adds_is_known_by_the_requests_too() -> None:
    """With more requests a row costs more: what a layer adds above that says little of what it adds with one."""
    costs = CostModel()
    for _ in range(30):
        costs.layer_yield(DRAFT, 0, 1).learn(0.8)
    assert costs.layer_yield(DRAFT, 0, 4).value == pytest.approx(0.8, abs=0.05), "at first what is known"
    for _ in range(30):
        costs.layer_yield(DRAFT, 0, 4).learn(0.1)
    assert costs.layer_yield(DRAFT, 0, 4).value == pytest.approx(0.1, abs=0.05)
    assert costs.layer_yield(DRAFT, 0, 1).value == pytest.approx(0.8, abs=0.05)
    assert costs.state_dict()["growth"]["model"][0] == pytest.approx(0.8, abs=0.05)


def test_a_mean_forgets() -> None:
    mean = DecayedMean(1.0, 2.0, fade=0.9)
    for _ in range(100):
        mean.learn(0.0)
    assert mean.value < 1e-4


LEARNT = {
    "rounds": {"1": 6.0, "4": 6.5, "8": 7.5},
    "draft": {"model": 0.8, "ngram": 0.05},
    "trust": {"ngram": 0.5, "model": 0.9},
    "growth": {"model": [0.6, 0.5, 0.4, 0.3]},
    "method": "auto",
    "drafters": {},
}
COPIES, DRAFT = Source("ngram", False), Source("model", True)
ABOUT = {"target": {"name": "a"}, "cores": 2}


def test_a_profile_brings_back_what_it_was_made_of(tmp_path: Path) -> None:
    costs = CostModel()
    costs.load_state_dict(LEARNT)
    assert profiles.write(ABOUT, costs.state_dict() | {"method": "auto", "drafters": {}}, tmp_path)
    assert profiles.read(ABOUT, tmp_path) == LEARNT
    assert profiles.read(ABOUT | {"cores": 4}, tmp_path) is None


def test_a_profile_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers may mean something else; nothing is said of it, and it stays as it is."""
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
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("6.0", "-6.0"),
        lambda text: text.replace("6.0", "NaN"),
        lambda text: text.replace('"8"', '"eight"'),
        lambda text: text.replace('"model": 0.9', '"model": "much"'),
        lambda text: text.replace('"trust"', '"thrust"'),
        lambda text: text.replace("[0.6, 0.5, 0.4, 0.3]", "[]"),
        lambda text: text.replace("[0.6, 0.5, 0.4, 0.3]", "[0.6, -0.5]"),
        lambda text: text.replace("[0.6, 0.5, 0.4, 0.3]", "0.6"),
        lambda text: text.replace('"name": "a"', '"name": "b"'),
    ],
)
def test_a_damaged_or_foreign_profile_is_ignored_and_said(tmp_path: Path, damage) -> None:
    path = profiles.write(ABOUT, LEARNT, tmp_path)
    assert path is not None
    path.write_text(damage(json.dumps({"about": ABOUT, "learnt": LEARNT})))
    with pytest.warns(UserWarning, match="is ignored .* measured anew"):
        assert profiles.read(ABOUT, tmp_path) is None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert profiles.write(ABOUT, LEARNT, blocked) is None


def test_a_step_is_expected_to_cost_what_its_weights_say_until_it_is_timed() -> None:
    costs = costs_of((1, 6.0), (1, 6.0))
    costs.expect(DRAFT, 0.15)
    assert costs.draft_seconds(DRAFT) == pytest.approx(0.9)
    for _ in range(2):
        costs.record_draft(2.0, 1, DRAFT)
        costs.record_step(DRAFT, 1)
    assert costs.draft_seconds(DRAFT) == 2.0


def test_reading_is_expected_to_take_the_same_share_of_the_targets() -> None:
    costs = CostModel()
    costs.expect(DRAFT, 0.1)
    assert costs.draft_prefill_seconds(DRAFT, 100) == 0.0, "nothing was read yet"
    costs.record_prefill(200, 4.0)
    assert costs.draft_prefill_seconds(DRAFT, 100) == pytest.approx(0.2)
    assert costs.draft_prefill_seconds(COPIES, 100) == 0.0


def test_two_counts_that_cost_the_same_by_chance_do_not_make_all_others_free() -> None:
    costs = costs_of((1, 6.0), (1, 6.0), (5, 7.0), (5, 7.0), (6, 7.0), (6, 7.0))
    assert costs.pass_seconds(16) == pytest.approx(7.0 + 10 * 0.2)


def test_idle_seconds_go_on_from_answer_to_answer() -> None:
    costs = costs_of((1, 6.0), (1, 6.0))
    assert costs.seconds_idle(DRAFT) == 12.0
    costs.record_draft(1.0, 1, DRAFT)
    costs.record_round(1, 1, 1, 5.0, 0.0)
    assert costs.seconds_idle(DRAFT) == 5.0
