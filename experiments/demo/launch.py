"""`qsync demo`: the main job on this machine. Starts two ranks through torchrun and shows what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsync.errors import QSyncError
from qsync.experiments.harness.processes import start_ranks
from qsync.experiments.workloads.subjects import demo_workload
from qsync.records.json_files import read_json


def run_demo(
    *,
    workload: str = "gpt",
    data: Path | None = None,
    out: Path = Path("demo-out"),
    weak_share: float = 0.5,
    seeds: int = 1,
    seed: int = 0,
    steps: int | None = None,
    rounds: int = 3,
) -> dict[str, Any]:
    """Train the same model in every alternative of the demo, on two ranks; return report.json's content.

    `rounds` of the profile are taken before training. Everything is written to `out`, each file whole or not
    at all. Raises QSyncError, before anything starts, for a workload, data, share, or number that cannot be
    used, and when a rank failed.
    """
    if not 0 < weak_share <= 1:
        raise QSyncError(
            f"--weak-share must lie in (0, 1], found {weak_share}; 0.5 gives the weak rank half of its core"
        )
    # The first step of a turn starts with all ranks aligned and is not a period: one step measures nothing.
    for name, value, least in (("--seeds", seeds, 1), ("--steps", steps, 2)):
        if value is not None and value < least:
            raise QSyncError(f"{name} must be at least {least}, found {value}")
    demo_workload(workload, data)
    out = Path(out).absolute()
    if out.exists() and not out.is_dir():
        raise QSyncError(f"--out {out} is a file; name a folder")
    config = {
        "workload": workload, "data": str(Path(data).absolute()) if data else None, "out": str(out),
        "weak_share": weak_share, "seeds": seeds, "seed": seed, "steps": steps, "rounds": rounds,
    }  # fmt: skip
    start_ranks("qsync.experiments.demo.rank", config, what="the demo's ranks")
    return read_json(out / "report.json")
