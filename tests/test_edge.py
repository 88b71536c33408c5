"""`outpace edge`: channels, costs, associations and shares, checked against brute force, scipy and formulas by hand."""

from __future__ import annotations

import itertools
import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core import theory
from outpace.core.errors import UserError
from outpace.studies.edge import link, policies, report, run
from outpace.studies.edge import world as worlds
from outpace.studies.edge.policies import divide_equally, divide_optimally
from outpace.studies.edge.problem import ALONE, Assignment, SlotProblem
from outpace.studies.edge.settings import SHIPPED, EdgeSettings, judged, read_acceptance
from outpace.studies.edge.world import make_world, mean_wait

RNG = np.random.default_rng


def problem(devices: int, servers: int, seed: int, price: float = 0.0, is_paper: bool = False) -> SlotProblem:
    """A random slot; a tenth of the links is out of reach."""
    rng = RNG(seed)
    reach = rng.random((devices, servers)) < 0.9
    return SlotProblem(
        draft=rng.uniform(20.0, 250.0, devices),
        tokens=rng.uniform(1.0, 3.0, devices),
        link=np.where(reach, rng.lognormal(0.0, 1.0, (devices, servers)), np.inf),
        verify=rng.uniform(10.0, 30.0, servers),
        queue=rng.uniform(0.0, 40.0, servers),
        alone=rng.uniform(100.0, 300.0, devices),
        draft_energy=rng.uniform(10.0, 100.0, devices),
        alone_energy=rng.uniform(50.0, 300.0, devices),
        radio_watts=0.8,
        transmit_watts=0.2,
        energy_price=np.full(devices, price),
        is_paper=is_paper,
        imbalance=0.01,
    )


def objective(given: SlotProblem, chosen: Assignment) -> float:
    return float(given.evaluate(chosen).cost.sum())


def test_the_path_loss_is_3gpps() -> None:
    """Values worked out by hand from TR 38.901, table 7.4.1-1, at 3.5 GHz."""
    yes, no = np.array(True), np.array(False)
    near, far = np.array(100.0), np.array(500.0)
    assert worlds.path_loss(near, yes, 3.5) == pytest.approx(85.31, abs=0.01)
    assert worlds.path_loss(near, no, 3.5) == pytest.approx(104.64, abs=0.01)
    assert worlds.path_loss(far, yes, 3.5) == pytest.approx(107.11, abs=0.01)  # beyond the breakpoint of 210 m
    assert worlds.line_of_sight_chance(np.array([5.0, 18.0, 100.0])) == pytest.approx([1.0, 1.0, 0.2309], abs=1e-3)


def test_efficiency_ends_at_the_reach() -> None:
    snr = np.array([-np.inf, -6.8, -6.7, 10.0])
    assert worlds.shannon(snr, -6.7) == pytest.approx([0.0, 0.0, math.log2(1 + 10**-0.67), math.log2(11)])


def test_shadowing_keeps_its_spread_and_changes_with_distance() -> None:
    chosen = EdgeSettings(devices=2000, servers=2)
    made = worlds.PathLossChannel(chosen, RNG(0))
    place, servers = RNG(1).random((2000, 2)) * 1000, RNG(2).random((2, 2)) * 1000
    made.efficiency(place, servers)
    before = made._shadow.ravel()
    made.efficiency(place + np.array([0.0, worlds.CORRELATION]), servers)
    after = made._shadow.ravel()
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(math.exp(-1), abs=0.05)
    assert after.std() == pytest.approx(1.0, abs=0.05)


