"""A drafter on another machine: the same text through delays, cuts, silences and invalid messages, and no leftovers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from doubles import QuickToy, collect_warnings, decode, make_request, within
from light import SECONDS, Lookup, failing
from links import OWN, at, drafting, tls_files, trust, worker_of
from processes import REQUESTS, TABLE, TEXTS, Drive, driven, nothing_left, num_descriptors, run_script, until

from outpace.card import wire
from outpace.card.cache import CandidateLevel, Correction
from outpace.card.link import MAX_MESSAGE, Address, Outbox, authenticator, read_address
from outpace.card.loop import Correct, DraftLoop, Open, SetDirectives
from outpace.card.protocol_pb2 import Event, FromDrafter, FromTarget, Level
from outpace.card.protocol_pb2 import Request as RequestMessage
from outpace.card.remote import DrafterConnection, LinkError, RemoteWorker
from outpace.card.wire import Identity, ProtocolError, SentRequest
from outpace.cli import link_report
from outpace.cluster.draft_model import build_card_drafter, load_own_draft
from outpace.cluster.draft_server import DraftServer
from outpace.core.drafting import DraftDirectives
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.engine.build import BuildOptions
from outpace.models.options import LoadOptions
from outpace.server.options import ServerOptions

REPOSITORY = Path(__file__).parents[1]
KEY = "secret"


class SlowToy(QuickToy):
    """A target whose passes take long enough for a message there and back."""

    def score(self, forest: Any) -> Any:
        time.sleep(0.002)
        return super().score(forest)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize("method", ["card", "planned", "pearl", "ssd"])
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_texts_equal_plain_decoding(method: str, delay: float) -> None:
    """The requests are greedy, gumbel and match ones."""
    with drafting(delay=delay) as (server, relay):
        worker = worker_of(relay)
        assert worker.is_ready
        work = partial(decode, REQUESTS, method, worker=worker, target=SlowToy(16, 3, 0))
        outcome = within(SECONDS, work)
        assert outcome.texts == TEXTS
        assert outcome.failure is None
        assert outcome.figures.accepted > 0 or method == "planned"
        until(lambda: server.num_requests == 0, "the end of all requests on the drafter's side")


def test_the_round_trip_is_measured_and_not_awaited_after_a_miss() -> None:
    with drafting(delay=0.05) as (_, relay):
        worker = worker_of(relay)
        until(lambda: worker.round_trip_seconds > 0, "a measurement")
        assert 0.1 <= worker.round_trip_seconds < 1.0
        waits = []
        worker.wait = lambda cache, levels, depth=0: waits.append(cache.missed)  # type: ignore[method-assign]
        outcome = within(SECONDS, partial(decode, REQUESTS[:2], "card", worker=worker, target=SlowToy(16, 3, 0)))
        assert outcome.texts == TEXTS[:2]
        assert True not in waits


def test_a_slow_link_is_timed_with_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_report, "TRIP_SECONDS", 0.0)
    stages: list[str] = []
    with drafting(delay=0.05) as (_, relay), DrafterConnection(at(relay.port), OWN, None) as connection:
        found = link_report._time(connection, lambda stage, done: stages.append(stage))
    assert 0.1 <= found["round_trip_seconds"] <= found["round_trip_p99_seconds"]
    assert Counter(stages) == {"round trips": 3, "rate up": 3, "rate down": 3}


def test_texts_beyond_the_drafts_context_do_not_end_the_link() -> None:
    with drafting(own=OWN._replace(max_positions=4)) as (_, relay):
        worker = worker_of(relay)
        outcome = within(SECONDS, partial(decode, REQUESTS, "card", worker=worker, target=SlowToy(16, 3, 0)))
        assert outcome.texts == TEXTS
        assert outcome.failure is None


def test_ids_that_pad_the_vocabulary_do_not_end_the_link() -> None:
    """Both sides know 12 tokens, the target writes 16."""
    own = OWN._replace(num_tokens=12)
    assert any(max(text) >= 12 for text in TEXTS)
    with drafting(Lookup(bytes(min(token, 10) for token in TABLE)), own) as (server, relay):
        worker = RemoteWorker(at(relay.port), own).start()
        requests = [*REQUESTS, make_request([1, 15], max_tokens=20)]
        work = partial(decode, requests, "card", worker=worker, target=SlowToy(16, 3, 0))
        outcome, said = collect_warnings(partial(within, SECONDS, work))
        assert outcome.texts[:-1] == TEXTS
        assert (outcome.failure, said) == (None, [])
        assert server.num_requests == 0


def test_a_target_that_sends_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.cluster.draft_server.SILENT_SECONDS", 0.1)
    with drafting() as (_, relay):
        _, status = call(relay.goal, silent_after(hello()))
        assert status == "DEADLINE_EXCEEDED"
        monkeypatch.setattr("outpace.card.link.HELLO_SECONDS", 0.1)
        assert call(relay.goal, silent_after())[1] in ("CANCELLED", "DEADLINE_EXCEEDED")


def silent_after(*messages: Any) -> Iterator[Any]:
    """Yield messages, then none for a long time."""
    yield from messages
    time.sleep(4 * SECONDS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_a_link_that_is_cut_is_dialled_again(seed: int) -> None:
    chance = random.Random(seed)
    with drafting() as (server, relay):
        worker = worker_of(relay)

        def work(drive: Drive) -> None:
            for _ in range(3):
                drive.until_drafted()
                for _ in range(chance.randrange(20)):
                    drive.round()
                relay.cut()
            drive.until_drafted()

        (said,) = driven(worker, work)
        assert "continuing without it until it restarts" in said
        until(lambda: server.num_requests == 0, "the end of all requests on the drafter's side")
    assert worker.failure is None or isinstance(worker.failure, LinkError)


def test_a_silent_link_is_given_up_and_dialled_again() -> None:
    with drafting() as (_, relay):
        worker = worker_of(relay, patience=1.0)

        def work(drive: Drive) -> None:
            drive.until_drafted()
            relay.is_held = True
            written = len(drive.runs) + 12
            drive.until(lambda: len(drive.runs) >= written, "texts without a drafter")
            drive.until(lambda: worker.failure is not None, "the end of the link")
            relay.is_held = False
            drive.until_drafted()

        (said,) = driven(worker, work)
    assert "was silent for" in said


def test_a_short_silence_is_no_failure() -> None:
    with drafting() as (_, relay):
        worker = worker_of(relay)

        def work(drive: Drive) -> None:
            drive.until_drafted()
            relay.is_held = True
            written = len(drive.runs) + 6
            drive.until(lambda: len(drive.runs) >= written, "texts without a drafter")
            relay.is_held = False
            drive.until_drafted()

        assert driven(worker, work) == []


SERVER = f"""
from light import Lookup
from links import OWN
from outpace.cluster.draft_server import DraftServer
with DraftServer(Lookup({TABLE!r}), OWN) as server:
    print(server.listen("127.0.0.1", int(sys.argv[1])), flush=True)
    server.has_ended.wait()
