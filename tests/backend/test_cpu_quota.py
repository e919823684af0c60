"""A container's quota of CPU time: what it leaves a rank, and that ranks with and without differ."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qsync.backend.devices import device_detection
from qsync.backend.devices.cpu_quota import cpu_quota
from qsync.backend.devices.device_detection import detect_class
from qsync.distributed.job import detect_rank

CPU = torch.device("cpu")


def version_1(group: str, quota_us: int) -> dict[str, str]:
    """Return the files of a cgroup of version 1."""
    found = {"quota": quota_us, "period": 100_000}
    return {f"cpu/{group}/cpu.cfs_{name}_us": f"{number}\n" for name, number in found.items()}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/pod/a\n", {"pod/cpu.max": "150000 100000\n", "pod/a/cpu.max": "max 100000\n"}, 1.5),
        ("0::/pod/a\n", {"pod/cpu.max": "150000 100000\n", "pod/a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/a\n", {"cpu.max": "25000 50000\n"}, 0.5),  # the container sees its own cgroup as the root
        ("3:cpu,cpuacct:/a\n2:cpuset:/b\n", version_1("a", 40_000), 0.4),
        ("3:cpu,cpuacct:/a\n", version_1("a", -1), None),
        ("2:cpuset:/b\n", version_1("b", 40_000), None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_least_quota_on_the_way_to_the_root_counts(groups, files, cores, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(groups)
    assert cpu_quota(tmp_path, tmp_path / "own") == cores


def test_a_system_without_cgroups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("quota", "ranks", "share"), [(0.5, 1, 0.5), (1.0, 2, 0.5), (2.0, 2, None), (None, 1, None)]
)
def test_a_rank_of_one_thread_has_that_share_of_its_core(quota, ranks, share, monkeypatch):
    monkeypatch.setattr(device_detection, "cpu_quota", lambda: quota)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        own, plain = detect_class(CPU, ranks_on_host=ranks), detect_class(CPU, 1.0)
        assert own.emulated_share == share and own.hardware == plain.hardware
        assert ("quota-0-5" in own.name) is (share is not None)
        torch.set_num_threads(4)
        several = detect_class(CPU, ranks_on_host=ranks)
        assert several.emulated_share is None  # several threads are timed by the wall
        assert ("quota" in several.name) is (quota is not None)
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def cgroup(quota_us: int) -> Iterator[Path]:
    """Make a cgroup of this quota per 100 ms, or skip the test where that is not allowed."""
    folder = next((top for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if top.is_dir()), None)
    if folder is None:
        pytest.skip("this system has no cgroups")
    own = folder / f"qsync-test-{os.getpid()}"
    try:
        own.mkdir()
        if (own / "cpu.cfs_quota_us").exists():
            (own / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (own / "cpu.max").write_text(f"{quota_us} 100000")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield own
    finally:
        own.rmdir()


def test_a_process_in_a_real_cgroup_is_a_class_of_its_own():
    body = (
        "import os, sys, torch; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from qsync.distributed.job import detect_rank\n"
        "torch.set_num_threads(1); own = detect_rank(torch.nn.Linear(1, 1)).device_class\n"
        "print(own.emulated_share, own.name)"
    )
    with cgroup(40_000) as folder:
        done = subprocess.run(
            [sys.executable, "-c", body, str(folder)], capture_output=True, text=True, timeout=120, check=True
        )
    share, name = done.stdout.split()
    assert share == "0.4" and name.endswith("quota-0-4")
    assert "quota" not in detect_rank(torch.nn.Linear(1, 1)).device_class.name
