"""What a command imports, and what replaces torch if it is not imported."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import write_gguf
from safetensors.torch import save_file

from outpace.cli.main import COMMANDS
from outpace.core import arrays
from outpace.core.errors import UserError
from outpace.core.types import Request, Row
from outpace.models.files import reading
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config.rope import LinearScaling, Llama3Scaling, Rotation, Scaling, YarnScaling
from outpace.models.llama.native.runtime import NativeRopeTable
from outpace.models.llama.torch.rope_tables import Rotary
from outpace.rules.base import reduce_rows
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "huggingface_hub", "jinja2", "gguf", "ray", "fastapi", "matplotlib")
SCRIPT = f"""
import sys
from outpace.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("code", end.code, "loads", *[name for name in {HEAVY!r} if name in sys.modules])
"""


GENERATE = ["generate", "hello world", "--max-tokens", "12", "--raw"]


def loaded_by(arguments: Sequence[str], cache: Path) -> list[str]:
    """The heavy packages that a command of its own process has imported when it ends well."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    environment = os.environ | {"OUTPACE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("code 0 loads"), done.stderr
    return last.split()[3:]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["methods"]])
def test_help_and_lists_load_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    assert loaded_by(arguments, tmp_path) == []


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model's file, and the cache that holds what it is converted to."""
    folder = tmp_path_factory.mktemp("converted")
    model = str(write_gguf(folder / "tiny.gguf"))
    loaded_by([*GENERATE, "--target", model, "--draft", model], folder / "cache")
    return model, folder / "cache"


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "autoregressive"],
        pytest.param(["--draft", "none"], marks=pytest.mark.long),
        pytest.param(["--method", "speculative"], marks=pytest.mark.long),
        ["--method", "card", "--temperature", "0.8", "--seed", "3"],
        ["--temperature", "0.8", "--seed", "3", "--threads", "1"],
    ],
)
def test_text_by_the_native_runtime_loads_no_torch(options: list[str], converted: tuple[str, Path]) -> None:
    model, cache = converted
    pair = ["--target", model] + ([] if "--draft" in options else ["--draft", model])
    assert loaded_by([*GENERATE, *pair, *options], cache) == []


