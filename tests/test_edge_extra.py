"""The extra `edge`: rewards, training and files of policies."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from commands import run_command

from outpace.core import errors
from outpace.core.errors import UserError
from outpace.studies.edge.settings import EdgeSettings
from outpace.studies.edge.shares import divide_equally, divide_optimally, load_learned
from outpace.studies.edge.world import make_world

SMALL = EdgeSettings(devices=24, servers=3, area=500.0)


def training() -> ModuleType:
    return import_module("outpace.studies.edge.training")


@pytest.fixture
def learned() -> None:
    pytest.importorskip("stable_baselines3")


@pytest.mark.usefixtures("learned")
def test_the_reward_is_what_the_shares_save() -> None:
    from outpace.studies.edge.shares import SPREAD, observe

    here = np.zeros(6, dtype=int)
    for seed in range(5):
        cell = training().Cell(SMALL, 6, seed)
        cell.draw()
        given = cell.actual
        assert cell.reward(np.zeros((6, 2))) == pytest.approx(0.0, abs=1e-9)
        best = divide_optimally(given, here)
        logs = np.log(np.stack([best.band, best.compute], axis=1))
        scores = (logs - logs.mean(0)) / SPREAD
        assert np.abs(scores).max() < 1.0
        differences = cell.differences(scores)
        saved = np.log(given.evaluate(divide_equally(given, here)).cost.mean() / given.evaluate(best).cost.mean())
        assert all(value > -0.005 for value in differences), differences  # no device does harm at the optimum
        assert cell.reward(scores) == pytest.approx(saved, abs=1e-6)
    old = training().Cell(replace(SMALL, channel_age=1), 6, 0)
    assert np.array_equal(old.draw(), observe(old.known, here))
    assert not np.allclose(old.known.link, old.actual.link)


@pytest.mark.usefixtures("learned")
def test_each_device_of_all_cells_gets_its_own_reward() -> None:
    cells, alone = training().SharedActorCells(SMALL, [3, 5], seed=1), training().Cell(SMALL, 5, 2)
    assert np.array_equal(cells.reset()[3:], alone.draw())
    scores = np.random.default_rng(0).uniform(-1.0, 1.0, (8, 2))
    seen, rewards, ends, _ = cells.step(scores)
    assert rewards[3:] == pytest.approx(5 * alone.differences(scores[3:]), rel=1e-5)
    assert np.array_equal(seen[3:], alone.draw())
    assert ends.all()


@pytest.mark.usefixtures("learned")
def test_a_policy_is_trained_saved_and_used(tmp_path: Path) -> None:
    file = tmp_path / "policy.zip"
    network = ("--devices", 24, "--servers", 3, "--area", 500)
    assert run_command("edge", *network, "--train", file, "--train-minutes", 0.03)[0] == 0
    names = "greedy/equal,greedy/learned"
    code, out, _ = run_command("edge", *network, "--worlds", 2, "--policy", file, "--policies", names)
    assert (code, "greedy/learned" in out, "nan" in out.lower()) == (0, True, False)

    given = make_world(SMALL, 5).problem(0, np.zeros(3), np.ones(24))
    server = np.arange(24) % 4 - 1  # some write alone
    chosen = load_learned(file)(given, server)
    for number in range(3):
        assert chosen.band[server == number].sum() == pytest.approx(1.0)
        assert chosen.compute[server == number].sum() == pytest.approx(1.0)
    assert not np.allclose(chosen.band[server == 0], 1 / 6)


@pytest.mark.usefixtures("learned")
def test_a_wrong_policy_file_gets_a_sentence(tmp_path: Path) -> None:
    import gymnasium
    from stable_baselines3 import SAC

    damaged, other = tmp_path / "damaged.zip", tmp_path / "other.zip"
    damaged.write_bytes(b"PK nothing")
    with pytest.raises(UserError, match="which is no policy of --train"):
        load_learned(damaged)
    SAC("MlpPolicy", gymnasium.make("Pendulum-v1"), device="cpu", policy_kwargs={"net_arch": [4]}).save(other)
    with pytest.raises(UserError, match=r"sees \(3,\) values and gives \(1,\); allowed are 9 and 2"):
        load_learned(other)
    model = SAC("MlpPolicy", training().SharedActorCells(SMALL, [6]), device="cpu")
    model.actor.mu.bias.data[0] = float("nan")
    model.save(other)
    with pytest.raises(UserError, match="has weights that are not finite"):
        load_learned(other)
    assert "is no file" in run_command("edge", "--policy", tmp_path / "none.zip")[2]
    assert (
        "no server has 3 devices in reach"
        in run_command("edge", "--train", tmp_path / "policy.zip", "--transmit-dbm", -200)[2]
    )
    assert "must end with .zip" in run_command("edge", "--train", tmp_path / "policy.pt")[2]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    for words in (("--train", tmp_path / "a.zip"), ("--policy", tmp_path / "a.zip")):
        code, _, err = run_command("edge", *words)
        assert (code, "needs the extra edge: `pip install" in err) == (2, True), err
    assert run_command("edge", "--worlds", 1, "--devices", 6, "--servers", 2)[0] == 0
