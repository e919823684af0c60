"""What the pieces measure: functions whose result is JSON, each run by `python -m` in a process."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync.backend import cuda_build
from qsync.backend.devices.device_detection import machine
from qsync.backend.devices.gpu_state import gpu_states
from qsync.distributed.monitoring import liveness
from qsync.errors import BuildError
from qsync.experiments.harness.pairing import measure
from qsync.experiments.harness.ranks import Place, run_on_ranks
from qsync.experiments.unseen import family_runs
from qsync.experiments.unseen.family_runs import training_step
from qsync.experiments.workloads.families import family_named
from qsync.predictor.profiling.link_benchmark import measure_link
from qsync.records.json_files import write_json
from qsync.runtime.wrapping import plan_of

_ROUNDS, _PLANS, _SEED = 9, 6, 0
_STEPS = 20  # of a job of two ranks
ONE_GPU, GPU_AND_CPU = "one GPU", "GPU and CPU"


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


def steps(name: str, modes: Sequence[str], compiled: bool, tiny: bool, device: str) -> dict[str, Any]:
    """Time whole steps in turns: FP32 eager, torch.autocast, modes; if asked, compiled beside other peers."""
    rounds, compiled = 2 if tiny else _ROUNDS, compiled and not tiny
    return family_runs.speeds(name, rounds, modes, compiled, tiny, device, compiled)


def prediction(name: str, tiny: bool, device: str) -> dict[str, Any]:
    """Profile a model; return predicted and measured steps of random plans, each beside FP32."""
    plans, rounds = (1, 2) if tiny else (_PLANS, _ROUNDS)
    found = family_runs.profiled(name, plans, _SEED, tiny, device)
    if "failed" in found:
        return found
    measured = [family_runs.planned(name, plan, rounds, tiny, device) for plan in found["plans"]]
    if all("failed" in one for one in measured):
        return measured[0]
    return {**found, "measured": measured}


def memory(name: str, modes: Sequence[str], tiny: bool, device: str) -> dict[str, Any]:
    """Return predicted and measured bytes of a step, in FP32 and in each mode."""
    return family_runs.memory(name, tiny, device, modes)


def collectives(backend: str, device: str) -> dict[str, Any]:
    """Measure all-reduces of two ranks: latency, rate, and what they and compute take from each other."""
    if device == "cuda" and backend == "nccl" and torch.cuda.device_count() < 2:
        return {"failed": f"NCCL needs two GPUs; this machine has {torch.cuda.device_count()}"}
    os.environ["QSYNC_BACKEND"] = backend if device == "cuda" else "gloo"
    found: dict[str, Any] = run_on_ranks(_linked, {"device": device}, command="gpu")
    return found


def _linked(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Measure the link of this job, each rank on a GPU of its own if there are so many."""
    device = place.device
    if config["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return asdict(measure_link(device))


def ranks(where: str, tiny: bool, device: str) -> dict[str, Any]:
    """Train with `qsync.hybrid` on two ranks: both on one GPU, or one of them on the CPU."""
    config = {"where": where, "tiny": tiny, "device": device, "weak_share": 1.0}
    found: dict[str, Any] = run_on_ranks(_trained, config, command="gpu")
    return found


def _trained(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Plan and train on this rank; return rank 0's steps, measured and predicted, and its steps alone."""
    is_shared = config["where"] == ONE_GPU and config["device"] == "cuda"
    device = torch.device("cuda", 0) if is_shared else place.device
    model, batches = family_named("gpt2").make(config["tiny"])
    batch = {key: value.to(device) for key, value in batches[0].items()}
    model = model.to(device)
    unwrapped = copy.deepcopy(model)
    with liveness.start(60.0):
        trained = qsync.hybrid(model, batch)
        # One step a sample: as many as a rank's own speed allows would differ, and ranks wait for each other.
        step = training_step(trained, [batch])
        found = measure({"step": step}, _STEPS, device, sample_s=0.0)["step"]
    plan = plan_of(trained)
    assert plan is not None
    alone: Sequence[float] = ()
    if dist.get_rank() == 0:
        step = training_step(qsync.wrap(unwrapped, str(plan.base)), [batch])
        alone = measure({"step": step}, _STEPS, device, sample_s=0.0)["step"].seconds
    dist.barrier()  # the other rank leaves the machine to rank 0 until here
    lowered = {name: Counter(map(str, own.assignment.values())) for name, own in plan.classes.items()}
    return {
        "seconds": found.seconds, "alone_s": alone, "predicted_s": plan.step_s, "target_s": plan.target_s,
        "lowered": lowered, "base": str(plan.base),
    }  # fmt: skip


def main() -> None:
    """Run the function that argv names, and write what it returns."""
    name, arguments, file = json.loads(sys.argv[1])
    write_json(Path(file), globals()[name](*arguments))


if __name__ == "__main__":
    main()
