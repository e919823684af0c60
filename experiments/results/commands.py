"""The experiments behind README and docs: their commands, and how long they take, in each size of a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError
from qsync.records.json_files import read_json

_OUT = "OUT"  # placeholder for the experiment's folder
_HERE = "qsync.experiments."


class Size(StrEnum):
    """How much a run measures: 45 minutes, nine hours, or everything."""

    QUICK = "quick"
    NIGHT = "night"
    DEEP = "deep"


@dataclass(frozen=True, slots=True)
class Run:
    """Commands (module and options), run in order, and the minutes that they take on two cores."""

    minutes: int
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


@dataclass(frozen=True, slots=True)
class Rerun:
    """An experiment, whose whole run writes `page` in docs/results.

    A quick run is a part of it and publishes nothing. README and the guide cite what a night measures.
    """

    page: str
    whole: Run
    quick: Run | None = None
    nightly: bool = False

    def of(self, size: Size) -> Run | None:
        """Return the run of this size; None if that leaves the experiment out."""
        if size is Size.QUICK:
            return self.quick
        return self.whole if self.nightly or size is Size.DEEP else None


def runs_of(size: Size) -> dict[str, Run]:
    """Return the experiments of a run of this size, fastest first: an hour then shows most."""
    found = {name: run for name, rerun in RERUNS.items() if (run := rerun.of(size)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1].minutes))


def figures_in(folder: Path) -> Mapping[str, Any]:
    """Return a folder's figures; empty without a file of figures."""
    path = folder / "figures.json"
    content: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _part(module: str, *options: str, out: str = _OUT) -> tuple[str, ...]:
    return (_HERE + module, "--out", out, *options)


def _published(module: str, *options: str, out: str = _OUT) -> tuple[str, ...]:
    return (*_part(module, *options, out=out), "--publish")


_DEMO = ("qsync", "demo", "--out", _OUT)
_SIX_FAMILIES = tuple(
    f"--only={name}" for name in ("roberta", "llama", "t5", "vit", "resnet50", "efficientnet")
)
RERUNS: Mapping[str, Rerun] = {
    "demo": Rerun(
        "demo.md", Run(10, (_DEMO, (_HERE + "mixed.publish", _OUT))), quick=Run(10, (_DEMO,)), nightly=True
    ),
    "limits": Rerun("prediction.md", Run(5, (_published("prediction.limits"),)), nightly=True),
    "pays": Rerun("pays.md", Run(15, (_published("pays"),)), nightly=True),
    "links": Rerun("links.md", Run(10, (_published("links"),)), nightly=True),
    "levers": Rerun("levers.md", Run(15, (_published("small_memory"),)), nightly=True),
    "speedup": Rerun(
        "speedup.md",
        Run(135, (_published("speedup"),)),
        quick=Run(12, (_part("speedup", "--model=gpt-small", "--share=0.2", "--share=0.5", "--share=0.85",
                             "--turns=3"),)),
        nightly=True,
    ),
    "allocation": Rerun("allocation.md", Run(25, (_published("allocation.compare_methods"),)), nightly=True),
    "unseen": Rerun(
        "unseen.md",
        Run(180, (_published("unseen", "--held-out",
                             *(f"--part={part}" for part in ("speed", "prediction", "memory", "ranks"))),)),
        quick=Run(15, (_part("unseen", "--part=speed", *_SIX_FAMILIES),)),
        nightly=True,
    ),
    "kernels": Rerun("kernels.md", Run(20, (_published("kernels.compare_kernels"),))),
    "takeover": Rerun(
        "takeover.md",
        Run(50, (_published("takeover"), _published("takeover.first_step", out=f"{_OUT}/first"))),
    ),
    "elastic": Rerun(
        "elastic.md", Run(60, (_published("elastic"),)), quick=Run(8, (_part("elastic", "--short"),))
    ),
    "integrations": Rerun("integrations.md", Run(60, (_published("integrations"),))),
    "growing": Rerun("growing.md", Run(60, (_published("expansion.compare_growth"),))),
    "memory": Rerun("memory.md", Run(90, (_part("memory.memory_error", "--state"),))),
    "diagnosis": Rerun("diagnosis.md", Run(150, (_published("diagnosis", "--clean-minutes", "120"),))),
    "sensitivity": Rerun(
        "sensitivity.md", Run(300, (_published("sensitivity.indicators", "--processes", "2"),))
    ),
    "accuracy": Rerun("accuracy.md", Run(240, (_published("accuracy"),))),
}  # fmt: skip
