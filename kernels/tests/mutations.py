"""Apply named mistakes (mistakes.py) to the kernels, one at a time; their own tests must fail for each.

Run `python kernels/tests/mutations.py [--only WORD] [--build FOLDER]` for the table; exit status 1 if a mistake
survives. It works on a copy of the sources and rebuilds the changed files: about ten seconds each on one core.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mistakes import MUTATIONS
from mutation import Mutation

KERNELS = Path(__file__).resolve().parents[1]
COPIED = ("CMakeLists.txt", "src", "tests")
SECONDS = 600.0  # a longer run counts as hanging


def judge(mutation: Mutation | None, root: Path, build: Path) -> tuple[bool, str]:
    """Return whether the tests fail with the mistake, and the failure. A compiler error does not count."""
    if mutation is None:
        made = compile_tests(build)
        return (False, made) if made else run(build)
    with mutation.applied(root):
        made = compile_tests(build)
        return (False, f"it does not compile: {made}") if made else run(build)


def compile_tests(build: Path) -> str | None:
    """Compile the tests; return the first error, or None."""
    done = subprocess.run(["cmake", "--build", str(build), "--parallel", "2"], capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "error" in line]
    return None if done.returncode == 0 else next(iter(errors), "no reason is given")


def run(build: Path) -> tuple[bool, str]:
    """Return whether the tests fail, and the failure."""
    try:
        done = subprocess.run([str(build / "test_kernels")], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return True, "hangs"
    if done.returncode == 0:
        return False, "no check notices it"
    said = done.stderr.strip().splitlines()
    return True, said[-1].removeprefix("failed: ") if said else f"ends with {done.returncode}"


def copy_changed(source: str, place: str) -> None:
    """Copy a file unless the copy is equal, so that only changed files are rebuilt."""
    data = Path(source).read_bytes()
    if not Path(place).is_file() or Path(place).read_bytes() != data:
        Path(place).write_bytes(data)


def copy_sources(root: Path) -> None:
    """Copy the sources to `root`, which may hold an earlier copy with its build."""
    root.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, place = KERNELS / name, root / name
        if source.is_dir():
            shutil.copytree(source, place, copy_function=copy_changed, dirs_exist_ok=True)
        else:
            copy_changed(str(source), str(place))


def set_directives(root: Path) -> Path:
    """SetDirectives a fast build of the copy; return its folder."""
    build = root / "build"
    options = ["-DOUTPACE_TESTS=ON", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
    subprocess.run(["cmake", "-S", str(root), "-B", str(build), *options], check=True, stdout=subprocess.DEVNULL)
    return build


def main() -> int:
    """Run the command; print a line per mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only mistakes whose name contains this")
    parser.add_argument("--build", type=Path, help="build folder (default: a temporary one)")
    asked = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if asked.only in mutation.name]
    with tempfile.TemporaryDirectory() as folder:
        root = asked.build or Path(folder)
        copy_sources(root)
        build = set_directives(root)
        fails, why = judge(None, root, build)
        if fails or why != "no check notices it":
            print(f"the kernels fail without a mistake: {why}")
            return 1
        survivors = 0
        for mutation in chosen:
            caught, by = judge(mutation, root, build)
            survivors += not caught
            print(f"{'caught  ' if caught else 'SURVIVES'}  {mutation.name}: {by}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mistakes are caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