"""


def server_process(port: int = 0) -> tuple[subprocess.Popen[str], int]:
    process = run_script(SERVER, str(port))
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.long)])
def test_partitions_of_any_length_change_no_text(count: int) -> None:
    """Short ones are no failure; after long ones the link is dialled again."""
    chance = random.Random(count)
    with drafting() as (server, relay):
        worker = worker_of(relay, patience=1.0)

        def work(drive: Drive) -> None:
            for number in range(count):
                drive.until_drafted()
                end = time.monotonic() + chance.choice([0.3, 3.0] if number else [3.0])
                relay.is_held = True
                drive.until(lambda end=end: time.monotonic() > end, "the end of the partition")
                relay.is_held = False
            drive.until_drafted()

        assert len(driven(worker, work)) == 1
        until(lambda: server.num_requests == 0, "the end of all requests on the drafter's side")


STOPS = (0.5, 1.0, 2.0, 4.0, 17.0)  # seconds


@pytest.mark.skipif(os.name != "posix", reason="uses POSIX signals")
@pytest.mark.parametrize(("stops", "lengths"), [(1, (1.0,)), pytest.param(8, STOPS, marks=pytest.mark.long)])
def test_a_stopped_draft_worker_goes_on(stops: int, lengths: Sequence[float]) -> None:
    process, port = server_process()
    worker, chance = RemoteWorker(at(port), OWN, pauses=(0.05,)).start(), random.Random(stops)

    def work(drive: Drive) -> None:
        for _ in range(stops):
            drive.until_drafted()
            end = time.monotonic() + chance.choice(lengths)
            process.send_signal(signal.SIGSTOP)
            drive.until(lambda end=end: time.monotonic() > end, "the end of the stop")
            process.send_signal(signal.SIGCONT)
        drive.until_drafted()

    try:
        said = driven(worker, work, seconds=(stops + 1) * SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert len(said) <= 1  # a stop of more than 15 seconds is a failure


@pytest.mark.skipif(os.name != "posix", reason="uses POSIX signals")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_killed_draft_worker_is_replaced_by_the_next_one(kills: int) -> None:
    process, port = server_process()
    worker = RemoteWorker(at(port), OWN, pauses=(0.05,)).start()
    chance = random.Random(kills)
    processes, descriptors = [process], list[int]()

    def work(drive: Drive) -> None:
        for number in range(kills):
            drive.until_drafted()
            descriptors.append(num_descriptors())
            for _ in range(chance.randrange(20)):
                drive.round()
            if number % 2:  # a stop of a moment first
                processes[-1].send_signal(signal.SIGSTOP)
                for _ in range(20):
                    drive.round()
            processes[-1].kill()
            processes[-1].communicate()
            drive.until(lambda: worker.failure is not None, "its end is seen")
            processes.append(server_process(port)[0])
        drive.until_drafted()

    try:
        said = driven(worker, work, seconds=(kills + 2) * SECONDS)
    finally:
        for one in processes:
            one.kill()
            one.communicate()
    assert len(said) == 1
    assert max(descriptors) <= descriptors[0] + 4, "each new link must free what the last one had"


def test_without_a_drafter_the_text_is_written_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    worker = RemoteWorker(at(port), OWN, pauses=(0.02,), first_seconds=SECONDS).start()
    work = partial(decode, REQUESTS, "card", worker=worker, target=SlowToy(16, 3, 0))
    outcome, said = collect_warnings(partial(within, SECONDS, work))
    assert outcome.texts == TEXTS
    assert len(said) == 1
    assert "no link to 127.0.0.1" in said[0]


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (OWN._replace(num_tokens=17), "toy has 17 tokens, toy has 16"),
        (OWN._replace(tokenizer="other", name="mine"), "mine has the tokenizer 'other', toy has 'toy tokenizer'"),
    ],
)
def test_another_vocabulary_is_refused(own: Identity, says: str) -> None:
    with drafting() as (server, relay):
        with pytest.raises(UserError, match=says):
            RemoteWorker(at(relay.port), own).start()
        assert server.num_requests == 0


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafting() as (_, relay):
        hello = OWN.hello
        hello.protocol_version = 99
        monkeypatch.setattr(Identity, "hello", hello)
        with pytest.raises(UserError, match="protocol version 99 was offered, toy speaks 1"):
            worker_of(relay)


@pytest.mark.parametrize(("key", "says"), [(None, "an API key is needed"), ("wrong", "the API key is wrong")])
def test_a_missing_or_wrong_key_is_refused(key: str | None, says: str) -> None:
    authenticate = authenticator([hashlib.sha256(KEY.encode()).digest()])
    with drafting(authenticate=authenticate) as (_, relay):
        with pytest.raises(UserError, match=says):
            worker_of(relay, key=key)
        worker = worker_of(relay, key=KEY)
        assert worker.is_ready
        worker.close()


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tls_files(tmp_path)
    options = ServerOptions(ssl_certfile=files["certificate"], ssl_keyfile=files["key"])
    with DraftServer(Lookup(TABLE), OWN) as server:
        there = at(server.listen("127.0.0.1", 0, options.read_tls()), True)
        with pytest.raises(UserError, match=r"no secure link to 127\.0\.0\.1"):
            RemoteWorker(there, OWN).start()
        trust(monkeypatch, files)
        worker = RemoteWorker(there, OWN).start()
        assert worker.is_ready
        worker.close()


def test_a_target_may_need_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutual TLS: without a certificate of the authority the link is refused, and decoding is plain."""
    files = tls_files(tmp_path)
    mutual = replace(
        ServerOptions(ssl_certfile=files["certificate"], ssl_keyfile=files["key"]),
        ssl_ca_certs=files["authority"],
    )
    trust(monkeypatch, files)
    with DraftServer(Lookup(TABLE), OWN) as server:
        there = at(server.listen("127.0.0.1", 0, mutual.read_tls()), True)
        worker = RemoteWorker(there, OWN, first_seconds=1.0).start()
        assert not worker.is_ready
        assert "it may need a certificate: set OUTPACE_SSL_CERTFILE" in str(worker.failure)
        worker.close()
        trust(monkeypatch, files, shows_certificate=True)
        worker = RemoteWorker(there, OWN).start()
        assert worker.is_ready
        worker.close()
        monkeypatch.delenv("OUTPACE_SSL_KEYFILE")
        with pytest.raises(UserError, match="set both OUTPACE_SSL_CERTFILE and OUTPACE_SSL_KEYFILE, or neither"):
            RemoteWorker(there, OWN).start()
        monkeypatch.setenv("OUTPACE_SSL_KEYFILE", str(tmp_path / "none"))
        with pytest.raises(UserError, match=r"OUTPACE_SSL_KEYFILE is .*none, which cannot be read"):
            RemoteWorker(there, OWN).start()


