"""A wire between network namespaces: real TCP with a given delay, rate and interruptions. Linux, root only.

Each side is a process that calls `enter`; a thread of their parent carries packets between their TUN devices. The
namespaces end with their processes, so nothing is left behind. `Side` starts such a process of the same script.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

ADDRESSES = tuple(f"10.9.0.{number}" for number in range(1, 9))  # of the sides, known in their namespaces only
NAME = b"wire"
LOOK_SECONDS = 0.2  # longest sleep of the wire's thread
QUEUE_SECONDS = 1.0  # a packet that would wait longer for the rate is dropped
CLONE_NEWNET = 0x40000000
TUNSETIFF, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS = 0x400454CA, 0x8916, 0x891C, 0x8914
IFF_TUN, IFF_NO_PI, IFF_UP = 0x0001, 0x1000, 0x0001


def why_not() -> str | None:
    """Return why no wire can be built here, in a sentence; None if one can."""
    if subprocess.run([sys.executable, __file__], stderr=subprocess.DEVNULL).returncode == 0:
        return None
    return "a wire needs Linux, root, network namespaces and /dev/net/tun"


def enter(address: str) -> int:
    """Move this process, which must have one thread, into a network namespace whose only way out is a TUN device with
    this address; return the device's descriptor. OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", NAME, IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, host in ((NAME, address), (b"lo", "127.0.0.1")):
            for request, value in ((SIOCSIFADDR, host), (SIOCSIFNETMASK, "255.255.255.0")):
                fcntl.ioctl(
                    control, request, struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
                )
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", name, IFF_UP))
    return device


class Wire(AbstractContextManager["Wire"]):
    """Carries packets between TUN devices, which have the first of `ADDRESSES`, until the block ends.

    `delay`: seconds one way. `rate`: bytes per second from each side. While it `is_cut`, packets are lost. `num_bytes`:
    those sent by each side, with the headers of IP and TCP. All may change at any time.
    """

    def __init__(self, devices: Sequence[int], delay: float = 0.0, rate: float = math.inf) -> None:
        self.delay, self.rate, self.is_cut, self.num_bytes = delay, rate, False, [0] * len(devices)
        self._devices = tuple(devices)
        self._stopping = False
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        self._thread.join()
        for device in self._devices:
            os.close(device)

    def _carry(self) -> None:
        queues: tuple[deque[tuple[float, int, bytes]], ...] = tuple(deque() for _ in self._devices)
        receivers = {socket.inet_aton(host): device for host, device in zip(ADDRESSES, self._devices, strict=False)}
        free = [0.0] * len(queues)  # when the last packet has passed at `rate`
        while not self._stopping:
            due = min((queue[0][0] for queue in queues if queue), default=math.inf)
            pause = min(max(due - time.monotonic(), 0.0), LOOK_SECONDS)
            for device in select.select(self._devices, [], [], pause)[0]:
                side, packet, now = self._devices.index(device), os.read(device, 1 << 16), time.monotonic()
                passed = max(free[side], now) + len(packet) / self.rate
                receiver = receivers.get(packet[16:20])  # of IPv4
                if receiver is not None and not self.is_cut and passed < now + QUEUE_SECONDS:
                    free[side] = passed
                    self.num_bytes[side] += len(packet)
                    queues[side].append((passed + self.delay, receiver, packet))
            for queue in queues:
                while queue and queue[0][0] <= time.monotonic():
                    os.write(*queue.popleft()[1:])


class Side:
    """A process of the running script, in a namespace of its own if `address` is given, that answers lines by JSON."""

    def __init__(self, name: str, arguments: Sequence[str], address: str = "", **more: Any) -> None:
        """`python` and `env` in `more` are its interpreter and further environment variables."""
        ours, theirs = socket.socketpair()
        command = [more.get("python", sys.executable), sys.argv[0], *arguments, "--side", name]
        command += ["--address", address, "--socket", str(theirs.fileno())] if address else []
        env: Mapping[str, str] = os.environ | more.get("env", {})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [theirs.fileno()]}
        self._process = subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload]
        theirs.close()
        self.device = socket.recv_fds(ours, 1, 1)[1][0] if address else -1
        ours.close()

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, if any; return the next answer."""
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"a side ended at {line!r}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def join(args: Namespace) -> Callable[[dict[str, Any]], None]:
    """Enter the namespace of this side, if it has one; return the function that answers the parent. Whatever else is
    printed goes to stderr."""
    if args.address:
        with socket.socket(fileno=args.socket) as parent:
            socket.send_fds(parent, [b"device"], [enter(args.address)])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=replies, flush=True)


def lines() -> Iterator[str]:
    """Yield the lines that the parent sends."""
    while line := sys.stdin.readline().strip():
        yield line


if __name__ == "__main__":
    os.close(enter(ADDRESSES[0]))