def test_a_step_takes_the_longer_of_drafting_and_verification() -> None:
    """Two devices at one server with half of it each, a third alone; energy counts by the battery's price."""
    given = replace(
        problem(3, 1, 0, price=0.5),
        draft=np.array([100.0, 20.0, 50.0]),
        tokens=np.array([2.0, 2.0, 2.0]),
        link=np.array([[5.0], [5.0], [np.inf]]),
        verify=np.array([18.0]),
        queue=np.array([4.0]),
    )
    half = np.array([0.5, 0.5, 1.0])
    found = given.evaluate(Assignment(np.array([0, 0, ALONE]), half, half))
    assert found.time[:2] == pytest.approx([50.0, 25.0])  # max(100, 4 + 10 + 36) / 2 and 50 / 2
    assert found.energy[:2] == pytest.approx((given.draft_energy[:2] + 0.8 * np.array([100.0, 50.0])) / 2)
    assert (found.time[2], found.energy[2]) == (given.alone[2], given.alone_energy[2])
    assert found.cost == pytest.approx(found.time + 0.5 * found.energy)
    paper = replace(given, is_paper=True).evaluate(Assignment(np.array([0, 0, ALONE]), half, half))
    energy = given.draft_energy[0] + 0.2 * 10.0
    assert paper.cost[0] == pytest.approx((100 + 50 + 0.01 * 50**2 + 0.5 * energy) / 2)


@pytest.mark.parametrize("is_paper", [False, True])
def test_equal_shares_cost_what_evaluation_says(is_paper: bool) -> None:
    given = problem(9, 3, 4, price=0.2, is_paper=is_paper)
    server = policies.max_sinr(given, RNG(0))
    assert given.equal_objective(server) == pytest.approx(objective(given, divide_equally(given, server)))


def test_simple_associations() -> None:
    given = problem(30, 4, 3)
    nearest, fastest = policies.max_sinr(given, RNG(0)), policies.max_compute(given, RNG(0))
    for device in range(30):
        reachable = np.flatnonzero(np.isfinite(given.link[device]))
        assert given.link[device, nearest[device]] == given.link[device].min()
        assert given.verify[fastest[device]] == given.verify[reachable].min()


def test_a_device_out_of_reach_writes_alone() -> None:
    given = problem(6, 2, 5)
    given = replace(given, link=np.where(np.arange(6)[:, None] == 2, np.inf, np.ones((6, 2))))
    for name in policies.ASSOCIATIONS:
        policy = run.find_policy(f"{name}/equal")
        chosen = policy.assign(given, RNG(0))
        assert chosen.server[2] == ALONE
        assert given.evaluate(chosen).time[2] == given.alone[2]


@pytest.mark.parametrize("is_paper", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gains_of_moves_and_exchanges_are_differences_of_objectives(seed: int, is_paper: bool) -> None:
    given = problem(8, 3, seed, is_paper=is_paper)
    server = policies.max_sinr(given, RNG(0))
    gains, before = policies.move_gains(given, server), given.equal_objective(server)
    for device, goal in itertools.product(range(8), range(3)):
        moved = server.copy()
        moved[device] = goal
        after = given.equal_objective(moved)
        assert gains[device, goal] == pytest.approx(before - after)
    for one, other in itertools.combinations(range(8), 2):
        best = policies.exchange(given, server)
        exchanged = best.copy()
        exchanged[[one, other]] = best[[other, one]]
        assert given.equal_objective(exchanged) >= given.equal_objective(best) * (1 - 1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 10**6), st.booleans())
def test_swap_and_move_never_raise_the_objective(devices: int, servers: int, seed: int, is_paper: bool) -> None:
    given = problem(devices, servers, seed, is_paper=is_paper)
    first = policies.greedy(given, RNG(0))
    matched = policies.match_by_channel(given)
    assert given.equal_objective(policies.improve(given, first)) <= given.equal_objective(first) * (1 + 1e-12)
    assert given.equal_objective(policies.exchange(given, matched)) <= given.equal_objective(matched) * (1 + 1e-12)


@pytest.mark.parametrize("length", [8, 2])
def test_associations_are_near_the_best_of_all(length: int) -> None:
    """Worlds of 6 devices and 3 servers, all 729 associations. Short drafts make the servers' compute scarce."""
    ratios: dict[str, list[float]] = {}
    for seed in range(20):
        chosen = EdgeSettings(devices=6, servers=3, area=500.0, draft_length=length)
        given = make_world(chosen, seed).problem(0, np.zeros(3), np.ones(6))
        choices = [[*np.flatnonzero(row)] or [ALONE] for row in given.in_range]
        best = min(given.equal_objective(np.array(every)) for every in itertools.product(*choices))
        for name in ("greedy", "move", "swap"):
            chosen = policies.ASSOCIATIONS[name](given, RNG(0))
            ratios.setdefault(name, []).append(given.equal_objective(chosen) / best)
    means = {name: float(np.mean(found)) for name, found in ratios.items()}
    assert min(min(found) for found in ratios.values()) >= 1 - 1e-12
    assert means["move"] <= means["greedy"]
    assert max(means.values()) <= 1.03, means


