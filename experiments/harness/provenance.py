"""Record the origin of figures: machine, package versions, and commit of this source tree."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import qsync
from qsync.backend.devices.device_detection import machine
from qsync.records.json_files import check_folder

_PACKAGES = ("torch", "transformers", "apache-tvm", "numpy", "scipy")


def folder_of(out: Path) -> Path:
    """Return the folder of results. Raises FormatError if it is not writable."""
    check_folder("--out", out)
    return out


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Return the origin that every result file states, without its `source`."""
    return {"machine": machine(), "versions": versions(), "seed": seed}


def source() -> dict[str, Any]:
    """Return the commit of this source tree, and whether tracked files differ from it."""
    return {"commit": commit(), "uncommitted_changes": uncommitted_changes()}


def versions() -> dict[str, str | None]:
    """Return versions of qsync, Python and the numeric packages; None if not installed."""
    found: dict[str, str | None] = {"qsync": qsync.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """Return the commit of this source tree; `unknown` outside of a repository or without git."""
    return (_git("rev-parse", "--short", "HEAD") or "").strip() or "unknown"


def uncommitted_changes() -> bool | None:
    """Return whether tracked files differ from the commit; None without a repository or git."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes.strip())


def _git(*arguments: str) -> str | None:
    where = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout if done.returncode == 0 else None
