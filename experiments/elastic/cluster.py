"""A lighthouse and cards as real processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from qsync.errors import QSyncError

BATCH_SIZE = 64
FAST, WEAK = "train", "infer"
DEFAULTS: dict[str, Any] = {
    "batch_size": BATCH_SIZE, "start_with": 4, "timeout_s": 1.5, "dtype": "float32", "width": 256, "seed": 0,
    "steps": 10**9,
    "lower": True, "compression": None, "keep_gradients": 0, "keep_plan": False, "by_speed": False,
    "weak_share": 0.5,
}  # fmt: skip
_START_S = 120.0


class Cards:
    """A lighthouse and the cards of one job, as processes that end with the context."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings = folder.absolute(), {**DEFAULTS, **settings}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._read: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    def __enter__(self) -> Self:
        """Start the lighthouse."""
        self.light()
        return self

    def __exit__(self, *error: object) -> None:
        """End every process."""
        for process in (*self.processes.values(), self.lighthouse):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if self.lighthouse is not None and self.lighthouse.stdout is not None:
            self.lighthouse.stdout.close()

    @property
    def address(self) -> str:
        """Return the lighthouse's address."""
        return f"127.0.0.1:{self.port}"

    def light(self) -> None:
        """Start the lighthouse on its previous port."""
        command = [sys.executable, "-m", "qsync", "lighthouse", "--json", "--port", str(self.port),
                   "--wait", str(self.settings["timeout_s"]), "--dead-after", "1.0"]  # fmt: skip
        self.lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.lighthouse.stdout is not None
        text = b""
        while b"}" not in text:
            line = self.lighthouse.stdout.readline()
            if not line:
                raise QSyncError("the lighthouse did not start; see its message above")
            text += line
        self.port = int(json.loads(text)["lighthouse"].rpartition(":")[2])

    def darken(self) -> None:
        """Kill the lighthouse."""
        assert self.lighthouse is not None
        assert self.lighthouse.stdout is not None
        self.lighthouse.kill()
        self.lighthouse.wait()
        self.lighthouse.stdout.close()

    def start(self, name: str) -> None:
        """Start a card such as `train-0` or `infer-1`."""
        kind, _, number = name.rpartition("-")
        config = {
            **self.settings, "card": name, "class": kind, "core": int(number),
            "share": self.settings["weak_share"] if kind == WEAK else 1.0,
            "log": str(self.folder / f"{name}.jsonl"), "cache": str(self.folder.parent / "cache"),
        }  # fmt: skip
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        environment = {**os.environ, "QSYNC_LIGHTHOUSE": self.address, "OMP_NUM_THREADS": "1",
                       "QSYNC_PROFILE_S": os.environ.get("QSYNC_PROFILE_S", "2")}  # fmt: skip
        environment.pop("WORLD_SIZE", None)
        self.processes[name] = self._run(name, path, environment)

    def _run(self, name: str, config: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.err").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "qsync.experiments.elastic.card", str(config)],
                env=environment, stdout=errors, stderr=errors,
            )  # fmt: skip

    def slow(self, name: str, factor: float) -> None:
        """Slow a card by a factor."""
        path = self.folder / f"{name}.slower"
        path.with_suffix(".new").write_text(str(factor))
        path.with_suffix(".new").replace(path)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a card."""
        self.processes[name].send_signal(number)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a card's log so far."""
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        place, found = self._read.get(name, (0, []))
        with path.open("rb") as file:
            file.seek(place)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        found += [json.loads(line) for line in whole.splitlines()]
        self._read[name] = (place + len(whole), found)
        return found

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return one card's counted steps."""
        return [line for line in self.lines(name) if "step" in line and "digest" in line]

    def is_running(self, name: str) -> bool:
        """Return whether a card's process is running."""
        return name in self.processes and self.processes[name].poll() is None

    def wait_for_step(self, names: list[str], since_s: float) -> float:
        """Wait until all these cards have taken a step that began after a given time; return when.

        Raises QSyncError for a hang, or if a card ended.
        """
        until = time.time() + _START_S
        while time.time() < until:
            ends: list[float | None] = []
            for name in names:
                found = next(
                    (one["at"] for one in self.steps(name)
                     if one["at"] - one["seconds"] > since_s and not one["behind"]), None,
                )  # fmt: skip
                if found is None and not self.is_running(name):
                    raise QSyncError(
                        f"{name} ended with exit code {self.processes[name].poll()}: {self.errors(name)}"
                    )
                ends.append(found)
            if all(end is not None for end in ends):
                return max(end for end in ends if end is not None)
            time.sleep(0.05)
        raise QSyncError(f"no step of {', '.join(names)} within {_START_S:g} s; see their logs")

    def errors(self, name: str) -> str:
        """Return the end of a card's stderr."""
        path = self.folder / f"{name}.err"
        return path.read_text(errors="replace")[-600:] if path.exists() else ""


STOP, GO, KILL, ASK = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL, signal.SIGTERM
