"""Tasks trained to convergence: real data from Python and scikit-learn, and known functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from qsync.errors import QSyncError
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.surrogate import friedman_workload, impedance_workload
from qsync.experiments.workloads.vgg import Vgg
from qsync.experiments.workloads.vit import Vit
from qsync.experiments.workloads.workload import Workload, digits_workload, text_workload

_ROWS, _CONTEXT = 8, 96  # sequences and tokens per batch of text


@dataclass(frozen=True, slots=True)
class Task:
    """A workload and its number of training steps."""

    make: Callable[[], Workload]
    steps: int

    def workload(self) -> Workload:
        """Return the task's workload."""
        return _made(self.make)


@cache
def _made(make: Callable[[], Workload]) -> Workload:
    """Return a workload, whose data is read once per process."""
    return make()


def task_named(name: str) -> Task:
    """Return the task of this name. Raises QSyncError for an unknown one."""
    if name not in TASKS:
        raise QSyncError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def _digits(name: str, make: Callable[[], torch.nn.Module], size: int) -> Callable[[], Workload]:
    about = f"{name}, {size} images of 16 x 16; scikit-learn's digits"
    return partial(digits_workload, name, make, size, about)


def _gpt() -> Workload:
    make = partial(Gpt, num_layers=3, width=192, num_heads=3, context=_CONTEXT)
    about = f"byte-level GPT, {_ROWS} x {_CONTEXT} tokens; text: Python standard library"
    return text_workload("gpt", make, _ROWS, _CONTEXT, about)


# Small nets with BatchNorm are where uniform INT8 is expected to lose accuracy.
TASKS: Mapping[str, Task] = {
    "gpt": Task(_gpt, 800),
    "resnet": Task(_digits("resnet", partial(ResNet, channels=(16, 32, 64)), 32), 600),
    "vgg": Task(_digits("vgg", partial(Vgg, ((32,), (64,), (128,), (128,)), 256), 32), 600),
    "vit": Task(_digits("vit", partial(Vit, num_layers=3, width=128, num_heads=2), 16), 600),
    "friedman": Task(friedman_workload, 1500),
    "impedance": Task(impedance_workload, 1500),
}
