"""One thread a test: tiny products gain nothing from more. Where a test has more of them, they sleep while they wait:
threads that spin take the processor from the tests beside them, and tiny products are nearly all waiting."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, and by the processes that tests start

import pytest
import torch

from outpace.core.available import available_bytes
from outpace.rules import gumbel

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with interrupts ignored


@pytest.fixture(autouse=True, scope="session")
def _profiles_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a planner learns from a test is no use to the user whose machine runs it."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.engine.profile.cache_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _memory_asked_once() -> Iterator[None]:
    """Each engine asks how much memory is free, which takes as long as three rounds of a toy's: the first answer serves
    all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.engine.memory.available_bytes", cache(available_bytes))
        yield


@pytest.fixture(autouse=True, scope="session")
def _noise_made_once() -> Iterator[None]:
    """A row of noise follows from its key, and takes sixty operations of torch, which is a third of a sampled text of a
    toy: draft and target, plain decoding and each method ask for the same rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("exponential", "gumbel"):
            patch.setattr(gumbel, name, _by_rows(getattr(gumbel, name)))
        yield


def _by_rows(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Remembers each row for a toy's few tokens; a model's many are made anew."""
    row = lru_cache(1 << 14)(lambda key, vocab: make([key], vocab)[0])

    def made(keys: Sequence[int], vocab: int, device: Any = "cpu") -> torch.Tensor:
        if vocab > 64 or not keys or str(device) != "cpu":
            return make(keys, vocab, device)
        return torch.stack([row(key, vocab) for key in keys])

    return made