def messages(seed: int) -> Iterator[FromTarget]:
    """Yield messages that parse, and sooner or later an invalid one."""
    chance = random.Random(seed)

    def number() -> int:
        return chance.choice([0, 1, 2, 3, 15, 16, 1000, 2**31, 2**32 - 1])

    def real() -> float:
        return chance.choice([0.0, 0.5, 1.0, -1.0, 1e300, float("nan"), float("inf")])

    while True:
        event = Event(key=chance.choice([0, 1, 2**63]))
        kind = chance.choice(["open", "correction", "directives", "pause", "resume", "close", None])
        if kind == "open":
            event.open.next_id = chance.choice([1, 7, 0, -3, 2**62])
            fields = {"seed": chance.choice([0, 2**64 - 1]), "max_tokens": number(), "choice": number()}
            event.open.request.CopyFrom(
                RequestMessage(
                    prompt=[chance.randrange(17 if chance.random() < 0.2 else 16) for _ in range(chance.randrange(5))],
                    rule=chance.choice(["greedy", "greedy", "gumbel", "rejection", "x" * 100, ""]),
                    rule_options=chance.choice([{}, {}, {"a": "b"}]),
                    temperature=real(),
                    top_p=real(),
                    repetition_penalty=real(),
                    **fields,
                )
            )
        elif kind == "correction":
            event.correction.tokens.extend(chance.randrange(17) for _ in range(chance.randrange(3)))
            event.correction.length = number()
            event.correction.root_id = chance.choice([0, 1, 5, -1, -2, 2**62, -(2**63)])
        elif kind == "directives":
            event.directives.share, event.directives.width = real(), number()
            event.directives.floor, event.directives.outcomes = real(), number()
        elif kind:
            getattr(event, kind).SetInParent()
        yield FromTarget(events=[event])


