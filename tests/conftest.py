"""Use one thread per test: tiny products gain nothing from more.

If a test uses more threads, they sleep while they wait: threads that spin take the processor from other tests, and tiny
products are nearly all waiting.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, and by the processes that tests start

import pytest
import torch
from graph_rules import CheckedCapture

from outpace.core import machine
from outpace.core.machine import available_bytes
from outpace.models.llama.cuda import captures
from outpace.models.llama.torch.runtime import Llama
from outpace.rules import base, gumbel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels are computed by numpy
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with interrupts ignored


SLOWEST = 30  # tests in the file of --slowest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", type=Path, metavar="FILE", help="write the seconds of the slowest tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slowest is not None and not hasattr(config, "workerinput"):  # a worker of xdist has one
        config.pluginmanager.register(SlowestTests(config.option.slowest))


class SlowestTests:
    """Writes the tests that took longest, with their fixtures."""

    def __init__(self, file: Path) -> None:
        self._file, self._seconds = file, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        slowest = sorted(self._seconds.items(), key=lambda one: -one[1])[:SLOWEST]
        total = f"{sum(self._seconds.values()):.0f} s of {len(self._seconds)} tests, the {len(slowest)} slowest:"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("\n".join([total, *(f"{seconds:7.2f} {test}" for test, seconds in slowest)]) + "\n")


@pytest.fixture(autouse=True, scope="session")
def _profiles_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a planner learns from a test is no use to the user whose machine runs it."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.api.profile.entry_path", lambda name, cache: (cache or folder) / name)
        yield


@pytest.fixture(autouse=True, scope="session")
def _captures_follow_the_rules_of_graphs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "EagerCapture", CheckedCapture)
        yield


@pytest.fixture(autouse=True, scope="session")
def _memory_asked_once() -> Iterator[None]:
    """Share one answer about free memory among all engines: a query takes as long as three rounds of a toy.

    No test depends on the memory bandwidth, so little memory is read to measure it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.core.machine.available_bytes", cache(available_bytes))
        patch.setattr(machine, "BUFFER", 2**20)
        yield


@pytest.fixture(autouse=True, scope="session")
def _noise_made_once() -> Iterator[None]:
    """A row of noise follows from its key, and takes sixty operations of torch, which is a third of a sampled text of a
    toy: draft and target, plain decoding and each method ask for the same rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gumbel, "exponential", _by_rows(gumbel.exponential))
        patch.setattr(base, "gumbel", _by_rows(base.gumbel))
        yield


@pytest.fixture(autouse=True, scope="session")
def _row_counts_found_once() -> Iterator[None]:
    """Which row counts leave rows alone follows from the shapes and the machine, and takes as long as a tiny model's
    answer: models of one shape share it."""
    found: dict[Any, Any] = {}
    probe = Llama._probe

    def probe_once(model: Llama) -> Any:
        key = (model.config, model.dtype, str(model.device), torch.get_num_threads())
        if key not in found:
            found[key] = probe(model)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "_probe", probe_once)
        yield


def _by_rows(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Remembers each row for a toy's few tokens; a model's many are made anew."""
    kept: list[dict[tuple[int, int], torch.Tensor]] = [{}]

    def made(keys: Sequence[int], vocab: int, device: Any = "cpu") -> torch.Tensor:
        if vocab > 64 or not keys or str(device) != "cpu":
            return make(keys, vocab, device)
        if len(kept[0]) > 1 << 16:
            kept[0] = {}
        known = kept[0]
        if missing := [key for key in dict.fromkeys(keys) if (key, vocab) not in known]:
            known.update(zip(((key, vocab) for key in missing), make(missing, vocab), strict=True))
        return torch.stack([known[key, vocab] for key in keys])

    return made


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model for the tests of a file."""
    from files import model_folder  # as below: few tests need it

    return str(model_folder(tmp_path_factory.mktemp("tiny"), "target"))


@pytest.fixture(scope="module")
def tiny_pair(tiny_folder: str) -> Any:
    """The tiny model, and a draft of its first layer."""
    from outpace.models.load import load_draft, load_model

    target = load_model(tiny_folder)
    return target, load_draft("layers:0", target)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a tiny model."""
    from files import folder_of, write_gguf

    from outpace.models.text.tokenizer import Tokenizer

    where = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(folder_of(write_gguf(where / "model.gguf"), where / "folder"))


@pytest.fixture
def brake(llm: Any) -> Iterator[Any]:
    """Holds the engine of the test's `llm` before each step until it is let go."""
    from serving import Brake

    brake = Brake(llm)
    yield brake
    brake.release()
