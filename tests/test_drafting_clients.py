"""Clients that draft for a server: plain decoding's text, the server's keys and limits, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from doubles import collect_warnings
from light import Lookup
from links import OWN, Relay, at, tls_files, trust
from processes import nothing_left, num_descriptors, until
from serving import Served, served, wait_for

import outpace
from outpace.card.link import read_address
from outpace.card.protocol_pb2 import FromDrafter, FromTarget
from outpace.card.wire import identity_of, request_message
from outpace.cluster.draft_model import build_card_drafter
from outpace.cluster.draft_server import DraftServer
from outpace.cluster.remote_target import RemoteTarget
from outpace.core.errors import UserError
from outpace.models.load import load_model
from outpace.models.options import LoadOptions
from outpace.server.options import ServerLimits

REPOSITORY = Path(__file__).parents[1]
KEY = "secret"
LONG = {"max_tokens": 90, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    LONG,
    {**LONG, "temperature": 0.9, "seed": 7},
    {**LONG, "temperature": 1.2, "top_k": 12, "min_p": 0.01, "seed": 8, "presence_penalty": 0.5},
    {**LONG, "repetition_penalty": 1.3, "logit_bias": {5: -3.0}},
    {"max_tokens": 90},
    {"max_tokens": 90, "stop": ["e"], "ignore_eos": True},
    {"max_tokens": 90, "ignore_eos": True, "stop_token_ids": [20, 21, 22, 23, 24, 25, 26]},
]


@pytest.fixture(scope="module")
def llm(tiny_folder: str) -> Iterator[outpace.LLM]:
    with outpace.load(tiny_folder, "none") as llm:
        yield llm


@pytest.fixture(scope="module")
def site(llm: outpace.LLM) -> Iterator[Served]:
    with served(llm, draft_port=0) as site:
        yield site


@contextmanager
def joined(
    folder: str, port: int, key: str | None = None, drafter: str = "model", is_secure: bool = False
) -> Iterator[RemoteTarget]:
    """A client whose draft equals the target."""
    draft = load_model(folder, LoadOptions(is_draft=True))
    with (
        nothing_left(),
        RemoteTarget(at(port, is_secure), draft, build_card_drafter(drafter, draft, {}), key) as target,
    ):
        yield target


def port_of(site: Served) -> int:
    assert site.service.draft_port is not None
    return site.service.draft_port


@pytest.mark.parametrize("delay", [0.0, 0.02])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_texts_equal_plain_decoding(site: Served, tiny_folder: str, delay: float, drafter: str) -> None:
    relay = Relay(port_of(site), delay)
    try:
        with joined(tiny_folder, relay.port, drafter=drafter) as target:
            for options in WAYS:
                plain = site.complete("hello world", **_fields(options)).choice
                found = target.stream("hello world", **options).finish()
                assert found.text == plain["text"], options
                assert found.finish_reason == plain["finish_reason"]
                assert len(found.tokens) <= 90
            assert site.figure("spec_decode_num_draft_tokens_total") > 0
    finally:
        relay.close()
    site.wait_idle()


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a body: JSON has strings as keys; temperature 0 is not the API's default."""
    bias = {str(token): value for token, value in options.get("logit_bias", {}).items()}
    return {"temperature": 0, "outpace": {"speculation": False}, **options, **({"logit_bias": bias} if bias else {})}


def test_drafts_are_accepted_and_others_run_as_before(site: Served, tiny_folder: str) -> None:
    texts = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            texts.append(site.complete("hello", temperature=0, max_tokens=20, ignore_eos=True).choice["text"])

    with joined(tiny_folder, port_of(site)) as target:
        asker = threading.Thread(target=ask)
        asker.start()
        try:
            accepted = 0
            end = time.monotonic() + 60
            while not accepted:
                assert time.monotonic() < end, "never: an accepted draft"
                result = target.stream("hello world", max_tokens=400, ignore_eos=True).finish()
                accepted = result.figures.accepted
        finally:
            stop.set()
            asker.join()
    assert len(set(texts)) == 1
    site.wait_idle()


def test_a_broken_link_is_dialled_again_and_the_text_goes_on(site: Served, tiny_folder: str) -> None:
    relay = Relay(port_of(site))
    chance = random.Random(4)
    try:
        with joined(tiny_folder, relay.port) as target:
            options = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 3}
            plain = site.complete("hello world", **_fields(options)).choice["text"]

            def read() -> str:
                pieces = []
                cuts = 3
                for piece in target.stream("hello world", **options):
                    pieces.append(piece.text)
                    if cuts and chance.random() < 0.1:
                        relay.cut()
                        cuts -= 1
                return "".join(pieces)

            text, said = collect_warnings(read)
            assert text == plain
            assert len(said) == 1
            assert "the answer continues when the link is back" in said[0]
    finally:
        relay.close()
    site.wait_idle()