def call(port: int, sent: Iterator[Any]) -> tuple[list[Any], str]:
    """Send messages or bytes after a hello; return what came back, and the name of the final status."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        serialize = lambda one: one if isinstance(one, bytes) else one.SerializeToString()  # noqa: E731
        stream = channel.stream_stream("/outpace.v1.Drafting/Draft", serialize, FromDrafter.FromString)
        found, answers = [], stream(sent, timeout=SECONDS)
        try:
            for answer in answers:
                found.append(answer)
        except grpc.RpcError as error:
            return found, error.code().name
    return found, "OK"


def hello() -> FromTarget:
    return FromTarget(hello=OWN.hello)


@pytest.mark.parametrize("count", [100, pytest.param(3_000, marks=pytest.mark.long)])
def test_invalid_messages_end_their_stream_alone(count: int) -> None:
    with drafting() as (server, relay):
        worker = worker_of(relay)
        drive = Drive(worker)
        with drive.engine:
            for seed in range(count):
                sent = messages(seed)
                _, status = call(relay.goal, (hello() if n == 0 else next(sent) for n in range(60)))
                assert status == "INVALID_ARGUMENT"
                drive.round()
            drive.until_drafted()
            drive.finish()
        assert worker.failure is None
        assert server.failure is None
        until(lambda: server.num_requests == 0, "the end of all requests on the drafter's side")


@pytest.mark.parametrize(
    "sent", [[b"\xff" * 20], [hello(), b"\xff" * 20], [FromTarget()], [hello(), hello()], [hello(), b"\0" * (5 << 20)]]
)
def test_other_bytes_end_the_stream(sent: list[Any]) -> None:
    with drafting() as (_, relay):
        assert call(relay.goal, iter(sent))[1] in ("INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("count", [50, pytest.param(1_000, marks=pytest.mark.long)])
def test_random_bytes_on_the_port_do_no_harm(count: int) -> None:
    chance = random.Random(1)
    with drafting() as (_, relay):
        worker = worker_of(relay)

        def work(drive: Drive) -> None:
            for _ in range(count):
                with socket.create_connection(("127.0.0.1", relay.goal)) as noise:
                    noise.sendall(chance.randbytes(chance.randrange(1, 2000)))
                drive.round()
            drive.until_drafted()

        assert driven(worker, work) == []


GOOD = Level(key=1, id_steps=[1, 1], parent_steps=[1, 1], tokens=[1, 2], roles=[0, 1], log_probs=[-0.5, -1.0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": [1, 16]}, "token 16 was sent, allowed are 0 to 15"),
        ({"tokens": [1]}, "different lengths"),
        ({"id_steps": [1, 0]}, "do not increase"),
        ({"id_steps": [-5, 1]}, "out of range"),
        ({"parent_steps": [1, 0]}, "before its parent"),
        ({"parent_steps": [1, -1]}, "before its parent"),
        ({"log_probs": [-0.5, float("nan")]}, "log probability nan"),
        ({"log_probs": [0.1, -1.0]}, "allowed are -1e\\+06 to 0"),
        ({"log_probs": [-float("inf"), -1.0]}, "log probability -inf"),
        ({"roles": [0, 9]}, "role 9"),
        ({"root_id": 2**63 - 1}, "out of range"),
        ({"alias": -4}, "alias"),
    ],
)
def test_an_invalid_level_is_refused(changes: dict[str, Any], says: str) -> None:
    bad = Level()
    bad.CopyFrom(GOOD)
    for name, value in changes.items():
        bad.ClearField(name)
        getattr(bad, name).extend(value) if isinstance(value, list) else setattr(bad, name, value)
    assert wire.read_level(GOOD, 16).nodes.columns() == ([1, 2], [0, 1], [1, 2], [0, 1], [-0.5, -1.0])
    with pytest.raises(ProtocolError, match=says):
        wire.read_level(bad, 16)


def test_a_million_nodes_are_refused() -> None:
    limit, level = wire.LevelLimit(), wire.read_level(GOOD, 16)

    def count_all() -> None:
        for _ in range(1_000_000):
            limit.count(1, level)

    with pytest.raises(ProtocolError, match="more than 65536 nodes"):
        count_all()


def test_invalid_levels_end_their_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some levels are spoiled at random; the text stays the target's."""
    chance, encode = random.Random(3), wire.level_message

    def spoil(key: int, level: CandidateLevel) -> Level:
        message = encode(key, level)
        if message.tokens and chance.random() < 0.02:
            name = chance.choice(["tokens", "log_probs", "id_steps", "roles"])
            getattr(message, name)[0] = 1 << 20 if name == "tokens" else 7
        return message

    monkeypatch.setattr("outpace.cluster.draft_thread.level_message", spoil)
    with drafting() as (_, relay):
        worker = worker_of(relay)

        def work(drive: Drive) -> None:
            drive.until(lambda: worker.failure is not None, "its end")
            drive.until_drafted()

        (said,) = driven(worker, work)
    assert "sent an invalid message" in said


