"""Implements `outpace doctor --link grpc://HOST:PORT`: the times of a link to a draft worker, and what pays over it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outpace.cli import display, process
from outpace.core.errors import UserError, require
from outpace.core.stats import merge_stats

if TYPE_CHECKING:
    from outpace.card.remote import DrafterConnection

NUM_PINGS, NUM_BLOCKS, BLOCK_BYTES = 50, 5, 1 << 19  # messages for the round trip; blocks for the rate, each way
LEAST_TRIPS, TRIP_SECONDS = 3, 5.0  # minimum number of messages of a kind; no others after this time
ANSWER_SECONDS = 15.0  # after this time no further prompt is answered
SECONDS = 30.0  # timeout of an answer
NUM_PROMPTS, MAX_TOKENS = 2, 48  # of each built-in task of outpace bench; of an answer
METHODS = ("card", "planned", "pearl", "ssd")
LEAST, MOST = 0.05, 0.95  # acceptance rates beyond these are simulated as these
SIMULATED_ANSWERS, SIMULATED_TOKENS = 2, 128
NO_ANSWER = f"the drafter did not answer within {SECONDS:g} seconds"
PAYS = 1.05  # simulated speedup below which no method is named


def examine(text: str, target: str | None, quiet: bool) -> dict[str, Any]:
    """Time the link, then the target and the drafter over it, and simulate the methods at these times."""
    require("a link to another machine", "remote", "grpc")
    from outpace.api.llm import load
    from outpace.bench.tasks import BUILT_IN, collect
    from outpace.card.link import read_address
    from outpace.card.remote import DrafterConnection, RemoteWorker
    from outpace.card.wire import identity_of

    address = read_address(text)
    with display.loading_bar(quiet) as bar, load(target, worker=text, progress=bar, chain=True) as llm:
        worker = llm.engine.worker
        assert isinstance(worker, RemoteWorker)
        with DrafterConnection(address, identity_of(llm.target), address.key) as connection:
            hello = connection.receive(SECONDS)
            if hello is None or isinstance(hello, Exception):
                raise UserError(str(hello or NO_ANSWER))
            found: dict[str, Any] = {"link": str(address), "draft": hello.hello.name, "target": llm.target.name}
            found |= _time(connection, bar)
        figures, max_tokens = [], max(llm.target.model.max_positions - MAX_TOKENS - 1, 1)
        prompts, end = collect([BUILT_IN], NUM_PROMPTS), time.monotonic() + ANSWER_SECONDS
        for number, prompt in enumerate(prompts):
            bar("answers", number / len(prompts))
            if number and time.monotonic() > end:
                break
            tokens = llm.tokenizer.encode_prompt(prompt.text)[:max_tokens]
            figures.append(llm.stream(tokens, max_tokens=MAX_TOKENS).finish().figures)
        total = merge_stats(figures)
        found["pass_seconds"] = total.target_seconds / total.passes
        found["step_seconds"] = worker.step_seconds
        found["acceptance"] = total.acceptance_by_position[0] if total.acceptance_by_position else None
    return found | {"speedups": _simulate(found)}


def _time(connection: DrafterConnection, show: Callable[[str, float], None]) -> dict[str, float]:
    """Return the round trip's median and 99th percentile, in seconds, and the bytes per second each way."""

    def trips_of(stage: str, most: int, **sizes: int) -> list[float]:
        times, end = list[float](), time.monotonic() + TRIP_SECONDS
        while len(times) < most and (len(times) < LEAST_TRIPS or time.monotonic() < end):
            show(stage, len(times) / most)
            times.append(_trip(connection, **sizes))
        return times

    trips = sorted(trips_of("round trips", NUM_PINGS))
    median = statistics.median(trips)
    up = trips_of("rate up", NUM_BLOCKS, padding=BLOCK_BYTES)
    down = trips_of("rate down", NUM_BLOCKS, answer_bytes=BLOCK_BYTES)
    rates = [BLOCK_BYTES / max(statistics.median(times) - median, 1e-6) for times in (up, down)]
    return {
        "round_trip_seconds": median,
        "round_trip_p99_seconds": trips[int(0.99 * (len(trips) - 1))],
        "bytes_per_second_up": rates[0],
        "bytes_per_second_down": rates[1],
    }


def _trip(connection: DrafterConnection, padding: int = 0, answer_bytes: int = 0) -> float:
    """Return the seconds of one message there and its answer back."""
    process.check()
    connection.ping(padding, answer_bytes)
    end = time.monotonic() + SECONDS
    while (left := end - time.monotonic()) > 0:
        reply = connection.receive(left)
        if isinstance(reply, Exception):
            raise UserError(str(reply))
        if reply is not None and reply.HasField("pong"):
            seconds = connection.trip(reply.pong.number)
            if seconds is not None:
                return seconds
    raise UserError(NO_ANSWER)


def _simulate(found: dict[str, Any]) -> dict[str, float]:
    """Return the simulated speedup of each method over plain decoding; none if nothing was drafted in time."""
    from outpace.simulate.run import simulate
    from outpace.simulate.setups import SetupSizes, by_ratio, select_setups
    from outpace.simulate.trace import synthetic_trace

    if found["acceptance"] is None:
        return {}
    trace = synthetic_trace(min(max(found["acceptance"], LEAST), MOST), SIMULATED_ANSWERS, SIMULATED_TOKENS)
    setups = select_setups(SetupSizes(nodes=16, width=8), METHODS)
    ratio = found["pass_seconds"] / found["step_seconds"]
    delay = found["round_trip_seconds"] / 2 / found["pass_seconds"]
    outcomes = simulate(trace, setups, [by_ratio(ratio)], delays=[delay])
    return {outcome.setup.name: round(outcome.speedup, 3) for outcome in outcomes if outcome.setup.name in METHODS}


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the report."""
    trip, late = 1000 * found["round_trip_seconds"], 1000 * found["round_trip_p99_seconds"]
    up, down = found["bytes_per_second_up"] / 1e6, found["bytes_per_second_down"] / 1e6
    acceptance, speedups = found["acceptance"], found["speedups"]
    rows = [
        ("link", f"{found['link']}, draft {found['draft']} for {found['target']}"),
        ("round trip", f"{trip:.2f} ms (median), {late:.2f} ms (99th percentile)"),
        ("rate", f"{up:.1f} MB/s there, {down:.1f} MB/s back"),
        ("target pass", f"{1000 * found['pass_seconds']:.1f} ms"),
        ("draft step", f"{1000 * found['step_seconds']:.1f} ms"),
        ("acceptance", "nothing was drafted in time" if acceptance is None else f"{acceptance:.2f} of first tokens"),
    ]
    if speedups:
        best = max(speedups, key=speedups.__getitem__)
        verdict = f"--method {best}" if speedups[best] >= PAYS else "plain decoding: no method gains over this link"
        rows.append(("simulated speedup", ", ".join(f"{name} {speed:.2f}" for name, speed in speedups.items())))
        rows.append(("what pays", verdict))
    return rows
