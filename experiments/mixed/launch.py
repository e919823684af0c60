"""`qsync demo`: the comparison on this machine, on two ranks, the second one emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qsync import Precision, QSyncError, backend
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.mixed.rank import run
from qsync.experiments.workloads.subjects import demo_workload
from qsync.records.base import bases_of, check_base, parse_base


def known_base(base: str) -> Precision:
    """Return the base of a demo; UnsupportedError for one that this machine's fast rank lacks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = bases_of(device.type, backend.select(device).precisions())
    found = parse_base(base)
    check_base(found, known)
    return found


def configured(
    *,
    workload: str,
    data: Path | None,
    out: Path,
    seeds: int,
    seed: int,
    steps: int | None,
    rounds: int,
    base: str,
    turns_a_round: int = 2,
) -> dict[str, Any]:
    """Return what every rank is told. Raises QSyncError for a workload, data, base or number of no use."""
    # The first step of a turn starts with all ranks aligned and is not a period: one step measures nothing.
    for name, value, least in (("--seeds", seeds, 1), ("--steps", steps, 2), ("--rounds", rounds, 1)):
        if value is not None and value < least:
            raise QSyncError(f"{name} must be at least {least}, found {value}")
    demo_workload(workload, data)
    return {
        "workload": workload, "data": str(Path(data).absolute()) if data else None, "out": str(out),
        "seeds": seeds, "seed": seed, "steps": steps, "rounds": rounds, "base": str(known_base(base)),
        "turns_a_round": turns_a_round,
    }  # fmt: skip


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
    base: str = "fp32",
    turns_a_round: int = 2,
) -> dict[str, Any]:
    """Train the same model in every way on two ranks of this machine; return the content of figures.json.

    `base` is what the fast rank runs in. `rounds` of the profile are taken before training, and one every
    `turns_a_round` turns of the ways. Everything is written to `out`, each file whole or not at all. Raises
    QSyncError, before anything starts, for a workload, data, share, base or number that cannot be used, and
    when a rank failed.
    """
    config = configured(
        workload=workload, data=data, out=out, seeds=seeds, seed=seed, steps=steps, rounds=rounds, base=base,
        turns_a_round=turns_a_round,
    )  # fmt: skip
    found: dict[str, Any] = run_on_ranks(run, {**config, "weak_share": weak_share}, command="demo")
    return found