def test_a_closed_stream_ends_its_request(site: Served, tiny_folder: str) -> None:
    before = site.figure("client_disconnects_total")
    with joined(tiny_folder, port_of(site)) as target:
        stream = target.stream("hello world", max_tokens=5000, ignore_eos=True)
        next(iter(stream))
        assert site.service.admission.groups
        stream.close()
        assert stream.finish().finish_reason == "abort"
        site.wait_idle()
    assert site.figure("client_disconnects_total") == before + 1


@pytest.mark.skipif(os.name != "posix", reason="uses POSIX signals")
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.long)])
def test_killed_clients_leave_nothing(site: Served, tiny_folder: str, kills: int) -> None:
    threads, descriptors = threading.active_count(), list[int]()
    for _ in range(kills):
        address = f"grpc://127.0.0.1:{port_of(site)}"
        command = [sys.executable, "-m", "outpace", "generate", "hello", "--raw", "--target", address]
        command += ["--draft", tiny_folder, "--max-tokens", "100000", "--ignore-eos"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        wait_for(lambda client=client: site.service.admission.groups or client.poll() is not None)
        assert client.poll() is None
        client.send_signal(signal.SIGKILL)
        client.communicate()
        site.wait_idle()
        descriptors.append(num_descriptors())
    assert max(descriptors) <= descriptors[0] + 8, "an ended stream must free what it had"
    until(lambda: threading.active_count() <= threads + 8, "the end of the streams' threads")


def call(port: int, sent: Iterator[Any]) -> tuple[list[FromTarget], str, str]:
    """Send messages; return what came back, the name of the final status, and its sentence."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = channel.stream_stream(
            "/outpace.v1.Drafting/Join", FromDrafter.SerializeToString, FromTarget.FromString
        )
        found, answers = [], stream(sent, timeout=60)
        try:
            for answer in answers:
                found.append(answer)
        except grpc.RpcError as error:
            return found, error.code().name, error.details()
    return found, "OK", ""


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.long)])
def test_invalid_messages_end_their_stream_alone(site: Served, llm: outpace.LLM, count: int) -> None:
    own, chance = identity_of(llm.target), random.Random(2)
    prepared = llm.prepare("hello world", outpace.SamplingParams(max_tokens=50, ignore_eos=True))
    plain = site.complete("hello world", **_fields({"max_tokens": 50, "ignore_eos": True})).choice["text"]

    def sent(number: int) -> Iterator[FromDrafter]:
        yield FromDrafter(hello=own.hello)
        yield FromDrafter(request=request_message(prepared.request))
        for _ in range(30):
            message = FromDrafter(seconds=chance.choice([0.0, 0.1]))
            layer = message.levels.add(key=chance.choice([0, 1, 9]), root_id=chance.choice([0, -1, 5]))
            for _ in range(chance.randrange(4)):
                layer.id_steps.append(1)
                layer.parent_steps.append(chance.choice([1, 1, 2]))
                layer.tokens.append(chance.randrange(20))
                layer.roles.append(chance.randrange(2))
                layer.log_probs.append(-chance.random())
            yield message
        bad = FromDrafter(seconds=chance.choice([-1.0, float("nan")]))
        bad.levels.add(tokens=[1], id_steps=[1], parent_steps=[1], roles=[0], log_probs=[-0.1])
        kinds = [bad, FromDrafter(hello=own.hello), FromDrafter(request=request_message(prepared.request))]
        yield kinds[number % len(kinds)]
        yield bad
        time.sleep(30)

    for number in range(count):
        _, status, _ = call(port_of(site), sent(number))
        assert status in ("INVALID_ARGUMENT", "OK")  # OK: the answer came to its end first
    assert site.complete("hello world", **_fields({"max_tokens": 50, "ignore_eos": True})).choice["text"] == plain
    site.wait_idle()


def test_wrong_drafts_do_not_change_the_text(site: Served, llm: outpace.LLM) -> None:
    """The client drafts random tokens."""
    own, chance = identity_of(llm.target), random.Random(2)
    prepared = llm.prepare("hello world", outpace.SamplingParams(max_tokens=50, ignore_eos=True))
    plain = llm.generate([list(prepared.request.prompt)], max_tokens=50, ignore_eos=True, plain=True)[0].tokens
    ended = threading.Event()

    def sent() -> Iterator[FromDrafter]:
        yield FromDrafter(hello=own.hello)
        yield FromDrafter(request=request_message(prepared.request))
        number = 1
        while not ended.wait(0.0005):
            message = FromDrafter(seconds=0.001)
            layer = message.levels.add(root_id=0)
            layer.id_steps.extend([number, 1])
            layer.parent_steps.extend([number, chance.choice([1, number + 1])])
            layer.tokens.extend(chance.randrange(own.num_tokens) for _ in range(2))
            layer.roles.extend([0, 1])
            layer.log_probs.extend([-0.1, -0.2])
            number += 2
            yield message

    try:
        found, status, _ = call(port_of(site), sent())
    finally:
        ended.set()
    tokens = [token for message in found for event in message.events for token in event.correction.tokens]
    assert status == "OK"
    assert tuple(tokens[:50]) == plain
    site.wait_idle()


def test_ids_that_pad_the_vocabulary_are_written(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides know half of the tokens that the target writes."""
    with outpace.load(tiny_folder, "none") as llm:
        prompt = [3, 4]
        [plain] = llm.generate([prompt], plain=True, **LONG)
        known = sorted(plain.tokens)[len(plain.tokens) // 2]
        own = identity_of(llm.target)._replace(num_tokens=known)
        for place in ("server.drafting", "cluster.remote_target"):
            monkeypatch.setattr(f"outpace.{place}.identity_of", lambda loaded: own)
        with served(llm, draft_port=0) as site, joined(tiny_folder, port_of(site)) as target:
            found = target.stream(prompt, **LONG).finish()
    assert (found.tokens, found.text) == (plain.tokens, plain.text)


def test_a_client_that_asks_nothing_is_sent_away(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.server.drafting.HELLO_SECONDS", 0.1)

    def sent() -> Iterator[FromDrafter]:
        yield FromDrafter(hello=identity_of(site.llm.target).hello)
        time.sleep(60)

    assert call(port_of(site), sent())[1:] == ("DEADLINE_EXCEEDED", "nothing was sent or read in time")


@pytest.mark.parametrize("left", [1, 3])
def test_a_text_may_fill_the_context(site: Served, llm: outpace.LLM, tiny_folder: str, left: int) -> None:
    prompt = [5] * (llm.target.model.max_positions - left)
    [plain] = llm.generate([prompt], max_tokens=50, ignore_eos=True, plain=True)
    with joined(tiny_folder, port_of(site)) as target:
        found = target.stream(prompt, max_tokens=50, ignore_eos=True).finish()
    assert (found.tokens, found.finish_reason) == (plain.tokens, plain.finish_reason)


@pytest.mark.parametrize("seconds", [0.5, 1e9])
def test_a_slow_client_does_not_hold_up_others(site: Served, llm: outpace.LLM, seconds: float) -> None:
    """The client drafts nothing of use, and says that a draft step takes it this long."""
    own, ended = identity_of(llm.target), threading.Event()
    prepared = llm.prepare("hello world", outpace.SamplingParams(max_tokens=2000, ignore_eos=True))

    def sent() -> Iterator[FromDrafter]:
        yield FromDrafter(hello=own.hello)
        yield FromDrafter(request=request_message(prepared.request))
        while not ended.wait(0.01):
            message = FromDrafter(seconds=seconds)
            message.levels.add(root_id=-(1 << 40))
            yield message

    client = threading.Thread(target=call, args=(port_of(site), sent()))
    client.start()
    try:
        time.sleep(1.0)
        began = time.monotonic()
        site.complete("hello", temperature=0, max_tokens=5, ignore_eos=True)
        assert time.monotonic() < began + 5
    finally:
        ended.set()
        client.join()
    site.wait_idle()


def test_the_servers_keys_and_limits_hold(tiny_folder: str) -> None:
    keys = frozenset([hashlib.sha256(KEY.encode()).digest()])
    limits = ServerLimits(max_requests_per_key=1)
    with (
        outpace.load(tiny_folder, "none") as llm,
        served(llm, limits, keys=keys, draft_port=0) as site,
        ExitStack() as stack,
    ):
        for key, says in ((None, "an API key is needed"), ("wrong", "the API key is wrong")):
            with joined(tiny_folder, port_of(site), key) as target, pytest.raises(UserError, match=says):
                target.stream("hello", max_tokens=3).finish()
        target = stack.enter_context(joined(tiny_folder, port_of(site), KEY))
        first = target.stream("hello", max_tokens=5000, ignore_eos=True)
        next(iter(first))
        with pytest.raises(UserError, match="this key has its limit of 1 concurrent requests"):
            target.stream("hello", max_tokens=3).finish()
        first.close()
        site.wait_idle()
        assert len(target.stream("hello", max_tokens=3, ignore_eos=True).finish().tokens) == 3


def test_tls_with_keys_and_certificates_of_clients(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tls_files(tmp_path)
    tls = {"ssl_certfile": files["certificate"], "ssl_keyfile": files["key"]}
    keys = frozenset([hashlib.sha256(KEY.encode()).digest()])
    with (
        outpace.load(tiny_folder, "none") as llm,
        served(llm, keys=keys, draft_port=0, ssl_ca_certs=files["authority"], **tls) as site,
    ):
        [plain] = llm.generate([[3, 4]], plain=True, **LONG)

        def ask(key: str | None) -> Any:
            with joined(tiny_folder, port_of(site), key, is_secure=True) as target:
                return target.stream([3, 4], **LONG).finish().tokens

        trust(monkeypatch, files)
        with pytest.raises(UserError, match="it may need a certificate: set OUTPACE_SSL_CERTFILE"):
            ask(KEY)
        trust(monkeypatch, files, shows_certificate=True)
        with pytest.raises(UserError, match="an API key is needed"):
            ask(None)
        assert ask(KEY) == plain.tokens
        context = ssl.create_default_context(cafile=files["authority"])
        assert health(site, context) == b""
        context.load_cert_chain(files["certificate"], files["key"])
        assert health(site, context).startswith(b"HTTP/1.1 200")


def health(site: Served, context: ssl.SSLContext) -> bytes:
    """Return the start of the response over HTTPS, b"" if the connection is refused."""
    with suppress(ssl.SSLError), context.wrap_socket(site.socket(), server_hostname="127.0.0.1") as secure:
        secure.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return secure.recv(100)
    return b""


def test_what_no_link_carries_is_refused(site: Served, tiny_folder: str) -> None:
    with joined(tiny_folder, port_of(site)) as target:
        for options in ({"logprobs": 1}, {"bad_words": ["x"]}, {"response_format": {"type": "json_object"}}):
            (name,) = options
            with pytest.raises(UserError, match=f"{name} is not available from a target on another machine"):
                target.stream("hello", **options)
        with pytest.raises(UserError, match="a prompt of 100000 tokens was sent, allowed are 1 to"):
            target.stream([5] * 100_000, max_tokens=3).finish()
        with pytest.raises(UserError, match="the request cannot be sent: Value out of range: -1"):
            target.stream([-1], max_tokens=3)


def test_the_commands(site: Served, run: Run, tiny_folder: str) -> None:
    address = f"grpc://127.0.0.1:{port_of(site)}"
    words = ["hello", "--raw", "--max-tokens", "40", "--ignore-eos", "--json"]
    code, out, err = run("generate", *words, "--target", address, "--draft", tiny_folder)
    assert code == 0, err
    found = json.loads(out)
    plain = site.complete("hello", **_fields({"max_tokens": 40, "ignore_eos": True})).choice["text"]
    assert (found["text"], found["method"], len(found["tokens"])) == (plain, "card", 40)
    code, out, err = run("chat", "--target", address, "--draft", tiny_folder, "--max-tokens", "8", stdin="hello\n")
    assert (code, bool(out.strip())) == (0, True), err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "grpc://127.0.0.1:1", "--method", "speculative"], "leave out --method"),
        (["--target", "grpc://127.0.0.1:1", "--worker", "thread"], "leave out --worker"),
        (["--target", "grpc://127.0.0.1:1", "--pp-plan", "auto"], "leave out --pp-plan"),
        (["--target", "grpc://127.0.0.1:1", "--draft-length", "3"], "unknown option"),
        (["--target", "grpc://no-such-host.invalid:1"], "is not known"),
        (["--target", "grpc://127.0.0.1:1"], "no link to 127.0.0.1:1"),
    ],
)
def test_wrong_flags(run: Run, tiny_folder: str, words: list[str], says: str) -> None:
    code, _, err = run("generate", "hello", "--raw", "--draft", tiny_folder, *words)
    assert (code, says in err) == (2, True), err


def test_the_wrong_kind_of_port_is_named(run: Run, site: Served, tiny_folder: str) -> None:
    address = f"grpc://127.0.0.1:{port_of(site)}"
    code, _, err = run("generate", "hello", "--raw", "--target", tiny_folder, "--worker", address)
    assert (code, f"no draft worker listens on 127.0.0.1:{port_of(site)}" in err) == (2, True), err
    with DraftServer(Lookup({}), OWN) as server:
        port = server.listen("127.0.0.1", 0)
        words = ["hello", "--raw", "--target", f"grpc://127.0.0.1:{port}", "--draft", tiny_folder]
        code, _, err = run("generate", *words)
        assert (code, f"no target listens on 127.0.0.1:{port}" in err) == (2, True), err


def test_a_port_in_use_is_one_sentence(site: Served, llm: outpace.LLM) -> None:
    with (
        pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port_of(site)}"),
        served(llm, draft_port=port_of(site)),
    ):
        pass
    assert read_address(f"grpc://127.0.0.1:{port_of(site)}").port == port_of(site)
