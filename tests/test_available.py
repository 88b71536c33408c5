"""What memory is free, and models that do not fit there: refused before they are loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files import model_folder, weights, write_gguf

from outpace.core.errors import UserError
from outpace.core.machine import available_bytes
from outpace.models import devices
from outpace.models.load import load_model

MIB = 1 << 20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def machine(root: Path, **files: str) -> Path:
    """Create a file system with these contents; `__` in a name is a slash."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def group(root: Path, folder: str, **files: int | str) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (root / folder / name.replace("__", ".")).write_text(f"{value}\n", encoding="ascii")


def test_a_container_and_its_parents_limit(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == 8_000_000 * 1024, "without one"
    root = machine(tmp_path, proc__self__cgroup="0::/a/b\n")
    group(root, "sys/fs/cgroup/a", memory__max=900 * MIB, memory__current=500 * MIB)
    group(root, "sys/fs/cgroup/a/b", memory__max="max", memory__current=200 * MIB)
    assert available_bytes(root) == 400 * MIB
    stat = f"anon 5\nfile 7\ninactive_file {90 * MIB}\nactive_file {10 * MIB}"
    group(root, "sys/fs/cgroup/a", memory__stat=stat)  # pages of files are given back when they are needed
    assert available_bytes(root) == 500 * MIB
    group(root, "sys/fs/cgroup/a/b", memory__max=250 * MIB)
    assert available_bytes(root) == 50 * MIB
    group(root, "sys/fs/cgroup/a/b", memory__current=260 * MIB)
    assert available_bytes(root) == 0


def test_groups_of_the_first_version_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup="5:cpu,memory:/c\n3:pids:/\n")
    stat = f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file 0"
    group(root, "sys/fs/cgroup/memory/c", memory__limit_in_bytes=100 * MIB, memory__usage_in_bytes=80 * MIB)
    group(root, "sys/fs/cgroup/memory/c", memory__stat=stat)
    assert available_bytes(root) == 50 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are read where Linux reports its size")
def test_a_process_has_limits_of_its_own() -> None:
    code = (
        "import resource; from outpace.core.machine import available_bytes;"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29)); print(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 1 << 29


SIZES = {
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.rope.dimension_count": 64,
}  # whole groups and panels: nothing is padded


def quantised(folder: Path) -> Path:
    tensors = weights(hidden_size=256, intermediate_size=256, num_attention_heads=4)
    return write_gguf(folder / "model.gguf", SIZES, "Q4_1", tensors=tensors)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of free bytes."""
    return lambda count: monkeypatch.setattr(devices, "free_bytes", lambda device: count)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"dtype": "file"}, "file"),
        ({"dtype": "int8"}, "int8"),
        ({}, "file"),
        ({"is_draft": True}, "file"),
        ({"dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_too_little_memory_is_an_error_before_loading(
    tmp_path: Path, free: Callable[[int], None], options: dict[str, Any], precision: str
) -> None:
    """The estimate is that of the weights' format, near the memory that they take."""
    path = quantised(tmp_path)
    model = load_model(path, **options).model
    assert model.precision == precision
    size = model.weight_bytes
    free(int(1.1 * size))
    load_model(path, **options)
    free(int(0.8 * size))
    with pytest.raises(UserError, match=r"needs about \d.\d GiB of memory, and \d.\d are free: choose a smaller"):
        load_model(path, **options)


def test_a_draft_in_four_bits_needs_half_as_much(tmp_path: Path, free: Callable[[int], None]) -> None:
    folder = model_folder(tmp_path, hidden_size=128, intermediate_size=256)
    free(int(1.1 * load_model(folder, is_draft=True).model.weight_bytes))
    assert load_model(folder, is_draft=True).precision == "int4"
    with pytest.raises(UserError, match="needs about"):
        load_model(folder, dtype="int8")
