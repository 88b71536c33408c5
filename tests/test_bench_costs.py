"""What benches cost: energy by counters of RAPL and NVML, and the peak memory of one model and of two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import last_line, run_command
from files import model_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import energy
from energy import EnergyMeter


def zone(folder: Path, name: str, title: str, used: int, most: int = 1000) -> Path:
    """Write a zone as Linux shows it; return the file of its counter."""
    (folder / name).mkdir(parents=True)
    for file, value in (("name", title), ("energy_uj", used), ("max_energy_range_uj", most)):
        (folder / name / file).write_text(f"{value}\n")
    return folder / name / "energy_uj"


def test_packages_are_summed_and_counters_may_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    first = zone(tmp_path, "intel-rapl:0", "package-0", 990)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 5)
    zone(tmp_path, "intel-rapl:0:0", "core", 7).unlink()  # would fail, if it were read
    zone(tmp_path, "intel-rapl:2", "psys", 7).unlink()
    meter = EnergyMeter("cpu")
    assert meter.description == "RAPL package-0, RAPL package-1"
    assert meter.spent() == 0
    first.write_text("20\n")  # 31 later: 1000 is followed by 0
    second.write_text("9\n")
    assert meter.spent() == pytest.approx(35e-6)
    assert meter.spent() == 0


def test_without_counters_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device, reason in (("cpu", ""), ("cuda:0", "; NVML does not work")):
        meter = EnergyMeter(device)
        assert meter.spent() is None
        assert f"no RAPL counter in {tmp_path} can be read{reason}" in meter.description


def test_a_gpu_is_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    used = iter([1000, 1000, 3500])
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-7": next(used)}[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    properties = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid="7"))
    monkeypatch.setattr(energy, "torch", SimpleNamespace(cuda=properties))
    meter = EnergyMeter("cuda:0")
    assert meter.description.startswith("NVML cuda:0")
    assert meter.spent() == pytest.approx(2.5)


def test_a_bench_reports_peak_memory(tmp_path: Path) -> None:
    target = model_folder(tmp_path, "target")
    draft = model_folder(tmp_path, "draft", intermediate_size=262144)  # 100 MB in int8
    asked = [*("--target", str(target), "--draft", str(draft), "--tasks", task(tmp_path)), *("--max-tokens", "8")]
    method = "speculative:drafter=model"
    code, out, err = run_command(
        "bench", *asked, "--methods", f"{method},card:drafter=model,worker=process", "--memory", "--json"
    )
    assert code == 0, err
    rows = {row["method"]: row for row in last_line(out)["rows"]}
    plain, *others = (row["peak_memory"][0] for row in rows.values())
    assert all(other > plain + 50e6 for other in others)


def task(folder: Path) -> str:
    """Write a file of two prompts; return its name."""
    (folder / "asked.jsonl").write_text("".join(json.dumps({"turns": [f"hello {n}"]}) + "\n" for n in range(2)))
    return str(folder / "asked.jsonl")


def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.peer._CODE", "raise SystemExit(3)")
    target = model_folder(tmp_path, "target")
    asked = ["--target", str(target), "--tasks", task(tmp_path), "--max-tokens", "4", "--memory"]
    code, out, err = run_command("bench", *asked, "--methods", "autoregressive", "--json")
    assert code == 0, "the speeds are kept"
    assert "the memory of autoregressive was not measured (PeerProcessError: its process ended with status 3)" in err
    assert last_line(out)["rows"][0]["peak_memory"] is None
