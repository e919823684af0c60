"""Run a client on two ranks under torchrun, plain or converted; return each rank's output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from qsync.errors import QSyncError
from qsync.experiments.clients.conversions import Client
from qsync.experiments.harness.processes import END_BEFORE_GLOO, end_with_parent
from qsync.records.json_files import read_json

NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """One rank's printed lines with their times, in seconds from its start."""

    lines: tuple[tuple[float, str], ...]

    def _steps(self) -> list[tuple[float, str]]:
        return [line for line in self.lines if line[1].startswith("step ")]

    def losses(self) -> list[str]:
        """Return the printed losses by step, as texts with all their digits."""
        return [text for _, text in self._steps()]

    def first_step_s(self) -> float:
        """Return seconds from the start of the process to the end of the first optimizer step."""
        return self._steps()[0][0]

    def step_s(self) -> float:
        """Return the median seconds of the later steps."""
        times = [at for at, _ in self._steps()]
        return median(after - before for before, after in pairwise(times[1:]))


def run_client(
    client: Client,
    folder: Path,
    *,
    qsync: bool,
    steps: int,
    options: Mapping[str, Any] | None = None,
    arguments: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> list[ObservedRank]:
    """Run a client in its own folder until it ends; return each rank's observations.

    The script, its output and its checkpoint stay in the folder. Raises QSyncError for a job that fails or
    does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script, said = folder / "train.py", folder / "stderr.txt"
    text = client.converted(options) if qsync else client.plain()
    script.write_text(text + END_BEFORE_GLOO, encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS),
        "--no-python", sys.executable, "-m", "qsync.experiments.clients.observed_rank", str(folder),
        str(script), "--out", str(folder), "--steps", str(steps), *arguments,
    ]  # fmt: skip
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
    with said.open("wb") as errors:
        job = subprocess.Popen(
            command, env=given, stderr=errors, cwd=folder, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            code = job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks
            raise QSyncError(f"{client.name} did not end within {timeout_s:.0f} s; see {said}") from None
        finally:
            if job.poll() is None:
                job.wait()
    if code != 0:
        words = said.read_text(encoding="utf-8", errors="replace")
        raise QSyncError(f"{client.name} ended with exit code {code}:\n{words}")
    found = (read_json(folder / f"rank-{rank}.json") for rank in range(NUM_RANKS))
    return [ObservedRank(**{**rank, "lines": tuple(map(tuple, rank["lines"]))}) for rank in found]
