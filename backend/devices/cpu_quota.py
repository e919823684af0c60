"""Read the CPU time that a container's cgroups (versions 1 and 2) leave a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quota(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """Return the number of cores that this process's cgroups allow; None without a limit."""
    return min(_quotas(root, own), default=None)


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the cores allowed by each cgroup up to the root, where it sets a limit."""
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root if not controllers else root / "cpu"
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                # A container may name its cgroup as the host does, but see it as the root.
                if folder.is_relative_to(top):
                    yield from _quota_of(folder)


def _quota_of(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # cgroup version 2; "max" is not a number
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if int(quota) > 0:
            yield int(quota) / int(period)