def slsqp(given: SlotProblem) -> float:
    """Return the least objective by scipy: minimise the weighted steps t >= a, t >= queue + b / y + c / z.

    Times are scaled to about 1, as the solver's tolerances expect.
    """
    scipy = pytest.importorskip("scipy.optimize")
    n, unit = len(given.draft), float(given.draft.mean())
    link, verify, queue = given.link[:, 0] / unit, given.verify[0] / unit, given.queue[0] / unit
    weight = given.weight / given.weight.sum()
    floor = given.draft / unit

    def slack(x: np.ndarray) -> np.ndarray:
        return x[2 * n :] - queue - link / x[:n] - verify / x[n : 2 * n]

    def slope(x: np.ndarray) -> np.ndarray:
        return np.hstack([np.diag(link / x[:n] ** 2), np.diag(verify / x[n : 2 * n] ** 2), np.eye(n)])

    sums = np.kron(np.eye(3)[:2], np.ones(n))
    step = np.maximum(floor, queue + n * (link + verify))
    found = scipy.minimize(
        lambda x: weight @ x[2 * n :],
        np.concatenate([np.full(2 * n, 1.0 / n), step]),
        jac=lambda x: np.concatenate([np.zeros(2 * n), weight]),
        bounds=[(1e-6, 1.0)] * (2 * n) + [(low, None) for low in floor],
        constraints=[
            {"type": "ineq", "fun": slack, "jac": slope},
            {"type": "ineq", "fun": lambda x: 1.0 - sums @ x, "jac": lambda x: -sums},
        ],
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-9},
    )
    assert found.success, found.message
    return float(found.fun * given.weight.sum() * unit)


def one_cell(devices: int, seed: int) -> SlotProblem:
    given = problem(devices, 1, seed, price=0.1 * (seed % 3))
    return replace(given, link=RNG(seed).lognormal(0.0, 1.5, (devices, 1)))


def steps(given: SlotProblem, chosen: Assignment) -> float:
    """Return the weighted steps, which the shares minimise."""
    served = given.queue[0] + given.link[:, 0] / chosen.band + given.verify[0] / chosen.compute
    return float(given.weight @ np.maximum(given.draft, served))


@pytest.mark.parametrize("seed", range(200))
def test_optimal_shares_are_scipys(seed: int) -> None:
    devices = 2 + seed % 7
    given = one_cell(devices, seed)
    found = steps(given, divide_optimally(given, np.zeros(devices, dtype=int)))
    assert found == pytest.approx(slsqp(given), rel=1e-6)


def test_a_device_with_long_drafts_gets_what_it_needs_and_no_more() -> None:
    given = replace(
        problem(3, 1, 0),
        draft=np.array([200.0, 10.0, 10.0]),
        link=np.array([[1.0], [1.0], [1.0]]),
        verify=np.array([20.0]),
        queue=np.array([0.0]),
        tokens=np.ones(3),
    )
    chosen = divide_optimally(given, np.zeros(3, dtype=int))
    served = given.link[:, 0] / chosen.band + 20.0 / chosen.compute
    assert served[0] == pytest.approx(200.0, rel=1e-4)
    assert served[1] == pytest.approx(served[2])
    assert served[1] < 3 * 21.0  # with equal shares


def test_all_servers_are_divided_at_once_as_one_by_one() -> None:
    given = problem(40, 4, 1)
    server = policies.greedy(given, RNG(0))
    whole = divide_optimally(given, server)
    for number in range(4):
        chosen = server == number
        part = divide_optimally(given, np.where(chosen, server, ALONE))
        assert whole.band[chosen] == pytest.approx(part.band[chosen])
        assert whole.band[chosen].sum() == pytest.approx(1.0)
        assert whole.compute[chosen].sum() == pytest.approx(1.0)
    assert objective(given, whole) < objective(given, divide_equally(given, server))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.floats(1.0, 10.0))
