"""Run the job under torchrun, one agent per rank as on two hosts; collect qsync's output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError
from qsync.experiments.diagnosis.faults import FAULTS, Fault
from qsync.records.json_files import read_json
from qsync.replayer.explanation.phases import TOLERANCE

_NUM_RANKS = 2
_TIMEOUT_S = 3.0  # seconds after which a silent or stuck rank is reported
_LIMIT_S = 240.0


def run(folder: Path, fault: str = "", *, seconds: float = 0.0, tiny: bool = False) -> Any:
    """Run the job once, with or without a fault; return rank 0's result and the ranks' output.

    A faulty job is ended once qsync reports anything.
    """
    planted = FAULTS.get(fault)
    work = folder / (fault or "clean")
    work.mkdir(parents=True, exist_ok=True)
    for stale in work.iterdir():
        if stale.is_file():
            stale.unlink()
    config = {
        "folder": str(work), "cache": str(folder / "cache"), "fault": fault, "tiny": tiny,
        "seconds": seconds, "timeout_s": _TIMEOUT_S if planted and planted.sentence else 60.0,
    }  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    agents = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "QSYNC_PROFILE_S": "2" if tiny else "20"}
    for rank in range(_NUM_RANKS):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(_NUM_RANKS), "--node-rank",
            str(rank), "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1",
            "-m", "qsync.experiments.diagnosis.training", json.dumps(config),
        ]  # fmt: skip
        with (work / f"rank-{rank}.txt").open("wb") as output:
            agents.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    limit_s = time.monotonic() + _LIMIT_S + seconds
    try:
        while any(agent.poll() is None for agent in agents):
            if time.monotonic() > limit_s:
                raise QSyncError(f"the job with {fault or 'no fault'} did not end; see the logs in {work}")
            if planted is not None and _spoke(planted, work):
                break
            time.sleep(0.1)
    finally:
        _end(agents, work)
    result = work / "result.json"
    return {**(read_json(result) if result.is_file() else {}), "printed": _printed(work)}


def _spoke(planted: Fault, work: Path) -> bool:
    """Return whether the sentence is printed, or the last comparison found a drift."""
    if planted.sentence:
        return bool(said(planted, _printed(work)))
    result = work / "result.json"
    return result.is_file() and read_json(result)["comparisons"][-1]["drift"] is not None


def _end(agents: list[subprocess.Popen[bytes]], work: Path) -> None:
    """End running processes: ranks before their agents, which would wait for stopped ranks."""
    for rank, agent in enumerate(agents):
        if agent.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((work / f"pid-{rank}").read_text()), signal.SIGKILL)
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(10.0)
        agent.kill()
        agent.wait()


def _printed(work: Path) -> list[str]:
    return [(work / f"rank-{rank}.txt").read_text(errors="replace") for rank in range(_NUM_RANKS)]


def said(fault: Fault, printed: list[str]) -> str:
    """Return the sentence in which another rank names the faulty one; empty without one."""
    pattern = re.compile(rf"^(?=.*rank {fault.rank} \().*(?:{fault.sentence}).*$", re.MULTILINE)
    found = [
        match.group()
        for rank, text in enumerate(printed)
        if rank != fault.rank and (match := pattern.search(text))
    ]
    return found[0] if found else ""


def judged(folder: Path, fault: str, *, tiny: bool = False) -> dict[str, Any]:
    """Run the job with a fault, and return the verdict."""
    return verdict(FAULTS[fault], run(folder, fault, tiny=tiny))


def verdict(fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """Return qsync's diagnosis of a fault, whether it is right, and earlier false alarms."""
    if fault.sentence:
        sentence = said(fault, found["printed"])
        return {"sentence": sentence, "named": bool(sentence), "early": []}
    *_, last = comparisons = found.get("comparisons") or [{"drift": None}]
    drift = last["drift"] or {"phase": "", "rank": None, "sentence": found.get("incomparable", "")}
    named = drift["phase"] in fault.phases and fault.rank in (None, drift["rank"])
    return {"sentence": drift["sentence"], "named": named, "early": alarms(comparisons[:1])}


def alarms(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons that found a drift although other processes were nearly idle."""
    return [one for one in comparisons if one["drift"] and one["others"] < TOLERANCE]


def clean(folder: Path, seconds: float, *, tiny: bool = False) -> dict[str, Any]:
    """Run the job without a fault for some time; return the monitor's findings."""
    found = run(folder, seconds=seconds, tiny=tiny)
    if "comparisons" not in found:
        raise QSyncError(f"the clean job stopped; see the logs in {folder / 'clean'}")
    return {"seconds": found["seconds"], "comparisons": found["comparisons"]}
