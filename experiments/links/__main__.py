"""Measure steps over a paced link between two hosts, in every way that gradients travel.

    python -m qsync.experiments.links --out FOLDER

Two network namespaces with one rank each are joined by a link that tc paces (root only). Each bandwidth is a
piece. `--publish` writes tables and picture into `docs/results/links.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.errors import QSyncError, shortened
from qsync.experiments.harness import Experiment, Page, run_command
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.links import report
from qsync.experiments.links.hosts import HOSTS, PACED_BY, on_host, pace, two_hosts
from qsync.experiments.links.rank import WAYS
from qsync.processes.child_processes import environment
from qsync.records.json_files import read_json, write_json

RATES = (10.0, 1.0, 0.1)  # gigabits per second
_PAGE = Page(Path("docs/results/links.md"), note=f"Paced by {PACED_BY}; one thread a rank.")
_PICTURE = Path("docs/figures/links.png")
_TIMEOUT_S = 1200.0
_PORT = "29555"  # nothing else listens in a namespace of its own


def main(
    out: Out = Path("links"),
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size: to try the command.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Measure every bandwidth and judge it; an interrupted run continues."""
    sizes = {"layers": 1, "width": 64, "samples": 2, "rounds": 2, "profile_s": 0.0}
    if not tiny:
        sizes = {"layers": 6, "width": 256, "samples": 4, "rounds": 10, "profile_s": 8.0}
    experiment = Experiment("links", out, settings={"tiny": tiny, "paced_by": PACED_BY, **sizes}, fresh=fresh)
    with experiment.progress():
        found = {
            f"{rate:g}": experiment.piece(f"{rate:g} Gb per s", partial(_measured, rate, sizes))
            for rate in RATES
        }
    report.draw(found, experiment.out / "links.png")
    if publish and not tiny:
        report.draw(found, _PICTURE)
    experiment.finish(
        {"rates": found}, bars=report.bars(found), tables=[report.table(found), report.choices(found)],
        page=_PAGE if publish else None,
    )  # fmt: skip


def _measured(rate: float, sizes: dict[str, Any]) -> Any:
    """Run one rank on each host over a link of this rate, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder, two_hosts():
        pace(rate)
        path, result = Path(folder) / "settings.json", Path(folder) / "result.json"
        cache = str(Path(folder) / "cache")
        write_json(path, {**sizes, "ways": WAYS, "result": str(result), "cache": cache})
        ranks = [_start(rank, path) for rank in range(len(HOSTS))]
        try:
            said = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if not result.is_file():
            raise QSyncError(
                f"no rank came to an end at {rate:g} Gb/s: {shortened(said[0][-600:], 700, quote=False)}"
            )
        return read_json(result)


def _start(rank: int, settings: Path) -> subprocess.Popen[str]:
    place = {
        "RANK": str(rank), "WORLD_SIZE": str(len(HOSTS)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": HOSTS[0][2], "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": HOSTS[rank][1],
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "qsync.experiments.links.rank", str(settings)]
    return subprocess.Popen(
        on_host(rank, command), env={**os.environ, **environment(), **place}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
