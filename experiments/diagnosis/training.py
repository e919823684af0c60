"""Run one rank of a faulty job: `python -m qsync.experiments.diagnosis.training CONFIG`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync.backend.devices.emulation import pin_to_core
from qsync.distributed.monitoring.drift_monitor import (
    LASTING_S,
    STEPS_PER_COMPARISON,
    Monitor,
    monitors,
    prediction_of,
)
from qsync.experiments.diagnosis.faults import FAULTS
from qsync.experiments.diagnosis.job import Rows, Training, loss
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.workloads.gpt import Gpt
from qsync.records.json_files import write_json

CLASSES = ("train", "infer")
# The first step is not timed, nor the step after a comparison.
_STEPS_BETWEEN = STEPS_PER_COMPARISON + 1
_EARLY = 5  # step after which a fault that stops the job begins


class Comparisons:
    """The monitor's findings at each comparison, and the cores used by other processes before it.

    `slow_s` is the time for which every comparison found slow steps, `slowdown` the machine's slowdown since
    profiling.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(num_ranks)]
        self._before = self._now()

    def add(self, monitor: Monitor) -> None:
        """Record the current findings."""
        now, drift = self._now(), monitor.drift
        (busy_s, own_s, at_s), self._before = (b - a for a, b in zip(self._before, now, strict=True)), now
        drifted = drift and {"rank": drift.rank, "phase": drift.phase, "sentence": str(drift)}
        self.found.append(
            {"drift": drifted, "slow_s": monitor.slow_s, "slowdown": monitor.slowdown,
             "others": max(0.0, (busy_s - own_s) / at_s), "step_s": at_s / _STEPS_BETWEEN}
        )  # fmt: skip

    def _now(self) -> tuple[float, float, float]:
        """Return the CPU seconds of the machine and of the ranks, and the time."""
        machine = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, softirq, *_ = _ticks(machine)
        own = [
            _ticks(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
            for pid in self._pids
        ]
        return user + nice + system + irq + softirq, sum(map(sum, own)), time.monotonic()


def _ticks(fields: list[str]) -> list[float]:
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]


def main(config: dict[str, Any]) -> None:
    """Train with a fault that begins after the first comparison; rank 0 writes the findings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    rank, folder, tiny = int(os.environ["RANK"]), Path(config["folder"]), config["tiny"]
    first_core = min(os.sched_getaffinity(0))
    pin_to_core(rank)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    model = Gpt(num_layers=1, width=32, num_heads=2) if tiny else Gpt(num_layers=3, width=256, num_heads=4)
    rows = Rows(2, 16) if tiny else Rows(4, 96)
    loader = torch.utils.data.DataLoader(rows, batch_size=None)
    parallel = qsync.hybrid(
        model, rows[0], loss, device_class=CLASSES[rank], loader=loader, cache_dir=config["cache"],
        base="fp32" if tiny else "bf16", timeout_s=config["timeout_s"],
    )  # fmt: skip
    prediction = prediction_of(parallel)
    assert prediction is not None
    step_s = max(phases.period_s for phases in prediction[0].phases.values())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    job = Training(rank, rows, parallel, optimizer, step_s=step_s, first_core=first_core)
    fault = FAULTS.get(config["fault"])
    if fault is not None:
        fault.prepare(job)
    # Rank 0 compares in the step after the timed ones; a fault begins later.
    begin = _EARLY if fault is not None and fault.sentence else _STEPS_BETWEEN + 1
    monitors[parallel].lasting_s = lasting_s = 0.0 if tiny else LASTING_S
    # A slow stretch may begin within a comparison, and means need two comparisons.
    num_faulty = 2 + math.ceil(lasting_s / step_s / _STEPS_BETWEEN)
    num_clean = max(1, int(config["seconds"] / step_s) // _STEPS_BETWEEN)
    num_comparisons = 1 + num_faulty if fault is not None else num_clean
    batches, began_s, comparisons = iter(loader), time.monotonic(), Comparisons(folder, len(CLASSES))
    for step in range(1, num_comparisons * _STEPS_BETWEEN + 2):
        job.step(next(batches))
        if rank == 0 and step > 1 and step % _STEPS_BETWEEN == 1:
            comparisons.add(monitors[parallel])
            write_json(folder / "result.json", {
                "seconds": time.monotonic() - began_s, "step_s": step_s, "comparisons": comparisons.found,
                "incomparable": monitors[parallel].incomparable,
            })  # fmt: skip
        if step == begin and fault is not None and fault.rank in (None, rank):
            fault.begin(job)
    dist.barrier()  # rank 0 has read all ranks' CPU times by now


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
