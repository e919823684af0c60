"""Log the phases of every step of this rank: one line of JSON per step, one file per rank.

`qsync.replayer.explanation.measured_steps` reads the files of all ranks together.
"""

from __future__ import annotations

import json
import logging
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from qsync.distributed import job
from qsync.distributed.agreement import agree_locally
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.errors import FormatError, shortened
from qsync.replayer.explanation.measured_steps import log_file

logger = logging.getLogger("qsync")


def new_log(folder: str | Path | None) -> Path | None:
    """Create this rank's empty log file in the folder; None without a folder.

    An error is raised on all ranks.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def make() -> Path | None:
        if folder is None:
            return None
        try:
            path = log_file(Path(folder), rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            more = log_file(path.parent, job.world_size())
            more.unlink(missing_ok=True)  # left by a job with more ranks; readers count the files
        except (OSError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise FormatError(
                f"log_steps={shortened(folder)} cannot be written ({why}); give a writable folder"
            ) from error
        return path

    return agree_locally("opening the log of steps", make)


class StepLog:
    """Writes the phases of all further steps of a model's timer to a file.

    The last steps are written when the model is freed, or the process ends. A failed write, such as on a full
    disk, gives one warning and ends the log; training goes on.
    """

    def __init__(self, path: Path, timer: PhaseTimer, model: torch.nn.Module, device_class: str) -> None:
        self._path, self._timer, self._class = path, timer, device_class
        self._has_failed = False
        timer.log = self.write
        weakref.finalize(model, self._write_last)

    def _write_last(self) -> None:
        self._timer.settle()
        self.write()

    def write(self) -> None:
        """Append the timer's steps to the file."""
        kept = zip(self._timer.numbers, self._timer.num_calls, self._timer.steps, strict=True)
        lines = [
            json.dumps({"step": number, "device_class": self._class, "calls": calls, **phases.to_json()})
            + "\n"
            for number, calls, phases in kept
        ]
        if self._has_failed:
            return
        try:
            with self._path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            self._has_failed = True
            logger.warning(
                "qsync: steps are no longer logged: %s cannot be written (%s)", self._path, error.strerror
            )
