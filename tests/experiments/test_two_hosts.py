"""Two hosts as network namespaces, with addresses and a CPU quota of their own, over real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsync.experiments.mixed.ways import ALONE, DDP, QSYNC_SHARE

pytestmark = [pytest.mark.dist, pytest.mark.deep, pytest.mark.timeout(600)]
_QUOTA = Path("/sys/fs/cgroup/cpu/qsync-test-host")
_HOSTS = (("qsync-a", "qsync-va", "10.83.0.1"), ("qsync-b", "qsync-vb", "10.83.0.2"))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces joined by a cable; the second host has half a core."""
    try:
        for name, _, _ in _HOSTS:
            ip("netns", "add", name)
        ip("link", "add", _HOSTS[0][1], "type", "veth", "peer", "name", _HOSTS[1][1])
        for name, device, address in _HOSTS:
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                ip("-n", name, "link", "set", each, "up")
        _QUOTA.mkdir()
        (_QUOTA / "cpu.cfs_quota_us").write_text("50000")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces and quotas can be made here: {error}")
    finally:
        for name, _, _ in _HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        if _QUOTA.is_dir():
            _QUOTA.rmdir()


def start(rank: int, out: Path) -> subprocess.Popen[str]:
    """Start the one rank of a host as its user would; the second one in its cgroup."""
    name, device, _ = _HOSTS[rank]
    command = [
        "nsenter", f"--net=/var/run/netns/{name}", sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank), "--master-addr", _HOSTS[0][2],
        "--master-port", "29555", "-m", "qsync.experiments.mixed", "--model", "resnet-small",
        "--steps", "4", "--rounds", "1", "--out", str(out),
    ]  # fmt: skip
    joined = (lambda: (_QUOTA / "cgroup.procs").write_text(str(os.getpid()))) if rank else None
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=joined,
    )  # fmt: skip


def test_every_way_is_trained_on_two_hosts_and_the_quota_makes_a_class(hosts, tmp_path):
    outs = [tmp_path / "first", tmp_path / "second"]
    processes = [start(rank, out) for rank, out in enumerate(outs)]
    said = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    content = json.loads((outs[0] / "figures.json").read_text())
    assert {ALONE, DDP, QSYNC_SHARE} <= content["runs"].keys() and not outs[1].exists()
    assert content["parameters_identical_across_ranks"] is True
    strong, weak = content["ranks"]
    assert weak == f"{strong}-quota-0-5" and content["emulated_share"] == {weak: 0.5}
    assert "samples per second, predicted:" in said[0] and "samples per second" not in said[1]
