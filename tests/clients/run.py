"""Runs clients that others wrote against a real server, each in an environment of its own: `make test-clients`.

python tests/clients/run.py [NAME ...]   # all that there are, or those named

A client is a file here: the line that begins with `# needs:` names what its environment installs, and it is called with
the server's address. A client that asserts nothing wrong exits with 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "clients"
SECONDS = 900.0
STARTS = 120.0


def main() -> int:
    names = sys.argv[1:] or sorted(file.stem for file in HERE.glob("*.py") if file.stem != "run")
    server, address = started()
    try:
        failed = [name for name in names if not passes(name, address)]
    finally:
        server.terminate()
        code = server.wait(60)
    print(f"{len(names) - len(failed)} of {len(names)} clients passed; the server ended with status {code}")
    return 1 if failed or code else 0


def started() -> tuple[subprocess.Popen[str], str]:
    """A server of the shipped model on a port of its own."""
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found:
            break
    else:
        sys.exit("the server did not start")
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    log = (ENVIRONMENTS / "server.log").open("w")
    subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)
    end = time.monotonic() + STARTS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{found[0]}/ready", timeout=5):
                return server, found[0]
        except OSError:
            time.sleep(0.1)
    server.kill()
    sys.exit("the server is not ready")


def passes(name: str, address: str) -> bool:
    """Whether a client's script ends well."""
    file = HERE / f"{name}.py"
    python = environment(name, needs(file))
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")}
    settings = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    done = subprocess.run([python, file, address], env=kept | settings, timeout=SECONDS, check=False)
    said = "passes" if done.returncode == 0 else f"FAILS with status {done.returncode}"
    print(f"{name} {said} after {time.monotonic() - began:.1f} s", flush=True)
    return done.returncode == 0


def needs(file: Path) -> list[str]:
    """What a client's environment installs."""
    line = next(line for line in file.read_text().splitlines() if line.startswith("# needs:"))
    return line.removeprefix("# needs:").split()


def environment(name: str, packages: list[str]) -> Path:
    """The Python of an environment with these packages, made at the first use."""
    folder = ENVIRONMENTS / name
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists() or mark.read_text() != " ".join(packages):
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        mark.write_text(" ".join(packages))
    return python


if __name__ == "__main__":
    sys.exit(main())
