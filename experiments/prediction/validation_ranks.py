"""`qsync validate` and replay_error.py: the ranks that run random plans, and how they are started.

On one rank, or on two unequal ones as `qsync demo` has them (the second on half of its core where the machine
has no devices that differ).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

import qsync
from qsync.distributed import job, liveness
from qsync.errors import QSyncError
from qsync.experiments.demo.runs import FAST, WEAK
from qsync.experiments.harness.ranks import backend_of, leave, placed
from qsync.experiments.harness.training import make_optimizer
from qsync.experiments.workloads import subjects
from qsync.progress import shown_on_rank_zero
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.replayer.comparison import Validation

BUCKET_CAP_MB = 8.0


def run_validation(
    model: str,
    *,
    num_ranks: int = 2,
    num_plans: int = 8,
    turns: int = 3,
    seed: int = 0,
    weak_share: float = 0.5,
    out: Path = Path("validation"),
    plans: Mapping[str, Plan] | None = None,
) -> Validation:
    """Random plans of one of the experiments' models on real ranks of this machine; kept in `out`.

    Or the given plans, by name, of classes called as the demo calls them.

    Raises QSyncError for an unknown model, numbers that cannot be used, and when a rank failed.

    >>> run_validation("bert", num_ranks=2).median_error
    """
    subjects.subject(model, 1)
    if num_ranks not in (1, 2):
        raise QSyncError(f"--ranks must be 1 or 2, found {num_ranks}; more would share this machine's cores")
    if not 0 < weak_share <= 1:
        raise QSyncError(f"--weak-share must lie in (0, 1], found {weak_share}")
    for name, value in (("--plans", num_plans), ("--turns", turns)):
        if value < 1:
            raise QSyncError(f"{name} must be at least 1, found {value}")
    out = Path(out).absolute()
    if out.exists() and not out.is_dir():
        raise QSyncError(f"--out {out} is a file; name a folder")
    given = {name: plan.to_json() for name, plan in plans.items()} if plans else None
    config = {
        "model": model, "plans": given, "num_plans": num_plans, "turns": turns, "seed": seed,
        "weak_share": weak_share, "out": str(out),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--no-python", sys.executable, "-m", "qsync.experiments.prediction.validation_ranks", json.dumps(config),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode != 0:
        raise QSyncError(
            f"the ranks stopped with exit code {done.returncode}; the first message above says why"
        )
    return Validation.load(out / "validation.json")


def table(validation: Validation) -> Table:
    """One line per run: predicted, measured, the miss and what most of it is."""
    count = len(validation.comparisons)
    title = (
        f"{validation.model}, {count} random plans: replay misses by {validation.median_error:.1%} "
        f"(median), {validation.error_95:.1%} (95th percentile)"
    )
    shown = Table(title=title)
    for heading in ("run", "predicted (simulated)", "nine in ten", "measured", "miss", "of it most"):
        shown.add_column(heading, justify="left" if heading in ("run", "of it most") else "right")
    for one in validation.comparisons:
        interval = (
            "-" if one.interval_s is None
            else f"{one.interval_s[0] * 1e3:.1f} to {one.interval_s[1] * 1e3:.1f}"
        )  # fmt: skip
        device_class, cause, miss_s = one.cause
        shown.add_row(
            one.name, f"{one.predicted_s * 1e3:.1f} ms", interval, f"{one.measured_s * 1e3:.1f} ms",
            f"{one.error:+.1%}", f"{cause} on {device_class}, {miss_s * 1e3:+.1f} ms",
        )  # fmt: skip
    return shown


def kinds_table(validation: Validation, most: int = 12) -> Table:
    """Kinds of nodes by how much they add to the misses of all runs."""
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for one in validation.comparisons:
        for device_class, kinds in one.by_kind.items():
            for kind, (predicted, measured) in kinds.items():
                before = totals.get((device_class, kind), (0.0, 0.0))
                totals[device_class, kind] = (before[0] + predicted, before[1] + measured)
    shown = Table(title="By kind of node, over all runs")
    for heading in ("class", "kind", "predicted", "measured", "miss"):
        shown.add_column(heading, justify="left" if heading in ("class", "kind") else "right")
    order = sorted(totals.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    for (device_class, kind), (predicted, measured) in order[:most]:
        shown.add_row(
            device_class, kind, f"{predicted * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms",
            f"{(measured - predicted) * 1e3:+.1f} ms",
        )  # fmt: skip
    return shown


def assignments(plans: Mapping[str, Any] | None) -> dict[str, dict[str, Mapping[str, Precision]]] | None:
    """What plans, as JSON, assign to each class."""
    if plans is None:
        return None
    found = {name: Plan.from_json(plan) for name, plan in plans.items()}
    return {name: {c: of.assignment for c, of in plan.classes.items()} for name, plan in found.items()}


def main() -> None:
    """Entry point of a rank, with the configuration as JSON."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.setdefault("QSYNC_BACKEND", backend_of())
    rank = int(os.environ["RANK"])
    try:
        with placed(config["weak_share"]) as place:
            job.join_job(place.device, timeout_s=300.0)
            chosen = subjects.subject(config["model"])
            inputs, targets = chosen.batch(0, 0, rank)
            batch = (inputs.to(place.device), targets.to(place.device))
            share = place.throttle.measured_share(2.0) if place.throttle else None
            with liveness.start(60.0), shown_on_rank_zero("qsync: validating") as progress:
                qsync.validate(
                    chosen.make_model(0).to(place.device), batch,
                    lambda model, batch: chosen.loss_fn(model(batch[0]), batch[1]),
                    num_plans=config["num_plans"], turns=config["turns"], seed=config["seed"],
                    device_class=FAST if rank == 0 else WEAK, emulated_share=share,
                    make_optimizer=make_optimizer(chosen.lr), bucket_cap_mb=BUCKET_CAP_MB,
                    folder=config["out"], progress=progress, plans=assignments(config["plans"]),
                )  # fmt: skip
    except QSyncError as error:
        leave("validate", error)


if __name__ == "__main__":
    main()
