"""The choice of runtime and precision for a model, and the notice if it is not the fast one."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from files import model_folder, smollm2_file, write_gguf

from outpace.cli import doctor
from outpace.cli.main import main
from outpace.core import arrays
from outpace.core.arrays import num_cores
from outpace.core.errors import UserError
from outpace.models import runtimes
from outpace.models.base import UnsupportedModel
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_model
from outpace.models.options import FLOATS

PROMPT = "hello world 12 hello world 12 hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "int8"}, {"exact": True}, {"trust_remote_code": True}, {"runtime": "native"}], ids=str
)
def test_a_cpu_runs_the_native_runtime(folder: Path, options: dict[str, Any]) -> None:
    loaded = load_model(folder, **options)
    assert isinstance(loaded.model, NativeLlama)
    assert (loaded.precision, loaded.model.exact, loaded.notice) == ("int8", True, None)
    assert loaded.model.kv_dtype == "float16"


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_precisions_are_computed_by_torch(folder: Path, dtype: str) -> None:
    loaded = load_model(folder, dtype=dtype)
    assert isinstance(loaded.model, Llama)
    assert (loaded.precision, loaded.model.dtype) == (dtype, getattr(torch, dtype))
    assert loaded.notice is None


def test_a_process_without_the_kernels_ends_with_one_sentence() -> None:
    code = "import sys; sys.modules['outpace_kernels'] = None; from outpace.cli.main import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert said.startswith("error: outpace needs its native kernels (")
    assert said.endswith(f": {arrays.INSTALL_KERNELS}")


@pytest.mark.parametrize("found", ["0.1.0", "0.3.0", None])
def test_kernels_of_another_version_are_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(arrays, "version", version)
    said = (
        f"the native kernels are of version {found or 'unknown'}, this release needs {arrays.KERNELS_VERSION}: run `pip"
    )
    with pytest.raises(UserError, match=said):
        arrays.check_kernels()


def test_torch_runs_what_the_kernels_do_not_support(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, head_dim=514)
    loaded = load_model(folder)
    assert isinstance(loaded.model, Llama)
    said = "head_dim is 514, native kernels take even ones up to 512"
    assert loaded.notice == f"computed in float32 by torch: {said}"
    with pytest.raises(UserError, match=said):
        load_model(folder, dtype="int8")


@pytest.mark.parametrize(("error", "is_tried"), [(UnsupportedModel, True), (UserError, False)])
def test_transformers_tries_unsupported_models_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[UserError], is_tried: bool
) -> None:
    def refuse(*anything: Any) -> Any:
        raise error("no" if is_tried else "see --runtime transformers")

    def tried(*anything: Any) -> Any:
        raise LookupError

    monkeypatch.setattr(runtimes, "_own", refuse)
    monkeypatch.setattr(runtimes, "_transformers", tried)
    monkeypatch.setattr(runtimes, "require", lambda *anything: None)
    with pytest.raises(LookupError if is_tried else UserError):
        load_model(folder)


def test_the_own_reason_comes_first_if_transformers_refuses_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: Exception) -> Any:
        raise error

    monkeypatch.setattr(runtimes, "_own", lambda *anything: refuse(UnsupportedModel("ours")))
    monkeypatch.setattr(runtimes, "_transformers", lambda *anything: refuse(UserError("theirs")))
    with pytest.raises(UserError, match=r"^ours; theirs$"):
        load_model(folder)


def test_a_gguf_file_is_never_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_transformers", lambda *anything: pytest.fail("transformers was asked"))
    with pytest.raises(UserError, match="has the architecture 'gemma'; GGUF files are read of llama"):
        load_model(write_gguf(tmp_path / "tiny.gguf", architecture="gemma"))


def test_the_notice_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path, head_dim=514)
    with pytest.raises(SystemExit):
        main(["generate", PROMPT, "--target", str(folder), "--draft", str(folder), "--max-tokens", "2"])
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{folder} and {folder}: computed in float32 by torch" in shown
    assert shown.count("head_dim is 514") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runtime": "transformers", "dtype": "int8"}, "dtype int8 needs the runtime native"),
        ({"dtype": "int9"}, "unknown dtype 'int9', .*; did you mean 'int8'"),
        ({"dtype": "int3", "runtime": "native"}, "unknown dtype 'int3', allowed are auto, bfloat16, file, float16"),
        ({"dtype": "int4", "runtime": "llama"}, "dtype int4 needs the runtime native"),
        ({"dtype": "file", "runtime": "llama"}, "dtype file needs the runtime native"),
        ({"runtime": "native", "dtype": "float32"}, "float32 needs the runtime llama"),
    ],
)
def test_a_precision_that_a_runtime_lacks_is_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_model(folder, **options)


def test_more_threads_in_the_environment_than_cores_are_no_error(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_cores() + 3)
        assert load_model(folder).model.options.threads == num_cores()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", ["0", "-1", str(num_cores() + 1)])
def test_more_threads_than_cores_are_refused(folder: Path, threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generate", PROMPT, "--target", str(folder), "--threads", threads])
    assert end.value.code == 2
    allowed = f"it must be between 1 and {num_cores()}"
    assert f"error: threads is {threads}, {allowed}" in " ".join(capsys.readouterr().err.split())


def shown(found: dict[str, Any]) -> str:
    """Doctor's table in one line."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=1000)
    console.print(doctor._grid([*doctor._machine(found), *doctor._default_model(found["model"])]))
    return " ".join(console.file.getvalue().split())


@pytest.mark.smollm2
def test_doctor_reports_the_kernels_and_the_runtime() -> None:
    smollm2_file()
    found = doctor.collect()
    sets = list(arrays.kernels.instruction_sets())
    assert found["kernels"]["instruction_sets"] == sets
    assert (found["model"]["precision"], found["model"]["instruction_set"]) == ("file", sets[0])
    line = shown(found)
    assert f"native kernels {arrays.KERNELS_VERSION}, running {sets[0]}" in line
    assert f"computed in the file's own weights by {sets[0]}" in line
    assert "portable" in line


def test_doctor_measures_a_file_without_a_copy_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = write_gguf(tmp_path / "model.gguf"), tmp_path / "cache"
    monkeypatch.setattr("outpace.models.files.find.shipped_model", lambda: model)
    monkeypatch.setenv("OUTPACE_CACHE", str(cache))
    assert doctor.collect()["model"]["pass_seconds"] > 0
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_an_error_of_the_tokenizer_ends_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(source: object) -> None:
        raise UserError("no tokenizer")

    monkeypatch.setattr("outpace.models.text.tokenizer.tokenizer_of", failing)
    with pytest.raises(UserError, match="no tokenizer"):
        load_model(folder)
