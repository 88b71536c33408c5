"""The Dockerfile and the compose file: files exist, options are valid, and the server does not run as root."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from outpace.server.options import ServerOptions

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]


def instructions(name: str) -> list[str]:
    return [rest for word, rest in INSTRUCTIONS if word == name]


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["outpace"]
    return found


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [name for line in instructions("COPY") if "--from" not in line for name in line.split()[:-1]]
    assert {"outpace", "kernels", "constraints.txt", "pyproject.toml"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert sorted(kept) == sorted(sources)
    assert any(fnmatch.fnmatch("kernels/build", line) for line in ignored)


def test_the_server_does_not_run_as_root() -> None:
    words = [word for word, _ in INSTRUCTIONS]
    last = words[len(words) - words[::-1].index("FROM") :]  # of the last stage
    assert instructions("USER")[-1] not in ("0", "root")
    assert last.index("USER") < last.index("ENTRYPOINT")
    assert "outpace-kernels" in (ROOT / "kernels" / "pyproject.toml").read_text()
    assert any("./kernels" in line for line in instructions("RUN"))


def test_the_command_is_valid() -> None:
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    words = shlex.split(" ".join([*re.findall(r'"([^"]*)"', entry), *re.findall(r'"([^"]*)"', command)]))
    assert words == ["outpace", *compose()["command"]]
    assert words[1] == "serve"
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= set(
        ServerOptions.__dataclass_fields__
    )


def test_the_composed_server_needs_a_key_and_has_a_health_check() -> None:
    service = compose()
    assert ":?" in service["environment"]["OUTPACE_API_KEY"]  # required
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "/health" in " ".join(service["healthcheck"]["test"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    (health,) = instructions("HEALTHCHECK")
    assert service["healthcheck"]["test"][-1] in health
