"""The experiments behind README and docs, with the commands that run each and write its page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError
from qsync.records.json_files import read_json

_OUT = "OUT"  # placeholder for the experiment's folder
_HERE = "qsync.experiments."


@dataclass(frozen=True, slots=True)
class Rerun:
    """An experiment's commands (module and options), and their approximate minutes.

    The commands write `page` in docs/results.
    """

    minutes: int
    page: str
    commands: tuple[tuple[str, ...], ...]

    def run(self, folder: Path) -> bool:
        """Run the commands; return True. Raises QSyncError for a failure; finished parts stay."""
        for module, *options in self.commands:
            given = [option.replace(_OUT, str(folder)) for option in options]
            code = subprocess.run([sys.executable, "-m", module, *given], check=False).returncode
            if code != 0:
                raise QSyncError(
                    f"python -m {module} {' '.join(given)} ended with exit code {code}; see its output above"
                )
        return True

    def found(self, folder: Path) -> Mapping[str, Any]:
        """Return the figures in the folder; empty without a file of figures."""
        path = folder / "figures.json"
        content: Mapping[str, Any] = read_json(path) if path.is_file() else {}
        return content


def _published(module: str, *options: str, out: str = _OUT) -> tuple[str, ...]:
    return (_HERE + module, "--out", out, *options, "--publish")


_DEMO = (("qsync", "demo", "--out", _OUT), (_HERE + "mixed.publish", _OUT))
# Fastest first, so that an hour shows most.
RERUNS: Mapping[str, Rerun] = {
    "demo": Rerun(10, "demo.md", _DEMO),
    "limits": Rerun(5, "prediction.md", (_published("prediction.limits"),)),
    "pays": Rerun(15, "pays.md", (_published("pays"),)),
    "links": Rerun(10, "links.md", (_published("links"),)),
    "levers": Rerun(15, "levers.md", (_published("small_memory"),)),
    "kernels": Rerun(20, "kernels.md", (_published("kernels.compare_kernels"),)),
    "speedup": Rerun(35, "speedup.md", (_published("speedup"),)),
    "takeover": Rerun(
        50, "takeover.md",
        (_published("takeover"), _published("takeover.first_step", out=f"{_OUT}/first")),
    ),
    "allocation": Rerun(25, "allocation.md", (_published("allocation.compare_methods"),)),
    "elastic": Rerun(60, "elastic.md", (_published("elastic"),)),
    "integrations": Rerun(60, "integrations.md", (_published("integrations"),)),
    "growing": Rerun(60, "growing.md", (_published("expansion.compare_growth"),)),
    "memory": Rerun(90, "memory.md", ((_HERE + "memory.memory_error", "--out", _OUT, "--state"),)),
    "diagnosis": Rerun(150, "diagnosis.md", (_published("diagnosis", "--clean-minutes", "120"),)),
    "unseen": Rerun(
        240, "unseen.md",
        (_published("unseen", "--held-out",
                    *(f"--part={part}" for part in ("speed", "prediction", "memory", "ranks"))),),
    ),
    "sensitivity": Rerun(300, "sensitivity.md", (_published("sensitivity.indicators", "--processes", "2"),)),
    "accuracy": Rerun(480, "accuracy.md", (_published("accuracy"),)),
}  # fmt: skip