def test_a_drafter_that_fails_ends_its_server() -> None:
    with drafting(failing(Lookup(TABLE), after=20)) as (server, relay):
        worker = worker_of(relay)
        outcome, _ = collect_warnings(partial(decode, REQUESTS, "card", worker=worker, target=SlowToy(16, 3, 0)))
        assert outcome.texts == TEXTS
        assert server.has_ended.wait(SECONDS)
        assert "grow number" in str(server.failure)


def test_a_request_crosses_whole() -> None:
    from outpace.core.types import Adjustments

    adjustments = Adjustments(1.2, 0.5, -0.5, ((3, 1.5), (7, -2.0)), min_tokens=2, allowed=(1, 2, 3))
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**62, "choice": 3}
    request = make_request([1, 2, 3], "gumbel", 40, stop_ids=frozenset({4, 9}), adjustments=adjustments, **options)
    found = wire.read_request(RequestMessage.FromString(wire.request_message(request).SerializeToString()), OWN)
    assert type(found.rule) is type(request.rule)
    assert found == type(request)(**{**vars(request), "rule": found.rule})


@pytest.mark.parametrize("floor", [-1.0, 1.5, float("nan"), float("-inf")])
def test_a_senseless_floor_is_refused(floor: float) -> None:
    event = wire.event_message(SetDirectives(1, DraftDirectives(floor=floor)))
    with pytest.raises(ProtocolError, match=r"floor \S+ was sent, it must be between 0 and 1"):
        SentRequest(make_request([1, 2]), 3).read(1, event, OWN)


