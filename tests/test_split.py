"""A model split over processes: what rank 0 does the others repeat, to the bit; none outlives another, none hangs."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from files import model_folder
from passes import branch, random_parents

from outpace.core.errors import LostProcess, UserError
from outpace.models import devices
from outpace.models.base import Part
from outpace.models.distributed import processes
from outpace.models.distributed.processes import Leader
from outpace.models.hf import split
from outpace.models.hf.passes import ForwardPasses, TransformersSession
from outpace.models.load import load_model
from outpace.models.options import LoadOptions

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json, os, sys, time
import outpace

folder, options = sys.argv[1], json.loads(sys.argv[2])
draft = options.pop("draft", None)
prompts = ["the cat sat on the cat sat on the", "a b a b"]
with outpace.load(folder, draft, profile=False, **options) as llm:
    print(json.dumps("loaded"), flush=True)
    texts = []
    for temperature in (0.0, 0.9):
        for plain in (True, False):
            found = llm.generate(prompts, plain=plain, max_tokens=24, temperature=temperature, seed=5)
            texts.append([result.tokens for result in found])
    print(json.dumps(texts), flush=True)
    while os.environ.get("GO_ON"):
        llm.generate(prompts, max_tokens=64, ignore_eos=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("split"))


class Group:
    """Processes that find one another, without a launcher that would end the others when one has ended."""

    def __init__(
        self, folders: tuple[Any, ...], options: dict[str, Any], is_cuda: bool = False, **environment: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)} | environment
        shared |= {"WORLD_SIZE": str(len(folders))} | ({} if is_cuda else {"CUDA_VISIBLE_DEVICES": ""})
        options = options if "pp_plan" in options else {"tp_plan": "auto"} | options
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(where), json.dumps(options)],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, where in enumerate(folders)
        ]

    def line(self) -> Any:
        """Return the next line that rank 0 prints."""
        out = self.ranks[0].stdout
        assert out is not None
        line = out.readline()
        if not line:
            pytest.fail(f"rank 0 has ended and said nothing more: {self.ends()}")
        return json.loads(line)

    def ends(self) -> list[tuple[int, str, str]]:
        """Return each rank's status, output and errors once both have ended."""
        found = [rank.communicate(timeout=500) for rank in self.ranks]
        return [(rank.returncode, *texts) for rank, texts in zip(self.ranks, found, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "speculative", "drafter": "ngram"},
        pytest.param({"method": "card", "worker": "thread", "draft": True}, marks=pytest.mark.long),
        pytest.param({"method": "auto", "draft": True}, marks=pytest.mark.long),
    ],
    ids=lambda options: options["method"],
)
def test_texts_are_those_of_plain_decoding_and_of_one_process(folder: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    given = options | ({"draft": str(folder)} if "draft" in options else {})
    group = Group((folder, folder), given)
    assert group.line() == "loaded"
    plain, ours, sampled_plain, sampled = group.line()
    assert (ours, sampled) == (plain, sampled_plain)
    assert [(status, out) for status, out, _ in group.ends()] == [(0, ""), (0, "")], "rank 0 alone writes"
    alone = load_model(folder, runtime="transformers")
    import outpace

    with outpace.LLM(alone, None, method="autoregressive") as llm:
        found = llm.generate(["the cat sat on the cat sat on the", "a b a b"], max_tokens=24, temperature=0.0)
    assert [list(result.tokens) for result in found] == plain, "near ties may differ elsewhere; here there are none"


@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_process_ends_the_other_one(folder: Path, dying: int) -> None:
    pytest.importorskip("accelerate")
    group = Group((folder, folder), {"method": "speculative", "drafter": "ngram"}, GO_ON="1")
    assert group.line() == "loaded"
    group.line()
    group.ranks[dying].send_signal(signal.SIGKILL)
    ends = group.ends()
    assert ends[dying][0] == -signal.SIGKILL
    status, _, said = ends[1 - dying]
    assert status == 1, said
    assert "split model" in said


def test_an_error_in_one_is_told_by_all(folder: Path, tmp_path: Path) -> None:
    """No process waits for one that could not load."""
    pytest.importorskip("accelerate")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes() if file.suffix != ".safetensors" else b"nothing")
    first, second = Group((folder, broken), {}).ends()
    assert (first[0], second[0]) == (1, 1), (first[2], second[2])
    assert "rank 1 of the split model could not load it" in first[2]


def test_refusals_come_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=r"tp_plan .*rows.*auto|unknown tp_plan|tp_plan"):
        LoadOptions(tp_plan="rows")
    with pytest.raises(UserError, match=r"this one runs alone: start it with"):
        load_model(missing, tp_plan="auto")
    monkeypatch.setattr(devices, "num_processes", lambda: 2)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    for more, said in [
        ({"runtime": "native"}, "for the runtime transformers, not for native"),
        ({"device_map": "auto"}, "both say where"),
    ]:
        with pytest.raises(UserError, match=said):
            load_model(missing, tp_plan="auto", **more)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 were started here, and 1 are present"):
        load_model(missing, tp_plan="auto")
    monkeypatch.undo()
    monkeypatch.setattr(devices, "num_processes", lambda: 2)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install accelerate"):
        load_model(missing, tp_plan="auto")
    assert LoadOptions(tp_plan="auto").of_draft().tp_plan is None


