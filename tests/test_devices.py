"""Unsupported options of a device raise errors before anything is loaded, with a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from files import model_folder

import outpace
from outpace.core.errors import UserError
from outpace.distill.train import has_fast_bfloat16
from outpace.engine.build import choose_method
from outpace.models import devices, runtimes
from outpace.models.files.find import open_source
from outpace.models.load import Loaded, load_model
from outpace.models.options import LoadOptions


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a GiB free and without bfloat16."""

    def check(device: str) -> None:
        if torch.device(device).index not in (None, 0):
            raise UserError(f"device {device!r} is not available here, allowed are cpu, cuda:0")

    monkeypatch.setattr(devices, "check_device", check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))


def test_bfloat16_is_chosen_for_each_gpu_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has it and is the current one, the second is older."""
    current = [0]

    @contextmanager
    def chosen(device: Any) -> Iterator[None]:
        before = current[0]
        current[0] = before if device is None else torch.device(device).index or 0
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current == [0])
    found = [LoadOptions(device=device).torch_dtype for device in ("cuda", "cuda:0", "cuda:1")]
    assert found == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert LoadOptions(device_map="auto").torch_dtype == torch.bfloat16
    assert LoadOptions(device="cuda", dtype="float16").torch_dtype == torch.float16
    assert LoadOptions().torch_dtype == torch.float32
    assert [has_fast_bfloat16(torch.device("cuda", number)) for number in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:1"}, "device 'cuda:1' is not available here, allowed are cpu, cuda:0"),
        ({"device": "cuda", "dtype": "file"}, "dtype file runs on a CPU, not on cuda"),
        ({"device": "cuda", "dtype": "int8"}, "dtype int8 runs on a CPU, not on cuda: use bfloat16, float16 or"),
        ({"device": "cuda", "dtype": "bfloat16"}, "cuda cannot compute in bfloat16: use float16 or float32"),
        ({"device": "cuda", "exact": True, "graphs": "off"}, "exact mode on CUDA needs graphs"),
        ({"graphs": "cuda"}, "graphs cuda needs a device of CUDA, not cpu"),
    ],
    ids=str,
)
def test_options_that_a_device_does_not_support_are_refused(
    one_gpu: None, options: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        devices.check_options(LoadOptions(**options))


def test_a_second_device_is_checked_before_the_target_is_loaded(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runtimes, "open_model", lambda *_: pytest.fail("it was loaded"))
    folder = model_folder(tmp_path)
    with pytest.raises(UserError, match="'cuda:1' is not available"):
        outpace.load(folder, folder, device="cuda", draft_device="cuda:1")


def test_weights_that_do_not_fit_on_a_gpu_are_refused(one_gpu: None, tmp_path: Path) -> None:
    options = LoadOptions(device="cuda", dtype="float16")
    with open_source(model_folder(tmp_path)) as source:
        config = source.read_config()
        wide = replace(config, vocab_size=10_000_000)
        devices.check_memory(source, config, options, None, range(config.num_layers))
        with pytest.raises(UserError, match=r"needs about 1\.\d GiB of memory, and 1\.0 are free"):
            devices.check_memory(source, wide, options, None, range(config.num_layers))


@pytest.mark.parametrize(
    ("runtime", "says"), [("native", "graphs eager is for the runtime llama"), ("transformers", "leave it out")]
)
def test_other_runtimes_and_unknown_graphs_are_refused(tmp_path: Path, runtime: str, says: str) -> None:
    with pytest.raises(UserError, match="unknown graphs 'on'"):
        LoadOptions(graphs="on")
    with pytest.raises(UserError, match=says):
        load_model(model_folder(tmp_path), runtime=runtime, graphs="eager")


def test_a_draft_on_the_cpu_of_a_target_on_a_gpu_is_native(tmp_path: Path) -> None:
    of_draft = LoadOptions(device="cuda", graphs="cuda", draft_device="cpu").of_draft()
    assert of_draft == LoadOptions()
    assert load_model(model_folder(tmp_path), of_draft).model.instruction_set is not None


@pytest.mark.parametrize(
    ("target", "draft", "method"),
    [
        ("cpu", torch.device("cpu"), "auto"),
        (torch.device("cuda:0"), "cpu", "auto"),
        (torch.device("cuda:0"), torch.device("cuda:1"), "planned"),
        (torch.device("cuda:0"), torch.device("cuda:0"), "auto"),
        (torch.device("cpu"), None, "auto"),
    ],
)
def test_auto_means_planned_if_the_draft_has_its_own_gpu(target: Any, draft: Any, method: str) -> None:
    """Runtimes name their devices by torch's objects or by strings, which are never equal."""
    models = [Loaded(SimpleNamespace(device=device), None, "") for device in (target, draft)]
    assert choose_method(models[0], models[1], "auto") == method