@pytest.mark.parametrize(
    "way",
    [
        "own",
        "confined",
        *(pytest.param(w, marks=pytest.mark.long) for w in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "set")),
    ],
)
def test_threads_are_torchs_number_before_torch_is_there(way: str) -> None:
    shown = "arrays.num_threads(), arrays.is_torch_loaded(), arrays.torch.get_num_threads()"
    code = f"from outpace.core import arrays; {{}}print({shown})"

    def run(before: str = "", **environment: str) -> list[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-c", code.format(before)]
        return subprocess.check_output(command, cwd=ROOT, env=kept | environment, text=True, timeout=100).split()

    if way == "confined" and not hasattr(os, "sched_setaffinity"):
        pytest.skip("processes cannot be confined to some cores here")
    if way in ("own", "confined"):
        first = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        own, is_loaded, real = run(first if way == "confined" else "")
        assert (own, is_loaded) == (real, "False")
    else:
        found = run("arrays.set_num_threads(1); ") if way == "set" else run(**{way: "1"})
        assert found == ["1", "False", "1"]


def test_a_core_that_runs_two_threads_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    for number in range(4):
        file = tmp_path / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{number % 2},{number % 2 + 2}\n")
    assert arrays._whole_cores(tmp_path) == 2
    assert arrays._whole_cores(tmp_path / "nowhere") == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3}, raising=False)
    assert arrays._whole_cores(tmp_path) == 1
    assert arrays._whole_cores(tmp_path / "nowhere") == 2


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_array_holds_what_the_tensor_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    odd, values = torch.ones(3, dtype=torch.uint8), torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    whole = torch.tensor([0.0, -0.0, 1e-40, 3e38 if dtype in (torch.float32, torch.float64) else 6e4])
    with checkpoint(tmp_path / "one", a_odd=odd, values=values.to(dtype), whole=whole.to(dtype)) as opened:
        for name in ("values", "whole"):
            array, tensor = opened.array(name), opened.tensor(name)
            assert array.dtype == np.float32
            assert array.shape == tuple(tensor.shape)
            assert array.tobytes() == tensor.float().numpy().tobytes()
    assert array.sum() > 0  # what was handed out outlives the file


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_array_that_is_not_finite_is_refused(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    values = torch.zeros(300, dtype=dtype)
    values[257] = value
    says = "is damaged: tensor 'values' holds values that are not finite"
    with checkpoint(tmp_path / "one", values=values) as opened, pytest.raises(UserError, match=says):
        opened.array("values")


def test_a_file_that_changed_after_it_was_checked_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "one" / "model.safetensors"
    with checkpoint(tmp_path / "one", values=torch.zeros(4)) as opened:
        file.write_bytes(b"\x10")
        with pytest.raises(UserError, match="tensor 'values' cannot be read"):
            opened.array("values")


@pytest.mark.parametrize("kind", reading.DTYPES)
def test_values_are_rounded_and_written_as_torch_does(kind: str, tmp_path: Path) -> None:
    dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    chance = torch.Generator().manual_seed(4)
    halves = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e-40, 6e-8, 65519.0])
    floats = torch.cat([halves, -halves, torch.randn(3000, generator=chance)])
    raw = reading.RawTensor.of(floats.numpy(), kind)
    assert raw.is_finite()
    assert torch.equal(torch.from_numpy(raw.float32()), floats.to(dtype).float())
    for value in (math.inf, math.nan):
        assert not reading.RawTensor.of(np.array([1.0, value], np.float32), kind).is_finite()
    tensors = {"b é": raw, "a": reading.RawTensor.of(np.ones((2, 3), np.float32), "F32")}
    kinds = {name: (tensor.kind, tensor.values.shape) for name, tensor in tensors.items()}
    reading.write_safetensors(tmp_path / "ours", kinds, lambda name: [tensors[name].values])
    save_file({"b é": floats.to(dtype), "a": torch.ones(2, 3)}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(
    "scaling",
    [None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 64), YarnScaling(4.0, 1.0, 32.0, 64, 1.1, True)],
)
def test_rope_tables_of_the_kernels_equal_those_of_torch(scaling: Scaling | None) -> None:
    """To one unit in the last place of each part, where torch rounds twice."""
    native = NativeRopeTable([64], [Rotation(1e5, scaling)])
    rotary = Rotary(64, Rotation(1e5, scaling), torch.device("cpu"))
    native.grow_to(5000)
    rotary.grow_to(5000)
    expected = torch.view_as_real(rotary(torch.arange(5000))).numpy()
    np.testing.assert_allclose(native.table[:5000], expected, rtol=0, atol=2.0**-23)
    grown = NativeRopeTable([64], [Rotation(1e5, scaling)])
    grown.grow_to(1)
    grown.grow_to(5000)
    assert grown.table.tobytes() == native.table.tobytes()


def rows(count: int, rule: Any) -> list[Row]:
    request = Request((1, 2), rule)
    return [Row(request, [1, 2, 3], (4,) * number, number) for number in range(count)]


@pytest.mark.parametrize("rule", [Greedy(), Gumbel()])
def test_arrays_are_reduced_as_tensors_are(rule: Any) -> None:
    scores = np.random.default_rng(5).standard_normal((6, 500)).astype(np.float32)
    some = rows(6, rule)
    assert reduce_rows(scores, some) == reduce_rows(torch.from_numpy(scores), some)
    penalised = [row._replace(request=replace(row.request, seed=9)) for row in some]
    assert reduce_rows(scores, penalised) == reduce_rows(torch.from_numpy(scores), penalised)


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; from outpace.cli.main import _run; _run(['methods'])\n"
        "print(*(name for name in sys.modules if name.startswith('outpace.cli.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    loaded = {name.removeprefix("outpace.cli.") for name in done.stderr.split()}
    assert loaded & set(COMMANDS) == {"methods"}