def test_a_model_without_a_plan_is_refused() -> None:
    def config(plan: Any, **heads: int) -> Any:
        text = SimpleNamespace(base_model_tp_plan=plan, **heads)
        return SimpleNamespace(get_text_config=lambda decoder: text)

    split.check_tp_plan(config({"layers": "colwise"}, num_attention_heads=4, num_key_value_heads=2), None, 2, "it")
    split.check_tp_plan(config(None), SimpleNamespace(_tp_plan={"lm_head": "colwise"}), 2, "it")
    with pytest.raises(UserError, match="no plan to split it"):
        split.check_tp_plan(config(None), None, 2, "it")
    with pytest.raises(UserError, match=r"2 num_key_value_heads, which 4 processes"):
        split.check_tp_plan(config({"a": "b"}, num_attention_heads=4, num_key_value_heads=2), None, 4, "it")


def test_a_connection_from_outside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Queue[Any] = Queue()
    monkeypatch.setattr(processes.dist, "broadcast_object_list", lambda found, src: told.put(found[0]))
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(processes, "_LEADS", threading.Event())
    found: list[Leader] = []
    thread = threading.Thread(target=lambda: found.append(processes.connect_followers()), daemon=True)
    thread.start()
    address, secret = told.get(timeout=60)
    socket.create_connection(address).close()
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    link = processes._connection(socket.create_connection(address))
    link.send_bytes(secret + b"1")
    thread.join(60)
    assert len(found) == 1
    found[0].end()
    assert pickle.loads(link.recv_bytes()) == [(processes.END, ())]


class Followed:
    """A leader and a follower in two threads, each with its own copy of a model that is not split at all."""

    def __init__(self, folder: Path) -> None:
        modules = [load_model(folder, runtime="transformers").model.module for _ in range(2)]
        mine, theirs = Pipe()
        self.lead = Leader([mine])
        self.passes = ForwardPasses(modules[0], self.lead)
        self.failure: BaseException | None = None
        self.sessions: dict[int, TransformersSession] = {}
        self.follower = modules[1]
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def _run(self, connection: Any) -> None:
        perform = partial(split.repeat, ForwardPasses(self.follower), self.sessions)
        try:
            processes.follow(perform, connection, split.FORWARDS)
        except BaseException as failure:
            self.failure = failure
        finally:
            processes.cut(connection)

    def end(self) -> BaseException | None:
        self.lead.end()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.failure


def test_a_follower_holds_what_the_leader_holds(folder: Path) -> None:
    """Trees, kept paths, copies of beginnings, sessions that grow, shrink and go: keys and values are the same."""
    both, rng = Followed(folder), random.Random(3)
    passes = both.passes
    sessions = [passes.open(100, 40) for _ in range(3)]
    for turn in range(30):
        session = rng.choice(sessions)
        if session.length + 30 > 90:
            session.truncate(rng.randrange(10))
            session.trim()
        tokens, parents = [rng.randrange(200) for _ in range(9)], random_parents(9, turn)
        passes.score([Part(session, tokens, parents, range(9), ())], width=272, as_trees=rng.random() < 0.7)
        session.keep(branch(parents, rng.randrange(9)))
        if turn == 20:
            sessions[1] = passes.open(100, 40)
            sessions[1].start_from(sessions[0], sessions[0].length // 2)
    passes.plain([1, 2, 3])
    assert both.end() is None
    assert both.sessions.keys() == {session.number for session in sessions}, "one is gone"
    for session in sessions:
        theirs = both.sessions[session.number]
        for mine, other in zip(session.layers, theirs.layers, strict=True):
            for one, two in zip(mine.stored, other.stored, strict=True):
                held = session.length
                assert torch.equal(one[..., :held, :], two[..., :held, :])


def test_only_a_forward_that_fails_on_one_side_ends_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Followed(folder)
    with pytest.raises(IndexError):
        both.passes.plain([10**6])
    assert both.passes.plain([1, 2]).shape[0] == 2
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    with pytest.raises(LostProcess, match="failed alone"), both.lead.forward("plain", [1, 2]):
        raise ValueError("here alone")
    with pytest.raises(UserError, match="load it anew"):
        both.passes.plain([1])
    both = Followed(folder)
    with both.lead.forward("plain", [10**6]):
        pass  # it fails there alone
    time.sleep(0.5)
    with pytest.raises(LostProcess, match=r"rank 1 .* has ended"), both.lead.forward("plain", [1]):
        pass
    assert isinstance(both.end(), IndexError)
