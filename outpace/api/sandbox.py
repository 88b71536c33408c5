"""Runs a program written by a model in a child process that can only compute, read files and end.

The child is limited to `SECONDS` and `MEMORY`. A seccomp filter allows no system call that opens a socket, writes,
moves or deletes a file, or starts or signals a process. The child inherits no environment and its output is discarded.
This works on Linux on x86-64 and arm64; elsewhere no program is run. The child runs this file, which therefore imports
the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

SECONDS = 5.0
MEMORY = 1 << 30  # bytes of address space
PASSED = 77  # exit status of a program that ran to its end; one that calls exit() has another
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050001, 0x7FFF0000  # what a filter returns; _REFUSE: EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # a filter's instructions
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x5451)  # allowed ioctl requests: TCGETS, TIOCGWINSZ, FIOCLEX


class SystemCalls(NamedTuple):
    """An architecture's system call numbers; `opens` lists calls that open files, with the argument of their flags."""

    audit: int
    allowed: Sequence[int]
    opens: Sequence[tuple[int, int]]
    ioctl: int


# read write close stat fstat lstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64
# readv writev access sched_yield mremap madvise dup nanosleep getpid exit uname fcntl getcwd readlink gettimeofday
# getrusage sysinfo times getuid getgid geteuid getegid sigaltstack gettid time futex sched_getaffinity getdents64
# restart_syscall clock_gettime clock_getres clock_nanosleep exit_group newfstatat readlinkat faccessat
# set_robust_list getrandom membarrier statx rseq faccessat2
_X86 = (
    "0 1 3 4 5 6 8 9 10 11 12 13 14 15 17 19 20 21 24 25 28 32 35 39 60 63 72 79 89 96 98 99 100 102 104 107 108 131"
    " 186 201 202 204 217 219 228 229 230 231 262 267 269 273 318 324 332 334 439"
)
_ARM = (  # the same calls, as far as they exist
    "17 23 25 48 57 61 62 63 64 65 66 67 78 79 80 93 94 98 99 101 113 114 115 123 124 128 132 134 135 139 153 160 165"
    " 169 172 174 175 176 177 178 179 214 215 216 222 226 233 278 283 291 293 439"
)
CALLS = {
    "x86_64": SystemCalls(0xC000003E, tuple(map(int, _X86.split())), ((2, 1), (257, 2)), 16),
    "aarch64": SystemCalls(0xC00000B7, tuple(map(int, _ARM.split())), ((56, 2),), 29),
}


def is_available() -> bool:
    """Whether the sandbox works here: a trivial program must end and a socket must be refused."""
    return runs_to_end("pass") and not runs_to_end("import socket\nsocket.socket()")


def runs_to_end(program: str, seconds: float = SECONDS) -> bool:
    """Whether a Python program runs to its end within this time, both elapsed and of a processor."""
    command = [sys.executable, "-I", "-S", __file__, str(max(1, round(seconds)))]
    try:
        done = subprocess.run(
            command,
            input=program.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            start_new_session=True,
            env={},
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == PASSED


def seccomp_filter(calls: SystemCalls) -> bytes:
    """Return the BPF program: instructions of 8 bytes, (code, jump if true, jump if false, value)."""
    made = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, calls.audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in calls.allowed:
        made += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, place in calls.opens:
        made += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * place), (_ANY_BIT, 0, 1, _WRITING)]
        made += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    made += [(_EQUAL, 0, 2 + 2 * len(_IOCTL_REQUESTS), calls.ioctl), (_LOAD, 0, 0, 24)]
    for request in _IOCTL_REQUESTS:
        made += [(_EQUAL, 0, 1, request), (_RETURN, 0, 0, _ALLOW)]
    made += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *each) for each in made)


def confine(seconds: int) -> None:
    """Confine this process irrevocably; OSError if the system does not support it."""
    calls = CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        raise OSError(f"no filter for {sys.platform} on {platform.machine()}")
    import resource  # Unix only

    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    made = seccomp_filter(calls)
    kept = ctypes.create_string_buffer(made, len(made))
    described = struct.pack("HxxxxxxQ", len(made) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, described, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Run the child: confine it, then execute the program read from standard input."""
    program = sys.stdin.buffer.read().decode("utf-8")
    sys.dont_write_bytecode = True
    sys.argv[1:], seconds = [], int(sys.argv[1])
    try:
        confine(seconds)
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except BaseException:
        os._exit(1)
    os._exit(PASSED)


if __name__ == "__main__":
    main()
