"""Write a few tokens with a GGUF file in a pipeline whose ranks may each use less memory than the file has.

Run: python bench/pipeline_memory.py FILE.gguf [--plan 10,13,13] [--limit-mb 1300] [--tokens 6]
Each rank runs in a memory cgroup (version 1) of its own, so as root; the limit counts the file's pages too. The last
line is JSON; for each rank: MB of its layers' tensors in the file (`share`), peak resident MB (VmHWM), and MB read
from the disk, once the file's pages were dropped from the page cache. A rank of one layer shows what is constant.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from common import finish, parse, run
from gguf import GGUFReader

CGROUPS = Path("/sys/fs/cgroup/memory")
MB = 1e6


def of_process(file: str, name: str) -> int:
    """Return a number of this process from /proc."""
    [line] = [line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) * (1024 if line.endswith("kB") else 1)


def run_rank(args: argparse.Namespace) -> None:
    """Load and run one rank, and print its figures."""
    import atexit

    import outpace

    def report() -> None:
        found = {"peak": of_process("status", "VmHWM"), "read": of_process("io", "read_bytes")}
        print(json.dumps({name: round(value / MB) for name, value in found.items()}), flush=True)

    atexit.register(report)
    with outpace.load(args.file, None, pp_plan=args.plan, method="autoregressive", profile=False) as llm:
        result = llm.generate("hello there", max_tokens=args.tokens, temperature=0.0, ignore_eos=True)[0]
        assert len(result.tokens) == args.tokens


def shares(file: Path, counts: list[int]) -> list[int]:
    """Return the bytes of each rank's tensors; rank 0 holds those of no layer."""
    found, ends = [0] * len(counts), list(accumulate(counts))
    for tensor in GGUFReader(file).tensors:
        parts = tensor.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else 0
        found[next(rank for rank, end in enumerate(ends) if layer < end)] += int(tensor.n_bytes)
    return found


def main() -> int:
    """Run the command."""
    args = parse(__doc__, {"file": Path}, plan="10,13,13", limit_mb=1300.0, tokens=6, rank=int)
    if args.rank is not None:
        run_rank(args)
        return 0
    counts = [int(count) for count in args.plan.split(",")]
    held = shares(args.file, counts)
    with args.file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(counts))}
    groups = [CGROUPS / f"outpace-{os.getpid()}-{rank}" for rank in range(len(counts))]
    try:
        ranks = []
        for rank, group in enumerate(groups):
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(int(args.limit_mb * MB)))
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", sys.executable, *sys.argv]
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command += ["--rank", str(rank)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        said = [process.communicate()[0] for process in ranks]
        rows = [
            {"rank": rank, "share": round(share / MB)} | json.loads(out)
            for rank, (share, out) in enumerate(zip(held, said, strict=True))
        ]
    finally:
        for group in groups:
            with suppress(OSError):
                group.rmdir()
    found = {"limit": args.limit_mb, "file": round(args.file.stat().st_size / MB), "ranks": rows}
    return finish(found, False)


if __name__ == "__main__":
    run(main)
