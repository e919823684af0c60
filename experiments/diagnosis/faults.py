"""Faults to plant in a running job, each with its expected diagnosis: rank and phase, or a sentence."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from qsync.backend.devices.emulation import Throttle
from qsync.experiments.diagnosis.job import Training
from qsync.operators.precision import Precision
from qsync.runtime.wrapping import plan_of, swap_plan

LONG_S = 60.0  # not forever: the job ends even if nobody ends it


def prepare_nothing(job: Training) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, or of all if `rank` is None.

    The monitor must blame that rank and one of `phases`; or another rank must print a sentence that names
    that rank and matches `sentence`.
    """

    what: str
    rank: int | None
    begin: Callable[[Training], None]
    phases: tuple[str, ...] = ()
    sentence: str = ""
    prepare: Callable[[Training], None] = prepare_nothing

    @property
    def expected(self) -> str:
        """Describe the expected diagnosis."""
        rank = "any rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank}: {self.sentence or ' or '.join(self.phases)}"


def pause(job: Training) -> None:
    """Sleep for half of the predicted step."""
    time.sleep(max(0.03, 0.5 * job.step_s))


def _slow_loading(job: Training) -> None:
    job.rows.before = lambda: pause(job)


def _sleep_between(job: Training) -> None:
    job.between = lambda: pause(job)


def _checkpoint(job: Training) -> None:
    def save() -> None:
        torch.save([job.trained.state_dict(), job.optimizer.state_dict()], io.BytesIO())

    job.between = save


def _slow_forward(job: Training) -> None:
    job.trained.register_forward_pre_hook(lambda *_: pause(job))


def _slow_backward(job: Training) -> None:
    first = next(job.trained.parameters())
    first.register_hook(lambda _: pause(job))  # type: ignore[no-untyped-call]


def _slow_optimizer(job: Training) -> None:
    job.optimizer.register_step_pre_hook(lambda *_: pause(job))


def _burn(job: Training) -> None:
    """Load this rank's core with another process that ends with this one."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    job.held.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", code]))


def _throttle(job: Training) -> None:
    throttle = Throttle(0.5)
    job.held.append(throttle)
    throttle.__enter__()


def _share_core(job: Training) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {job.first_core})


def _hook_link(job: Training) -> None:
    """Make every all-reduce call a hook that a fault may delay."""

    def late(found: torch.futures.Future[Any]) -> torch.Tensor:
        if job.held:
            pause(job)
        reduced: torch.Tensor = found.value()
        return reduced

    group = dist.group.WORLD
    assert isinstance(job.model, DistributedDataParallel) and group is not None
    job.model.register_comm_hook(group, lambda group, bucket: allreduce_hook(group, bucket).then(late))


def _delay_link(job: Training) -> None:
    job.held.append("late")


def _larger_batch(job: Training) -> None:
    job.rows.size *= 2


def _other_precision(job: Training) -> None:
    plan = plan_of(job.trained)
    assert plan is not None
    swap_plan(job.trained, plan.pin("blocks.*", Precision.FP32), "infer")


def _hang_between(job: Training) -> None:
    job.between = lambda: time.sleep(LONG_S)


def _hang_in_loading(job: Training) -> None:
    job.rows.before = lambda: time.sleep(LONG_S)


def _raise(job: Training) -> None:
    raise ValueError("a planted error")


def _leave(job: Training) -> None:
    sys.exit(0)


def _kill(job: Training) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(job: Training) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_LOADING, _HOST, _COMPUTE, _OPTIMIZER, _LINK = (
    ("data loading",), ("host",), ("compute",), ("optimizer",), ("communication",),
)  # fmt: skip
FAULTS: dict[str, Fault] = {
    "loading-1": Fault("slow data loading on rank 1", 1, _slow_loading, _LOADING),
    "host-0": Fault("a sleep between steps", 0, _sleep_between, _HOST),
    "checkpoint": Fault("a checkpoint in every step, by one rank", 0, _checkpoint, _HOST),
    "forward": Fault("a slower forward", 1, _slow_forward, _COMPUTE),
    "backward": Fault("a slower backward (a hook on a gradient)", 0, _slow_backward, _COMPUTE),
    "optimizer": Fault("a slower optimizer", 1, _slow_optimizer, _OPTIMIZER),
    "burner": Fault("another process on a rank's core", 1, _burn, _COMPUTE),
    "pulses": Fault("a rank paused for half of the time (SIGSTOP, SIGCONT)", 1, _throttle, _COMPUTE),
    "one-core": Fault("both ranks on one core", None, _share_core, _COMPUTE),
    "link": Fault("slow all-reduces", None, _delay_link, _LINK, prepare=_hook_link),
    "batch": Fault("a batch twice as large on one rank", 1, _larger_batch, _COMPUTE),
    "precision": Fault("blocks in FP32, planned in BF16", 1, _other_precision, _COMPUTE),
    "hang": Fault("a rank stuck between steps", 1, _hang_between, sentence="after backward|before forward"),
    "hang-loading": Fault("a rank stuck in its data loader", 1, _hang_in_loading, sentence="in data loading"),
    "error": Fault("a rank that raises", 1, _raise, sentence="left with an error.*a planted error"),
    "leaves": Fault("a rank that ends its loop early", 1, _leave, sentence="finished before"),
    "killed-0": Fault("rank 0 killed (SIGKILL)", 0, _kill, sentence="lost the rendezvous store"),
    "killed-1": Fault("rank 1 killed (SIGKILL)", 1, _kill, sentence="stopped responding"),
    "stopped": Fault("a rank stopped (SIGSTOP)", 1, _stop, sentence="stopped responding"),
}
