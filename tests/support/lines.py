"""Lines of Python in every room, beside what `[tool.qsync.lines]` of pyproject.toml allows.

python tests/support/lines.py
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("backend", "predictor", "replayer", "allocator", "experiments", "tests")


def allowed() -> dict[str, int]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["qsync"]["lines"]


def counted() -> dict[str, int]:
    """All lines of .py files, as `wc` counts them: by room, and of `qsync/` by folder."""
    lines: Counter[str] = Counter()
    for room in (*ROOMS, "qsync"):
        for folder, folders, files in os.walk(ROOT / room):
            folders[:] = [name for name in folders if not Path(folder, name).is_symlink()]
            parts = Path(folder).relative_to(ROOT).parts
            paths = [Path(folder, file) for file in files if file.endswith(".py")]
            lines["/".join(parts[:2]) if room == "qsync" else room] += sum(
                path.read_bytes().count(b"\n") for path in paths
            )
    return {name: number for name, number in sorted(lines.items()) if number}


if __name__ == "__main__":
    limits = allowed()
    for name, number in counted().items():
        print(f"{name:28}{number:>8,}{limits.get(name, 0):>8,}")
