"""What the pieces measure: functions whose result is JSON, each run by `python -m` in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qsync.backend import cuda_build
from qsync.backend.devices.device_detection import machine
from qsync.backend.devices.gpu_state import gpu_states
from qsync.errors import BuildError
from qsync.experiments.unseen import family_runs
from qsync.records.json_files import write_json

_ROUNDS, _PLANS, _SEED = 9, 6, 0


def environment(device: str) -> dict[str, Any]:
    """Return what the machine has: versions, GPUs, compilers. Nothing is compiled for it."""
    return {
        "machine": machine(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "nccl": _nccl(), "gpus": gpu_states(), "architectures": torch.cuda.get_arch_list(),
        "toolchain": _toolchain(device),
    }  # fmt: skip


def doctor() -> Any:
    """Run `qsync doctor`; return its report, or the last line that it printed."""
    command = [sys.executable, "-m", "qsync.commands.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception:  # this build has none, or no driver
        return None


def _toolchain(device: str) -> str:
    try:
        name = cuda_build.architecture(torch.device(device)) if device == "cuda" else "90"
        return str(cuda_build.toolchain(name))
    except BuildError as error:
        return f"none: {error}"


def steps(name: str, modes: Sequence[str], tiny: bool, device: str) -> dict[str, Any]:
    """Time whole steps in turns: FP32 eager, torch.autocast, modes."""
    return family_runs.speeds(name, 2 if tiny else _ROUNDS, modes, False, tiny, device)


def prediction(name: str, tiny: bool) -> dict[str, Any]:
    """Return by how much the predicted steps of random plans miss."""
    return family_runs.predicted(name, 1, 1 if tiny else _PLANS, _SEED, tiny)


def memory(name: str, modes: Sequence[str], tiny: bool, device: str) -> dict[str, Any]:
    """Return predicted and measured bytes of a step, in FP32 and in each mode."""
    return family_runs.memory(name, tiny, device, modes)


def main() -> None:
    """Run the function that argv names, and write what it returns."""
    name, arguments, file = json.loads(sys.argv[1])
    write_json(Path(file), globals()[name](*arguments))


if __name__ == "__main__":
    main()