def test_a_root_with_the_id_of_another_node_does_not_end_the_drafter(tiny_folder: str) -> None:
    loop = DraftLoop(build_card_drafter("model", load_own_draft(tiny_folder, LoadOptions(is_draft=True)), {}))
    loop.post(Open(1, make_request([5, 6, 7], max_tokens=200)))
    chance = random.Random(4)
    for length in range(1, 31):
        nodes = [node for _ in range(3) for _, level in loop.grow() for node in level.nodes.columns()[0]]
        loop.post(Correct(1, Correction([chance.randrange(3, 90)], length, chance.choice(nodes))))
    [(_, level)] = loop.grow()
    assert len(level.nodes) > 0


def test_long_requests_are_sent_in_several_messages() -> None:
    outbox = Outbox(FromTarget, wire.add_message)
    for key in range(8):
        outbox.put(Open(key, make_request([200_000] * 300_000)))
    outbox.close()
    sent = list(outbox)
    assert [event.key for message in sent for event in message.events] == list(range(8))
    assert max(message.ByteSize() for message in sent) < MAX_MESSAGE


def test_a_level_of_16_nodes_takes_about_10_bytes_a_node() -> None:
    tree = TokenTree(5, next_id=10_000)
    for number in range(16):
        tree.add(number // 2, 40_000 + number, -0.1 * number - 0.1)
    level = CandidateLevel(-3, tree.delta(1))
    message = wire.level_message(7, level)
    assert message.ByteSize() / 16 < 12
    found = wire.read_level(Level.FromString(message.SerializeToString()), 50_000)
    assert found.root_id == -3
    for mine, theirs in zip(level.nodes.columns(), found.nodes.columns(), strict=True):
        assert theirs == pytest.approx(mine)


@pytest.mark.parametrize(
    ("tokens", "length", "root_id", "says"),
    [
        ([], 0, -1, "a correction to length 0"),
        ([1], 2, -1, "where 1 was expected"),
        ([1], 1, 0, "root 0"),
        ([1], 1, 3, "root 3 was sent, and no level had this node"),
        ([16], 1, -1, "token 16"),
    ],
)
def test_an_invalid_correction_is_refused(tokens: list[int], length: int, root_id: int, says: str) -> None:
    sent = SentRequest(make_request([1, 2]), 3)
    event = wire.event_message(Correct(1, Correction(tokens, length, root_id)))
    with pytest.raises(ProtocolError, match=says):
        sent.read(1, event, OWN)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grpc://127.0.0.1", "it must be grpc://HOST:PORT"),
        ("grpc://127.0.0.1:x", "it must be grpc://HOST:PORT"),
        ("grpc://127.0.0.1:1/x", "it must be grpc://HOST:PORT"),
        ("grpc://no-such-host.invalid:1", "the host no-such-host.invalid is not known"),
    ],
)
def test_a_wrong_address_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_address(text)
    assert str(Address("::1", 5, False)) == "[::1]:5"


