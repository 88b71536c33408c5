"""The extra `edge`: the environment by PettingZoo's own test, training, files of policies, and Sionna's channels."""

from __future__ import annotations

import warnings
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


def environment() -> ModuleType:
    return import_module("outpace.studies.edge.environment")


def training() -> ModuleType:
    return import_module("outpace.studies.edge.training")


@pytest.fixture
def learned() -> None:
    for package in ("pettingzoo", "stable_baselines3"):
        pytest.importorskip(package)


@pytest.fixture
def sionna() -> None:
    pytest.importorskip("sionna")


@pytest.mark.usefixtures("learned")
def test_pettingzoo_accepts_the_environment() -> None:
    from pettingzoo.test import parallel_api_test

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(environment().CellEnvironment(SMALL, 5), num_cycles=50)


@pytest.mark.usefixtures("learned")
def test_the_reward_is_what_the_shares_save() -> None:
    from outpace.studies.edge.shares import SPREAD, observe

    cells = environment().CellEnvironment(SMALL, 6, seed=3)
    for seed in range(5):
        cells.reset(seed=seed)
        given, here = cells._cell, np.zeros(6, dtype=int)
        same = {agent: np.zeros(2, dtype=np.float32) for agent in cells.agents}
        assert list(cells.step(same)[1].values()) == pytest.approx([0.0] * 6, abs=1e-9)
        cells.reset(seed=seed)
        best = divide_optimally(given, here)
        logs = np.log(np.stack([best.band, best.compute], axis=1))
        scores = (logs - logs.mean(0)) / SPREAD
        assert np.abs(scores).max() < 1.0
        _, rewards, _, _, infos = cells.step(dict(zip(cells.agents, scores, strict=True)))
        differences = [info["difference"] for info in infos.values()]
        saved = np.log(given.evaluate(divide_equally(given, here)).cost.mean() / given.evaluate(best).cost.mean())
        assert all(value > -0.005 for value in differences), differences  # no device does harm at the optimum
        assert list(rewards.values()) == pytest.approx([saved] * 6, abs=1e-6)
    old = environment().CellEnvironment(replace(SMALL, channel_age=1), 6)
    seen, _ = old.reset()
    assert np.array_equal(np.stack([*seen.values()]), observe(old._known, here))
    assert not np.allclose(old._known.link, old._cell.link)


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
    model = SAC("MlpPolicy", training().SharedActorCells([environment().CellEnvironment(SMALL)]), device="cpu")
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
    for words in (("--train", tmp_path / "a.zip"), ("--policy", tmp_path / "a.zip"), ("--channel", "sionna")):
        code, _, err = run_command("edge", *words)
        assert (code, "needs the extra edge: `pip install" in err) == (2, True), err
    assert run_command("edge", "--worlds", 1, "--devices", 6, "--servers", 2)[0] == 0


@pytest.mark.usefixtures("sionna")
def test_sionnas_channel_is_like_ours() -> None:
    """Same standard, other draws: medians agree within 6 dB's worth of rate; a standing device keeps its channel."""
    chosen = EdgeSettings(devices=60, servers=6, slots=2, speed=0.0)
    ours, theirs = (make_world(replace(chosen, channel=name), 1).slots for name in ("3gpp", "sionna"))
    assert np.allclose(theirs[0].efficiency, theirs[1].efficiency)
    medians = [float(np.median(slots[0].efficiency.max(1))) for slots in (ours, theirs)]
    assert abs(medians[0] - medians[1]) < 2.0


@pytest.mark.usefixtures("sionna")
def test_coding_stays_below_shannon_and_grows_with_the_channel() -> None:
    from outpace.studies.edge.channel import coded_efficiency

    snr_db = np.arange(-6.0, 32.0, 2.0)
    rates = coded_efficiency(snr_db)
    assert (np.diff(rates) >= 0).all()
    assert (rates <= np.log2(1 + 10 ** (snr_db / 10)) + 0.05).all()
    assert rates[-1] == pytest.approx(0.9 * 6 * 910 / 1024, rel=0.01)  # 64-QAM, the highest with measured errors