def test_more_bandwidth_or_compute_never_costs(devices: int, seed: int, factor: float) -> None:
    given = one_cell(devices, seed)
    here = np.zeros(devices, dtype=int)
    least = steps(given, divide_optimally(given, here))
    assert least <= steps(given, divide_equally(given, here)) * (1 + 1e-9)
    for better in (replace(given, link=given.link / factor), replace(given, verify=given.verify / factor)):
        chosen = divide_optimally(better, here)
        assert steps(better, chosen) <= least * (1 + 1e-9)
        assert chosen.band.sum() == pytest.approx(1.0)
        assert chosen.compute.sum() == pytest.approx(1.0)


def test_a_pass_waits_for_a_queue_that_shrinks() -> None:
    for queue in (0.0, 300.0, 1000.0, 2500.0):
        waits = np.maximum(queue - (np.arange(10_000) + 0.5) / 10, 0.0)
        assert mean_wait(np.array(queue), 1000.0) == pytest.approx(waits.mean(), abs=1e-3)


def test_queues_and_batteries_carry_over() -> None:
    chosen = EdgeSettings(devices=8, servers=2, slots=3, prompts=1.0, prompt_passes=50.0, area=100.0)
    world = make_world(chosen, 0)
    server = np.array([0] * 6 + [1] * 2)
    queue = world.queue_after(np.zeros(2), 0, server)
    assert queue == pytest.approx([6 * 50 * world.pass_ms[0], 2 * 50 * world.pass_ms[1]])
    assert world.queue_after(queue, 1, server) == pytest.approx(2 * queue - np.minimum(queue, 1000.0))
    found = run.run_policy(world, run.find_policy("greedy/equal"))
    assert found.time.shape == (3, 8)
    assert found.time[1].mean() > found.time[0].mean()  # the prompts of the first slot are in the way
    levels = world.battery_after(np.full(8, 1e-9), np.full(8, 5000.0))
    assert (levels == 0.0).all()


def test_devices_stay_in_the_square_and_worlds_depend_on_the_seed_alone() -> None:
    chosen = EdgeSettings(devices=20, servers=3, slots=30, speed=40.0, area=200.0)
    one, same, other = make_world(chosen, 1), make_world(chosen, 1), make_world(chosen, 2)
    assert all(np.array_equal(a.efficiency, b.efficiency) for a, b in zip(one.slots, same.slots, strict=True))
    assert not np.array_equal(one.slots[0].efficiency, other.slots[0].efficiency)
    assert all((slot.efficiency > 0).mean() > 0.9 for slot in one.slots)  # 283 m at most


def test_old_channels_leave_some_devices_without_a_server() -> None:
    chosen = EdgeSettings(devices=40, servers=4, slots=6, speed=60.0, transmit_dbm=5.0)
    found = {
        age: run.compare(replace(chosen, channel_age=age), [run.find_policy("greedy/optimal")], 3, 0)[0]
        for age in (0, 1)
    }
    assert found[1].out_of_reach > found[0].out_of_reach
    assert math.isfinite(found[1].time)


def test_best_lengths_follow_the_battery() -> None:
    chosen = EdgeSettings(devices=200, servers=20, draft_length=None, battery=(0.001, 1.0))
    free, dear = make_world(chosen, 0), make_world(replace(chosen, energy_weight=3.0), 0)
    assert (dear.lengths <= free.lengths).all()
    low = free.battery < 0.2
    assert (free.lengths - dear.lengths)[low].mean() > (free.lengths - dear.lengths)[free.battery > 0.8].mean()
    assert set(free.lengths[free.kind == 0]) != set(free.lengths[free.kind == 2])


def test_tokens_and_alone_are_the_formulas() -> None:
    rates = (0.6, 0.7)
    world = make_world(EdgeSettings(devices=5, servers=1, acceptance=rates, draft_length=3), 0)
    given = world.problem(0, np.zeros(1), world.battery)
    assert given.tokens == pytest.approx(theory.pearl_tokens(rates, 3))
    plain, alone = given.alone.min() / 6.0, 1558 / 137
    assert plain < alone  # drafting on the device helps it
    assert plain == pytest.approx(min((g + alone) / theory.expected_tokens(0.7, g) for g in range(9)), rel=0.2)


