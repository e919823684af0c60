"""Two hosts as network namespaces, joined by a link that tc's token bucket paces in both directions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from qsync.errors import QSyncError, shortened

# Name, device and address of each host.
HOSTS = (("qsync-a", "qsync-va", "10.83.0.1"), ("qsync-b", "qsync-vb", "10.83.0.2"))
PACED_BY = "tc tbf between network namespaces"
_BURST_S, _LEAST_BURST_BYTES = 1e-3, 65536  # what the bucket holds, in seconds of the rate
_QUEUE = "100ms"  # longest time that a packet waits


@contextmanager
def two_hosts() -> Iterator[None]:
    """Join two namespaces by a cable, and remove them afterwards.

    Raises QSyncError without the rights to make them.
    """
    try:
        for name, _, _ in HOSTS:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", HOSTS[0][1], "type", "veth", "peer", "name", HOSTS[1][1])
        for name, device, address in HOSTS:
            _run("ip", "link", "set", device, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                _run("ip", "-n", name, "link", "set", each, "up")
        yield
    finally:
        for name, _, _ in HOSTS:
            with suppress(QSyncError):
                _run("ip", "netns", "del", name)


def pace(gigabits_per_s: float) -> None:
    """Let each host send no faster than this. Raises QSyncError where the kernel has no token bucket."""
    burst = max(_LEAST_BURST_BYTES, int(gigabits_per_s * 1e9 / 8 * _BURST_S))
    for name, device, _ in HOSTS:
        _run(
            "tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf",
            "rate", f"{int(gigabits_per_s * 1000)}mbit", "burst", str(burst), "latency", _QUEUE,
        )  # fmt: skip


def on_host(rank: int, command: list[str]) -> list[str]:
    """Return a command that runs on a host."""
    return ["nsenter", f"--net=/var/run/netns/{HOSTS[rank][0]}", *command]


def sent_bytes(rank: int) -> int:
    """Return the bytes that this process's host has sent over its link so far."""
    with open("/proc/net/dev", encoding="ascii") as file:
        for line in file:
            device, _, numbers = line.partition(":")
            if device.strip() == HOSTS[rank][1]:
                return int(numbers.split()[8])
    return 0


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = shortened(getattr(error, "stderr", "") or str(error), quote=False).strip()
        raise QSyncError(
            f"no paced link can be made here ({command[0]}: {why}); run as root, with iproute2 and a kernel "
            "that has network namespaces and the queue tbf"
        ) from error
