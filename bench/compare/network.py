"""A network on one machine: namespaces whose TCP connections have a limited rate and an added latency.

    namespace 0                     this program                     namespace 1
    10.77.0.1, device gf ──tbf──▶ packets, each for `delay` seconds ──▶ 10.77.0.2, device gf

Each namespace has a TUN device, at which `tc tbf` limits the rate of what its processes send. This module,
run as a program, makes the namespaces and carries packets between them. When it ends, no process is left in
them, and the system removes them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.measure import ROOT

DEVICE = "gf"
_MTU = 9000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class NoNetworkError(Exception):
    """This machine cannot make the network; the message says why."""


@dataclass(frozen=True)
class Host:
    """One namespace of a network.

    Attributes:
        path: the path of the namespace, as long as the network is there.
        address: its address.
    """

    path: str
    address: str

    def enter(self) -> None:
        """Moves the calling thread, and threads that it makes later, into the namespace, for good."""
        with open(self.path) as file:
            _check(ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


@contextlib.contextmanager
def network(size: int, delay: float = 0.0, megabits: float | None = None) -> Iterator[list[Host]]:
    """Makes a network of several hosts.

    Args:
        size: the number of hosts.
        delay: seconds that are added to the way of each packet, in each direction.
        megabits: the rate at which each host sends, in Mbit/s; None for no limit.

    Raises:
        NoNetworkError: the machine has no namespaces, or this process may not make them.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NoNetworkError(f"network namespaces need the program {program!r}, of iproute2")
    if not os.path.exists("/dev/net/tun") or os.geteuid() != 0:
        raise NoNetworkError("network namespaces need a process of root, and /dev/net/tun")
    arguments = [f"--size={size}", f"--delay={delay}", *([f"--megabits={megabits}"] if megabits else [])]
    relay = subprocess.Popen(
        [sys.executable, "-m", "bench.compare.network", *arguments],
        stdin=subprocess.PIPE,  # which ends with this process
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert relay.stdout is not None
        assert relay.stderr is not None
        namespaces = relay.stdout.readline().split()
        if len(namespaces) != size:
            raise NoNetworkError(f"no network namespaces: {relay.stderr.read().strip().splitlines()[-1]}")
        yield [Host(f"/proc/{relay.pid}/fd/{fd}", _address(i)) for i, fd in enumerate(namespaces)]
    finally:
        relay.kill()
        relay.communicate()


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _make_namespace(index: int, megabits: float | None) -> tuple[int, int]:
    """Moves this process into a new namespace, and returns the descriptors of it and its device."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET), "unshare")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    commands = [
        "ip link set lo up",
        f"ip address add {_address(index)}/24 dev {DEVICE}",
        f"ip link set {DEVICE} up mtu {_MTU} txqueuelen 10000",
    ]
    if megabits:
        # The burst is what is sent in 4 ms, the period of the slowest kernel timers.
        burst = max(4 * _MTU, int(megabits * 1e6 / 8 * 0.004))
        commands.append(f"tc qdisc add dev {DEVICE} root tbf rate {megabits}mbit burst {burst} limit 100mb")
    for command in commands:
        subprocess.run(command.split(), check=True, stderr=sys.stderr)
    return namespace, device


def _carry(devices: Sequence[int], delay: float) -> None:
    """Carries packets between devices until the standard input ends."""
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    stdin = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, receiver, packet = under_way.popleft()
            with contextlib.suppress(BlockingIOError):  # lost, as on the way of any network
                os.write(receiver, packet)
        left = under_way[0][0] - now if under_way else None
        readable, _, _ = select.select([stdin, *devices], [], [], left)
        if stdin in readable:
            return
        due = time.monotonic() + delay
        for device in readable:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(device, _MTU):
                    index = packet[19] - 1  # the last byte of the receiver's IPv4 address
                    if packet[0] >> 4 == 4 and 0 <= index < len(devices):
                        under_way.append((due, devices[index], packet))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--megabits", type=float)
    arguments = parser.parse_args()
    made = [_make_namespace(index, arguments.megabits) for index in range(arguments.size)]
    print(*(namespace for namespace, _ in made), flush=True)
    _carry([device for _, device in made], arguments.delay)


if __name__ == "__main__":
    main()