def test_the_step_is_the_engines() -> None:
    """PEARL on the simulated clock takes the steps and gives the tokens of the model, link included."""
    from test_parallel_decoders import simulated

    gamma, step, verify, delay, alpha = 4, 5.0, 18.0, 22.0, 0.8
    outcome = simulated("pearl", alpha, gamma, (verify + delay) / step)
    modelled = max(gamma * step, verify + delay) / theory.pearl_tokens([alpha], gamma)
    assert outcome.seconds * step / outcome.tokens == pytest.approx(modelled, rel=0.05)


def test_greedy_cuts_a_fifth_and_the_sentences_say_what_to_use() -> None:
    names = ("alone/equal", "server-alone", "max-sinr/equal", "greedy/equal", "greedy/optimal")
    found = run.compare(EdgeSettings(acceptance=judged(SHIPPED)), [run.find_policy(name) for name in names], 5, 0)
    cuts = {one.policy: one.cut or 0.0 for one in found}
    assert cuts["max-sinr/equal"] == 0.0
    assert 0.1 < cuts["greedy/equal"] < cuts["greedy/optimal"] < 0.5
    said = report.sentences(found)
    assert said[0].startswith("use greedy/optimal: ")
    assert said[1].startswith("drafting on the devices pays: ")


def test_one_link_is_the_formulas_of_theory() -> None:
    given = link.OneLink(12.0, 25.0, 40.0, (0.8,), device_pass=140.0)
    found = {one.name: one for one in link.choices(given)}
    sequential = min((12 * g + 65) / theory.expected_tokens(0.8, g) for g in range(1, 65))
    assert found["device drafts, sequential"].time == pytest.approx(sequential)
    pearl = min(max(12 * g, 65) / theory.pearl_tokens([0.8], g) for g in range(1, 65))
    assert found["device drafts, PEARL"].time == pytest.approx(pearl)
    gamma = theory.best_length(0.8, 12 / 140)
    assert found["device alone, sequential drafting"].length == gamma
    assert found["device drafts, CARD"].time == pytest.approx(25 / theory.card_limit(5.0, 1.0, 12 / 25))
    assert link.advice(given).startswith(
        "best is server alone, 25.0 ms per token; the second best, device drafts, PEARL"
    )
    assert link.advice(replace(given, server_pass=90.0)).startswith("best is device drafts, PEARL with ")
    assert link.advice(replace(given, server_pass=300.0)).startswith("best is device alone, sequential drafting with ")