@pytest.mark.parametrize("text", ["grpc://a%2FKEY@127.0.0.1", "grpcs://a/KEY@127.0.0.1:1", "grpc://KEY@no.invalid:1"])
def test_no_key_of_an_address_is_shown(text: str) -> None:
    with pytest.raises(UserError) as raised:
        read_address(text)
    assert "KEY" not in str(raised.value)
    with pytest.raises(UserError) as raised:
        BuildOptions(worker=f"grpc://{text.partition('://')[2]}", drafter="ngram")
    assert "KEY" not in str(raised.value)
    address = read_address("grpc://a%2FKEY@127.0.0.1:1")
    assert (address.key, repr(address)) == ("a/KEY", "127.0.0.1:1")


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    name = "outpace/card/protocol.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{REPOSITORY}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", name]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    for suffix in (".py", ".pyi"):
        made = (tmp_path / "outpace" / "card" / f"protocol_pb2{suffix}").read_text()
        assert made == (REPOSITORY / "outpace" / "card" / f"protocol_pb2{suffix}").read_text(), "see protocol.proto"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["draft-worker", "--listen", "0.0.0.0:0"], "host 0.0.0.0 can be reached from other machines"),
        (["draft-worker", "--listen", "here"], "it must be HOST:PORT"),
        (["draft-worker", "--draft-length", "3"], "unknown option"),
        (["doctor", "--link", "127.0.0.1:1"], "it must be grpc://HOST:PORT"),
        (["doctor", "--link", "grpc://127.0.0.1:1"], "no link to 127.0.0.1:1"),
        (["generate", "x", "--worker", "grpc://no-such-host.invalid:1"], "is not known"),
        (["generate", "x", "--worker", "grpc://127.0.0.1:1", "--draft", "none"], "the draft model is at"),
        (["generate", "x", "--worker", "grpc://127.0.0.1:1", "--drafter", "ngram"], "name 'ngram' there"),
        (["generate", "x", "--worker", "grpc://127.0.0.1:1", "--method", "card"], "no draft worker at 127.0.0.1:1"),
        (["generate", "x", "--worker", "127.0.0.1:1"], "did you mean 'grpc://127.0.0.1:1'"),
    ],
)
def test_wrong_flags(run: Run, tiny_folder: str, words: list[str], says: str) -> None:
    which = ["--draft" if words[0] == "draft-worker" else "--target", tiny_folder]
    code, _, err = run(*words, *which)
    assert (code, says in err) == (2, True), err


def start_worker(folder: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start `outpace draft-worker` on a free port; return the process and its address."""
    command = [sys.executable, "-m", "outpace", "draft-worker", "--draft", folder, "--listen", "127.0.0.1:0", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    return process, "grpc://" + line.partition(" drafts on ")[2].partition(";")[0]


def test_the_commands(run: Run, tiny_folder: str) -> None:
    process, address = start_worker(tiny_folder, "--width", "4")
    try:
        options = ["hello", "--raw", "--target", tiny_folder, "--max-tokens", "60", "--ignore-eos", "--json"]
        plain = run("generate", *options, "--method", "autoregressive")[1]
        for sampled in ([], ["--temperature", "0.8", "--seed", "5"]):
            code, out, err = run("generate", *options, *sampled, "--worker", address)
            assert code == 0, err
            found = json.loads(out)
            assert found["method"] == "card"
            assert "warning" not in err
            if not sampled:
                assert found["tokens"] == json.loads(plain)["tokens"]
        code, out, err = run("doctor", "--link", address, "--target", tiny_folder, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert 0 < found["round_trip_seconds"] <= found["round_trip_p99_seconds"]
        assert min(found["bytes_per_second_up"], found["bytes_per_second_down"]) > 1e5
        assert found["acceptance"] is None or set(found["speedups"]) == {"card", "planned", "pearl", "ssd"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0  # as of `outpace serve`
    finally:
        process.kill()
        process.communicate()
