"""`qsync validate` and replay_error.py: the ranks that run random plans, and how they are started.

On one rank, or on two unequal ones as `qsync demo` has them (the second on half of its core where the machine
has no devices that differ).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

import qsync
from qsync import QSyncError
from qsync.distributed.monitoring import liveness
from qsync.experiments.harness import table_of
from qsync.experiments.harness.ranks import BUCKET_CAP_MB, FAST, WEAK, Place, run_on_ranks
from qsync.experiments.workloads import subjects
from qsync.experiments.workloads.workload import make_optimizer
from qsync.progress import shown_on_rank_zero
from qsync.replayer.explanation.comparison import Validation

_MAX_KINDS_SHOWN = 12


def run_validation(
    model: str,
    *,
    num_ranks: int = 2,
    num_plans: int = 8,
    turns: int = 3,
    seed: int = 0,
    weak_share: float = 0.5,
    out: Path = Path("validation"),
) -> Validation:
    """Run random plans of one of the experiments' models on real ranks of this machine; keep them in `out`.

    Raises QSyncError for an unknown model, numbers that cannot be used, and when a rank failed.
    """
    subjects.subject(model, 1)
    if num_ranks not in (1, 2):
        raise QSyncError(f"--ranks must be 1 or 2, found {num_ranks}; more would share this machine's cores")
    for name, value in (("--plans", num_plans), ("--turns", turns)):
        if value < 1:
            raise QSyncError(f"{name} must be at least 1, found {value}")
    config = {
        "model": model, "num_plans": num_plans, "turns": turns, "seed": seed, "weak_share": weak_share,
        "out": str(out),
    }  # fmt: skip
    run_on_ranks(validate, config, command="validate", num_ranks=num_ranks)
    return Validation.load(Path(out) / "validation.json")


def table(validation: Validation) -> Table:
    """Return one line per run: predicted, measured, the miss and its largest part."""
    title = (
        f"{validation.model}, {len(validation.comparisons)} random plans: replay misses by "
        f"{validation.median_error:.1%} (median), {validation.error_95:.1%} (95th percentile)"
    )
    # "exposed": communication with nothing left to compute, predicted / measured.
    headings = ("run", "predicted (simulated)", "nine in ten", "measured", "miss", "of it most", "exposed")
    rows = []
    for one in validation.comparisons:
        low_high = one.interval_s and tuple(f"{1e3 * end:.1f}" for end in one.interval_s)
        device_class, cause, miss_s = one.cause
        rows.append([
            one.name, _ms(one.predicted_s), " to ".join(low_high) if low_high else "-", _ms(one.measured_s),
            f"{one.error:+.1%}", f"{cause} on {device_class}, {miss_s * 1e3:+.1f} ms",
            " / ".join(_ms(seconds) for seconds in one.exposed_s) if one.exposed_s else "-",
        ])  # fmt: skip
    return table_of(title, headings, rows)


def kinds_table(validation: Validation) -> Table:
    """Return the kinds of nodes by how much they add to the misses of all runs."""
    totals: dict[tuple[str, str], list[float]] = {}
    for one in validation.comparisons:
        for device_class, kinds in one.by_kind.items():
            for kind, found in kinds.items():
                before = totals.setdefault((device_class, kind), [0.0, 0.0])
                before[:] = (a + b for a, b in zip(before, found, strict=True))
    rows = [
        [*key, _ms(predicted), _ms(measured), f"{(measured - predicted) * 1e3:+.1f} ms"]
        for key, (predicted, measured) in sorted(totals.items(), key=lambda of: -abs(of[1][1] - of[1][0]))
    ]
    headings = ("class", "kind", "predicted", "measured", "miss")
    return table_of("By kind of node, over all runs", headings, rows[:_MAX_KINDS_SHOWN], left=2)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def validate(config: dict[str, Any], place: Place) -> None:
    """Run the plans on one rank; everything is written to the folder."""
    rank = dist.get_rank()
    chosen = subjects.subject(config["model"])
    inputs, targets = chosen.batch(0, 0, rank)
    with liveness.start(60.0), shown_on_rank_zero("qsync: validating") as progress:
        qsync.validate(
            chosen.make_model(0).to(place.device), (inputs.to(place.device), targets.to(place.device)),
            chosen.loss, num_plans=config["num_plans"], turns=config["turns"], seed=config["seed"],
            device_class=FAST if rank == 0 else WEAK, emulated_share=place.measured_share(),
            make_optimizer=make_optimizer(chosen.lr), bucket_cap_mb=BUCKET_CAP_MB,
            folder=config["out"], progress=progress,
        )  # fmt: skip
