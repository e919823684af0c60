"""`qsync demo`: compare all ways to train on two ranks of this machine, the second emulated."""

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
    """Return a demo's base. Raises UnsupportedError for one that this machine's fast rank lacks."""
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
    """Return the configuration of every rank. Raises QSyncError for invalid options."""
    # A turn's first step starts with all ranks aligned and is not timed: one step measures nothing.
    for name, value, least in (("--seeds", seeds, 1), ("--steps", steps, 2), ("--rounds", rounds, 1)):
        if value is not None and value < least:
            raise QSyncError(f"{name} must be at least {least}, found {value}; give a larger number")
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
    """Train a model in every way on two ranks of this machine; return figures.json's content.

    `base` is the fast rank's precision. Profiling runs `rounds` before training, and one every
    `turns_a_round` turns. Files in `out` are written atomically. Raises QSyncError for invalid options,
    before anything starts, and if a rank fails.
    """
    config = configured(
        workload=workload, data=data, out=out, seeds=seeds, seed=seed, steps=steps, rounds=rounds, base=base,
        turns_a_round=turns_a_round,
    )  # fmt: skip
    found: dict[str, Any] = run_on_ranks(run, {**config, "weak_share": weak_share}, command="demo")
    return found
