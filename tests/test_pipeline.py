"""A target in a pipeline: the bits are those of the unsplit model, every rank holds its own layers, and none hangs."""

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import recurrent
import torch
import torch.distributed as dist
from files import model_folder, weights, write_gguf
from heads import write_head
from judges import random_judge
from passes import branch, random_parents

import outpace
from outpace.cli.main import _run
from outpace.core.errors import LostProcess, UserError
from outpace.core.logits import tensor_of
from outpace.models import devices
from outpace.models.base import Model, Part
from outpace.models.distributed import pipeline, processes
from outpace.models.distributed.pipeline import PipelineModel, PipelineStage, RowChannel, build_stage, facts_of
from outpace.models.distributed.plan import RankFacts, layer_ranges, share_layers
from outpace.models.distributed.processes import Leader
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.load import load_draft, load_model
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded

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


CHANGES = {"num_hidden_layers": 5}
PROMPTS = ["the cat sat on the cat sat on the", "a b a b", "the cat", "b a", "cat cat", "on", "sat a b", "a the b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("pipeline"), **CHANGES)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in blocks of its file."""
    where = tmp_path_factory.mktemp("packed")
    return write_gguf(where / "m.gguf", {"llama.block_count": 5}, "Q8_0", tensors=weights(**CHANGES))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in blocks of its file."""
    where = tmp_path_factory.mktemp("mixture")
    recurrent.make("qwen3_moe", where / "m", **CHANGES)
    return recurrent.write_gguf(where / "m", where / "m.gguf", "qwen3_moe", "Q8_0", block_count=5)


class Rows(RowChannel):
    """A channel between threads; a receive fails when one of them has failed, as torch's does."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], Queue[Any]], failures: list[BaseException]) -> None:
        super().__init__(64, "cpu")
        self._rank, self._queues, self._failures = rank, queues, failures

    def send(self, rows: torch.Tensor, rank: int) -> None:
        self._queues[self._rank, rank].put(rows.clone())

    def receive(self, count: int, rank: int) -> torch.Tensor:
        while self._queues[rank, self._rank].empty():
            if self._failures:
                time.sleep(0.2)  # torch notices later than the watcher of the connections
                raise RuntimeError("Connection closed by peer")
            time.sleep(1e-4)
        rows: torch.Tensor = self._queues[rank, self._rank].get()
        assert rows.shape == (count, 64)
        return rows


class Ranks:
    """A pipeline whose ranks are threads of this process; `whole` is the unsplit model."""

    def __init__(self, source: Path, counts: Sequence[int], **options: Any) -> None:
        self.whole: Loaded = load_model(source, **options)
        ranges = layer_ranges(counts)
        parts = [load_model(source, layers=f"{own.start}-{own.stop - 1}", **options) for own in ranges]
        models: list[Model] = [part.model for part in parts]
        for model, own in zip(models, ranges, strict=True):
            model.stage = own
        queues: dict[tuple[int, int], Queue[Any]] = {
            (one, two): Queue() for one in range(len(counts)) for two in range(len(counts))
        }
        pipes = [Pipe() for _ in counts[1:]]
        self.lead = processes.Leader([mine for mine, _ in pipes])
        self.failures: list[BaseException] = []
        self.stages = [
            PipelineStage(model, Rows(rank, queues, self.failures), rank, rank == len(counts) - 1)
            for rank, model in enumerate(models[1:], 1)
        ]
        for stage, (_, theirs) in zip(self.stages, pipes, strict=True):
            threading.Thread(target=self._follow, args=(stage, theirs), daemon=True).start()
        channel = Rows(0, queues, self.failures)
        self.model = PipelineModel(models[0], [facts_of(model) for model in models], self.lead, channel)
        self.loaded = replace(parts[0], model=self.model, lead=self.lead)

    def _follow(self, stage: PipelineStage, connection: Any) -> None:
        try:
            processes.follow(stage.perform, connection)
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            processes.cut(connection)


@contextmanager
def ranks(*given: Any, **options: Any) -> Iterator[Ranks]:
    found = Ranks(*given, **options)
    try:
        yield found
    finally:
        found.lead.end()


def difference(found: Ranks, rounds: int = 16) -> str | None:
    """What first differs from the unsplit model over random trees of three sessions; None if every bit is equal."""
    rng, layers = random.Random(7), (0, 1, 3, 4, 5)
    both = [[model.open(100, 40) for _ in range(3)] for model in (found.whole.model, found.model)]
    keep: list[Sequence[int]] = [()] * 3
    for turn in range(rounds):
        chosen = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        parts: list[list[Part]] = [[], []]
        for number in chosen:
            tokens, parents = [rng.randrange(200) for _ in range(7)], random_parents(7, turn + number)
            rows = sorted(rng.sample(range(7), 4))
            for sessions, own in zip(both, parts, strict=True):
                own.append(Part(sessions[number], tokens, parents, rows, keep[number], rows[:2]))
            keep[number] = branch(parents, rng.randrange(7))
        if turn % 2:
            one, two = (model.score_hidden(own, layers) for model, own in zip(models(found), parts, strict=True))
            hidden = [tensor_of(output.hidden) for output in (one, two)]
            if not torch.equal(*hidden):
                return f"hidden states in round {turn}"
            scores = [tensor_of(output.logits) for output in (one, two)]
        else:
            scores = [
                tensor_of(model.score_sparse(own).to_dense()) for model, own in zip(models(found), parts, strict=True)
            ]
        if not torch.equal(*scores):
            return f"logits in round {turn}"
        if turn == rounds // 2:
            for sessions, model in zip(both, models(found), strict=True):
                length = sessions[0].length
                sessions[1] = model.open(100, 40)
                sessions[1].start_from(sessions[0], length // 2)
                sessions[0].truncate(length // 3)
                sessions[0].trim()
            keep[0] = keep[1] = ()
    return None


def models(found: Ranks) -> tuple[Any, PipelineModel]:
    return found.whole.model, found.model


@pytest.mark.parametrize(
    ("counts", "kind", "options"),
    [
        ((2, 3), "packed", {"runtime": "native"}),
        ((2, 1, 2), "folder", {"runtime": "native"}),
        ((2, 1, 1, 1), "folder", {"runtime": "llama", "dtype": "float32"}),
        ((1, 4), "folder", {"runtime": "llama", "dtype": "float32", "exact": False}),
        ((2, 3), "mixture", {"runtime": "native"}),
    ],
    ids=["packed", "int8", "float32", "inexact", "mixture"],
)
def test_every_bit_is_that_of_the_unsplit_model(
    counts: tuple[int, ...], kind: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with ranks(request.getfixturevalue(kind), counts, **options) as found:
        assert difference(found) is None
        assert found.model.exact == found.whole.model.exact
        held = [len(stage.sessions) for stage in found.stages]
        assert max(held) <= 4, "released sessions are closed"


TEXTS = [
    {"method": "speculative", "drafter": "ngram"},
    {"method": "auto"},
    pytest.param({"method": "card", "worker": "thread"}, marks=pytest.mark.long),
    pytest.param({"method": "speculative", "drafter": "lookahead"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", TEXTS, ids=lambda options: options["method"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_the_unsplit_model(folder: Path, options: dict[str, Any], temperature: float) -> None:
    """Eight prompts at once, in so little memory that requests pause, and then again from kept texts."""
    given = {"max_tokens": 24, "temperature": temperature, "seed": 5, "ignore_eos": True}
    with ranks(folder, (2, 1, 2), runtime="native") as found:
        draft = found.whole if options["method"] == "card" else None
        with outpace.LLM(found.whole, None, method="autoregressive", profile=False) as llm:
            expected = [result.tokens for result in llm.generate(PROMPTS, **given)]
        least = 4 * found.model.session_bytes(64) / (1 << 30)
        with outpace.LLM(found.loaded, draft, kv_memory=None if draft else least, profile=False, **options) as llm:
            for _ in range(2):
                assert [result.tokens for result in llm.generate(PROMPTS, **given)] == expected
        assert not found.failures


def test_a_judge_of_the_unsplit_model_serves_the_pipeline(folder: Path, tmp_path: Path) -> None:
    with ranks(folder, (2, 1, 2), runtime="native") as found:
        given = {"judge": str(random_judge(tmp_path, found.whole)), "threshold": 0.9, "drafter": "ngram"}
        texts = []
        for target in (found.whole, found.loaded):
            with outpace.LLM(target, None, method="speculative", rule="judge", profile=False, **given) as llm:
                results = llm.generate(PROMPTS, max_tokens=24, ignore_eos=True)
            assert sum(result.figures.relaxed for result in results) > 0
            texts.append([result.tokens for result in results])
        assert texts[0] == texts[1]


def test_a_trained_head_is_refused(folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    with (
        ranks(folder, (2, 3), runtime="native") as found,
        pytest.raises(UserError, match="is a trained head, which does not work with pp_plan: name another draft"),
    ):
        load_draft(head, found.loaded)


def test_receives_are_posted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo: messages of any size arrive whole, and after the first one a sender does not wait for the receiver."""
    store, limit = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))

        here: Any = SimpleNamespace(
            send=lambda rows, rank: groups[1 - rank].send([rows], rank, 0).wait(),
            irecv=lambda rows, rank: groups[1 - rank].recv([rows], rank, 0),
        )
        monkeypatch.setattr(pipeline, "dist", here)
        one, two = RowChannel(5, "cpu"), RowChannel(5, "cpu")
        for count in (1, 64, 65, 200, 0, 3, 130):
            rows = torch.arange(5.0 * count).reshape(count, 5)
            sent = threads.submit(one.send, rows, 1)
            assert torch.equal(two.receive(count, 0), rows)
            sent.result()
        for count in (7, 64):
            rows = torch.rand(count, 5)
            one.send(rows, 1)  # returns, although nothing receives yet
            assert torch.equal(two.receive(count, 0), rows)


def test_an_interrupted_pass_leaves_no_rows_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ranks(folder, (2, 3), runtime="native") as found,
        outpace.LLM(found.loaded, None, method="autoregressive", profile=False) as llm,
    ):
        given = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        expected = llm.generate(PROMPTS[:1], **given)[0].tokens
        submit, calls = found.model._thread.submit, iter(range(100))

        def interrupted(*given: Any) -> Any:
            future = submit(*given)
            if next(calls) == 3:
                raise KeyboardInterrupt
            return future

        monkeypatch.setattr(found.model._thread, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:1], **given)
        assert llm.generate(PROMPTS[:1], **given)[0].tokens == expected


def test_a_rank_that_fails_or_ends_is_an_error_that_names_it(folder: Path) -> None:
    with ranks(folder, (2, 1, 2), runtime="native") as found:
        session = found.model.open(50, 8)

        def fail(*given: Any) -> None:
            raise MemoryError("no memory is left")

        found.stages[0].do_change = fail  # type: ignore[method-assign]
        session.reserve(32)
        start = time.monotonic()
        with pytest.raises(LostProcess, match=r"rank 1 of the split model has failed: MemoryError: no memory"):
            found.model.score([Part(session, [1, 2], (-1, 0), (1,))])
        assert time.monotonic() - start < 3.0
        with pytest.raises(LostProcess, match=r"rank 1 .*load it anew"):
            found.model.score([Part(session, [1], (-1,), (0,))])


@pytest.mark.parametrize(
    ("plan", "free", "seconds", "expected"),
    [
        ("12,10,8", (1, 1, 1), (1, 1, 1), [12, 10, 8]),
        ("auto", (900, 900, 900), (1, 1, 1), [10, 10, 10]),
        ("auto", (900, 900, 900), (1, 2, 1), [12, 6, 12]),
        ("auto", (900, 90, 900), (1, 1, 1), [13, 4, 13]),
        ("auto", (150, 900, 900), (1, 1, 1), [3, 14, 13]),  # rank 0 also holds the ends
    ],
)
def test_layers_are_shared_by_memory_and_speed(
    plan: str, free: Sequence[int], seconds: Sequence[float], expected: list[int]
) -> None:
    found = share_layers(plan, 30, [RankFacts(*facts) for facts in zip(free, seconds, strict=True)], 15, 75)
    assert sum(found) == 30
    assert found == expected


def test_a_layer_of_experts_has_the_bytes_of_all(mixture: Path) -> None:
    with GgufCheckpoint(mixture) as source:
        config = source.read_config()
        _, size = pipeline._time_layer(NativeLlama.from_tensors, config, source.weight)
        model = NativeLlama.from_tensors(config, source.weight)
    assert config.experts is not None
    unread = (config.experts.count - config.experts.chosen) * model._experts[0].packed.expert_bytes
    assert size == pytest.approx(model._layers[0].bytes + unread, rel=0.1)
    assert unread > 0.4 * size


def test_plans_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = [RankFacts(100, 1.0)] * 3
    for plan, said in [
        ("12,10", r"names 22 layers for 2 ranks: the model has 30 layers, and 3 ranks"),
        ("12,10,9", r"names 31 layers for 3 ranks"),
        ("auto", r"have memory for 5 \+ 8 \+ 8 of the 30 layers"),
    ]:
        with pytest.raises(UserError, match=said):
            share_layers(plan, 30, three, 10, 30)
    with pytest.raises(UserError, match="2 layers, which 3 ranks cannot share"):
        share_layers("auto", 2, three, 10, 30)
    for plan in ("", "0,3", "a", "3;4", "-1,2", "1,,2"):
        with pytest.raises(UserError, match=r"it must be auto or each rank's layers, as in 12,10,8"):
            LoadOptions(pp_plan=plan)
    assert LoadOptions(pp_plan="3,4").of_draft().pp_plan is None
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=r"pp_plan splits .* this one runs alone"):
        load_model(missing, pp_plan="auto")
    monkeypatch.setattr(devices, "num_processes", lambda: 2)
    monkeypatch.setattr(devices, "check_device", lambda device: None)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 1)
    for more, said in [
        ({"runtime": "transformers"}, "for the runtimes native and llama, not for transformers"),
        ({"device_map": "auto"}, "both say where"),
        ({"device": "cuda"}, "2 were started here, and 1 are present"),
        ({"graphs": "eager"}, "graphs eager does not go with pp_plan"),
    ]:
        with pytest.raises(UserError, match=said):
            load_model(missing, pp_plan="auto", **more)


def environment(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def test_a_process_splits_one_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, 0, 1)
    monkeypatch.setattr(processes, "_LEADS", threading.Event())
    assert processes.join_processes() == 0
    try:
        lead = processes.connect_followers()
        with pytest.raises(UserError, match="has already split a model, which the other ranks follow"):
            processes.join_processes()
        lead.end()
    finally:
        processes.leave_processes()


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


@pytest.mark.parametrize(("rank", "absent"), [(0, "another rank"), (1, "rank 0 at 127.0.0.1")])
def test_a_rank_that_never_comes_is_named(rank: int, absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, rank, 2)
    monkeypatch.setattr(processes, "_CONNECT_SECONDS", 1.0)
    if rank:
        monkeypatch.setattr(processes.dist, "rendezvous", None)  # it may wait twice as long as it is asked to
    with pytest.raises(UserError, match=f"^{absent} has not joined within 1 seconds"):
        processes.join_processes()


def test_ranks_with_other_files_or_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RankFacts(1 << 40, 1.0)
    theirs = [({"outpace": "1", "file": "a"}, facts), ({"outpace": "1", "file": "b"}, facts)]
    monkeypatch.setattr(processes, "gather", lambda value: theirs)
    with pytest.raises(UserError, match="rank 1 has another file than rank 0: b, not a"):
        build_stage(lambda *given: None, "1,1", theirs[0][0], lambda stage: None, None, None, progress=None)  # type: ignore[arg-type]


def test_a_lost_rank_ends_a_command_with_status_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def lost(*given: Any, **named: Any) -> Any:
        raise LostProcess("rank 2 of the split model has ended without notice: load it anew")

    monkeypatch.setattr("outpace.api.llm.load", lost)
    assert _run(["generate", "hello"]) == 1
    assert "error: rank 2 of the split model" in capsys.readouterr().err


class Group:
    """Processes that find one another, without a launcher that would end the others when one has ended."""

    def __init__(self, folders: tuple[Any, ...], options: dict[str, Any], **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)} | environment
        shared |= {"WORLD_SIZE": str(len(folders)), "CUDA_VISIBLE_DEVICES": ""}
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
    ("count", "options"),
    [
        (3, {"pp_plan": "auto", "method": "auto"}),
        pytest.param(2, {"pp_plan": "1,4", "dtype": "float32"}, marks=pytest.mark.long),
        pytest.param(4, {"pp_plan": "1,1,2,1", "method": "card", "draft": True}, marks=pytest.mark.long),
    ],
)
def test_processes_write_what_one_process_writes(folder: Path, count: int, options: dict[str, Any]) -> None:
    given = options | ({"draft": str(folder)} if "draft" in options else {})
    group = Group((folder,) * count, given)
    assert group.line() == "loaded"
    plain, ours, sampled_plain, sampled = group.line()
    assert (ours, sampled) == (plain, sampled_plain)
    assert [(status, out) for status, out, _ in group.ends()] == [(0, "")] * count, "rank 0 alone writes"
    with outpace.load(folder, dtype=options.get("dtype", "auto"), method="autoregressive", profile=False) as llm:
        found = llm.generate(PROMPTS[:2], max_tokens=24, temperature=0.0)
    assert [list(result.tokens) for result in found] == plain


@pytest.mark.parametrize("kill", [0, 1, *(pytest.param(kill, marks=pytest.mark.long) for kill in range(2, 20, 4))])
def test_a_killed_rank_ends_all_others(folder: Path, kill: int) -> None:
    """Prints the seconds until each rank has ended: rank 0 should need less than two."""
    group, rng, dying = Group((folder,) * 3, {"pp_plan": "2,1,2"}, GO_ON="1"), random.Random(kill), kill % 3
    assert group.line() == "loaded"
    group.line()
    time.sleep(2 * rng.random())
    group.ranks[dying].send_signal(signal.SIGKILL)
    start, seconds = time.monotonic(), dict[int, float]()
    while len(seconds) < 3 and time.monotonic() - start < 30:
        found = [rank for rank in range(3) if group.ranks[rank].poll() is not None]
        seconds |= {rank: round(time.monotonic() - start, 2) for rank in found if rank not in seconds}
        time.sleep(0.01)
    print(f"rank {dying} was killed; seconds until each had ended: {seconds}")
    ends = group.ends()
    assert [status for rank, (status, *_) in enumerate(ends) if rank != dying] == [1, 1], ends
    if dying:
        assert f"rank {dying} of the split model has ended without notice" in ends[0][2]
    socket.create_server(("127.0.0.1", group.port)).close()  # fails while a rank listens
    assert not started_with(group.port)


def started_with(port: int) -> list[str]:
    """Processes of a group, or of their own, that still run."""
    left = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            left += [str(file)] if f"MASTER_PORT={port}\0".encode() in file.read_bytes() else []
    return left


def test_an_error_in_one_is_told_by_all(folder: Path, tmp_path: Path) -> None:
    """No process waits for one that could not load."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes() if file.suffix != ".safetensors" else b"nothing")
    first, second = Group((folder, broken), {"pp_plan": "auto"}).ends()
    assert (first[0], second[0]) == (1, 1), (first[2], second[2])
    assert "rank 1 of the split model could not load it" in first[2]


@pytest.mark.long
def test_another_file_in_one_rank_is_said_by_all(folder: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path, seed=1, **CHANGES)
    ends = Group((folder, folder, other), {"pp_plan": "auto"}).ends()
    assert [status for status, *_ in ends] == [1, 1, 1]
    assert all("rank 2 has another file than rank 0" in said for *_, said in ends)