def test_the_command_prints_table_json_and_plots(tmp_path: Path) -> None:
    small = ("edge", "--devices", 12, "--servers", 3, "--worlds", 2)
    code, out, _ = run_command(*small)
    assert (code, out.count("\n") >= 13, "nan" in out.lower()) == (0, True, False)
    plot = tmp_path / "sweep.png"
    code, out, _ = run_command(
        *small,
        "--sweep",
        "devices=6:12:6,servers=2:3:1",
        "--policies",
        "greedy/equal,alone/equal",
        "--json",
        "--plot",
        plot,
    )
    rows = json.loads(out)["rows"]
    assert [(row["devices"], row["servers"]) for row in rows[::2]] == [(6, 2), (6, 3), (12, 2), (12, 3)]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    code, out, _ = run_command(
        *small, "--sweep", "energy-weight=0:2:1", "--draft-length", "auto", "--json", "--plot", plot
    )
    assert all(math.isfinite(row["time"]) for row in json.loads(out)["rows"])
    assert run_command(*small, "--slots", 3, "--objective", "paper", "--plot", tmp_path / "bars.svg")[0] == 0
    assert run_command("edge", "--device-step", 12, "--server-pass", 25, "--rtt", 40)[0] == 0
    nobody = run_command(*small, "--transmit-dbm", -250, "--json")[1]
    assert json.loads(nobody)["advice"] == ["no device has a server in reach: all write alone"]
    assert "NaN" not in nobody


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--devices", 3, "--servers", 4), "servers is 4, it must be at most the number of devices, 3"),
        (("--bandwidth-mhz", 0), "bandwidth_mhz is 0.0, it must be between 0.001 and 1e+06"),
        (("--battery", 0, 1), "battery is 0.0, it must be between 0.001 and 1"),
        (("--transmit-dbm", "-inf"), "transmit_dbm is -inf, it must be between -300 and 100"),
        (("--device-step", 3, "--server-pass", -25), "server-pass is -25.0, it must be between 1e-06 and 1e+09"),
        (("--device-step", 3, "--server-pass", 9, "--rtt", -1), "rtt is -1.0, it must be between 0 and 1e+09"),
        (("--device-step", 3), "device-step and server-pass, which go together"),
        (("--sweep", ","), "sweep is ',', it must be names and ranges"),
        (("--sweep", "devices=5:1:1"), "the last value must not be below the first"),
        (("--sweep", "devices=1:2:0.5"), "devices must be whole numbers"),
        (("--sweep", "speeds=1:2:1"), "unknown setting to sweep 'speeds', allowed are area"),
        (("--sweep", "servers=100:200:100"), "servers is 200, it must be at most the number of devices, 120"),
        (("--policies", "greedy"), "policy is 'greedy', it must be an association and shares"),
        (("--policies", "greedi/equal"), "unknown association 'greedi'"),
        (("--policies", "greedy/fair"), "unknown shares of the policy 'greedy/fair' 'fair'"),
        (("--channel", "sionna"), "--channel was removed: leave it out, the channel is always that of 3GPP"),
        (("--seed", -1), "seed is -1, it must be between 0 and "),
        (("--sweep", "devices=-inf:12:1"), "the last value must not be below the first"),
        (("--sweep", "devices=6:6:1,devices=7:8:1"), "sweep has devices twice"),
        (("--policies", "alone/optimal"), "unknown shares of the policy 'alone/optimal' 'optimal', allowed are equal"),
        (("--rtt", 4), "rtt and device-pass need device-step and server-pass"),
        (("--train", "a.zip"), "--train was removed: use the shares `optimal`"),
        (
            ("--policies", "greedy/learned"),
            "unknown shares of the policy 'greedy/learned' 'learned', allowed are equal, optimal",
        ),
        (("--device-step", 3, "--server-pass", 9, "--sweep", "devices=3:4:1"), "one link has no "),
        (("--acceptance", "much"), "acceptance is 'much', it must be rates with commas between them"),
        (("--draft-length", "long"), "draft-length is 'long', it must be a whole number or auto"),
        (("--objective", "money"), "unknown objective 'money', allowed are paper, step"),
    ],
)
def test_bad_input_gets_a_sentence(words: tuple[object, ...], says: str) -> None:
    code, _, err = run_command("edge", *words)
    assert code == 2
    assert says in err


def test_a_judgement_without_positions_is_refused(tmp_path: Path) -> None:
    assert len(read_acceptance("")) == 8
    file = tmp_path / "judgement.json"
    for rows in ([], [{"temperature": 0, "by_position": []}], [{"temperature": 0.8, "by_position": [0.5]}], 3):
        file.write_text(json.dumps({"rows": rows}))
        with pytest.raises(UserError, match="has no row of temperature 0 with `by_position`"):
            read_acceptance(str(file))
    file.write_text(json.dumps({"rows": [{"temperature": 0, "by_position": [0.5, "x"]}]}))
    with pytest.raises(UserError, match=r"by_position in .* is 'x', it must be a number"):
        read_acceptance(str(file))


def test_ctrl_c_ends_the_work_within_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(*given: object) -> None:
        calls.append(given)
        signal.raise_signal(signal.SIGINT)
        if len(calls) > 1:
            raise AssertionError("it went on")

    monkeypatch.setattr(run, "run_policy", interrupted)
    code, out, err = run_command("edge", "--worlds", 1, "--slots", 2)
    assert (code, out) == (130, "")
    assert err == "stopped; nothing was stored\n"


def test_progress_is_that_of_all_worlds() -> None:
    shares: list[float] = []
    points = run.parse_sweep("devices=2:3:1")
    settings = EdgeSettings(servers=1, slots=1)
    assert len([*run.sweep(settings, points, [run.find_policy("alone/equal")], 2, 0, shares.append)]) == 2
    assert shares == [0.25, 0.5, 0.75, 1.0]
