"""Train both ranks' parts of every step in one process, as their job computes them; or on real ranks.

Gradients are weighted by samples, as DDP's mean is of equal batches. Buffers (running statistics) are those
of the first rank, which DDP broadcasts. The learning rate warms up and
follows a cosine to zero, so that a run ends converged. Losses are evaluated in FP32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from qsync import Precision
from qsync.distributed.data_parallel import in_ddp
from qsync.errors import QSyncError
from qsync.experiments.accuracy.tasks import task_named
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.ranks import FAST, WEAK, Place
from qsync.experiments.workloads.workload import Batch, Workload, evaluate, make_optimizer
from qsync.records.json_files import write_bytes
from qsync.runtime import choosers, planned_forward

_HELDOUT_BATCHES, _WARM_UP = 24, 0.05


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A task, how its ranks train it (a `Method` as JSON), a seed, and the steps.

    `starts` is the folder of the weights that fine-tuning starts from.
    """

    task: str
    method: Mapping[str, Any]
    seed: int
    steps: int
    starts: Path
    tiny: bool = False


def trained(run: TrainingRun) -> dict[str, Any]:
    """Train both ranks in this process; return the held-out loss and accuracy."""
    _alone()
    return BothRanks(_started(run), run.method).train(run)


def train_start(run: TrainingRun) -> dict[str, Any]:
    """Train in FP32 what a run's fine-tuning starts from, and write its weights; return the final loss."""
    _alone()
    job = task_named(run.task)
    assert job.start is not None
    model, workload = job.workload().make_model(run.seed), job.start()
    plain = {"assignments": {FAST: {}, WEAK: {}}, "samples": run.method["samples"]}
    before = replace(run, seed=run.seed + 1_000, steps=2 if run.tiny else job.start_steps)
    found = BothRanks(model, plain).train(before, workload)
    write_bytes(_start_file(run), safetensors.torch.save(model.state_dict()))
    return found


def _alone() -> None:
    """Let this process train on one thread, with nothing left of what it trained before."""
    torch.set_num_threads(1)
    torch._dynamo.reset()  # another number of samples would make sizes symbols
    keep_freed_memory()


def trained_on_ranks(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train on this rank of a real job; return what rank 0 finds. `config` has the fields of the run."""
    run = TrainingRun(**{**config["run"], "starts": Path(config["run"]["starts"])})
    return OneRank(_started(run), run.method, dist.get_rank()).train(run)


def _started(run: TrainingRun) -> nn.Module:
    """Return the model of a seed: new, or with the weights that fine-tuning starts from."""
    job = task_named(run.task)
    model = job.workload().make_model(run.seed)
    if job.start is not None:
        file = _start_file(run)
        if not file.is_file():
            raise QSyncError(f"{file} is missing, which the training starts from; run with --fresh")
        model.load_state_dict(safetensors.torch.load(file.read_bytes()))
    return model


def _start_file(run: TrainingRun) -> Path:
    return run.starts / f"{run.task}-{run.seed}.safetensors"


class Training:
    """A model in training; `step` adds a step's gradients."""

    def __init__(self, model: nn.Module, method: Mapping[str, Any]) -> None:
        self.model, self.method = model, method

    def step(self, workload: Workload, seed: int, step: int) -> None:
        """Add up the gradients of a step."""
        raise NotImplementedError

    def train(self, run: TrainingRun, workload: Workload | None = None) -> dict[str, Any]:
        """Take a run's steps on the batches of its seed, of the task or of another workload."""
        workload, steps = workload or task_named(run.task).workload(), run.steps
        optimizer = make_optimizer(workload.lr)(self.model.parameters())
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
        for step in range(steps):
            self.step(workload, run.seed, step)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        final_loss, accuracy = _heldout(self.model, workload), _accuracy(self.model, workload)
        return {"steps": steps, "final_loss": final_loss, "final_accuracy": accuracy}

    def lowered(self, model: nn.Module, name: str) -> nn.Module:
        """Let a model run in the precisions of a class."""
        chosen = {op: Precision(p) for op, p in self.method["assignments"][name].items()}
        planned_forward.attach(model, choosers.following(chosen))
        return model

    def dealt(self, workload: Workload, seed: int, step: int) -> list[Batch]:
        """Deal the samples of a step, the same for every method, to the ranks."""
        samples = list(self.method["samples"].values())
        both = [workload.batch(seed, step, rank) for rank in range(len(samples))]
        parts = [torch.cat(part).split(samples) for part in zip(*both, strict=True)]  # type: ignore[no-untyped-call]
        return list(zip(*parts, strict=True))

    def part(
        self,
        called: nn.Module,
        workload: Workload,
        batch: Batch,
        key: tuple[int, int, int],
        weight: float = 1.0,
    ) -> None:
        """Add the gradients of a rank's samples, weighted by their number.

        `key` is (seed, step, rank), which fixes the random numbers.
        """
        with _random_of(key):
            loss = workload.loss(called, batch) * (len(batch[0]) / sum(self.method["samples"].values()))
            (loss * weight).backward()


class BothRanks(Training):
    """Both ranks in one process: copies that share parameters, each under its own precisions."""

    def __init__(self, model: nn.Module, method: Mapping[str, Any]) -> None:
        super().__init__(model, method)
        self._ranks = [self.lowered(tied(model, name == FAST), name) for name in method["samples"]]

    def step(self, workload: Workload, seed: int, step: int) -> None:
        """Add up both ranks' gradients."""
        batches = self.dealt(workload, seed, step)
        for rank, (called, batch) in enumerate(zip(self._ranks, batches, strict=True)):
            if len(batch[0]):
                self.part(called, workload, batch, (seed, step, rank))


class OneRank(Training):
    """One rank of a real job, in DDP."""

    def __init__(self, model: nn.Module, method: Mapping[str, Any], rank: int) -> None:
        super().__init__(model, method)
        self._rank, name = rank, list(method["samples"])[rank]
        self._parallel = in_ddp(self.lowered(tied(model, with_buffers=True), name))

    def step(self, workload: Workload, seed: int, step: int) -> None:
        """Reduce the gradients of all ranks, which DDP takes the mean of."""
        weight, batch = float(len(self.method["samples"])), self.dealt(workload, seed, step)[self._rank]
        self.part(self._parallel, workload, batch, (seed, step, self._rank), weight)


def tied(model: nn.Module, with_buffers: bool) -> nn.Module:
    """Return a copy that has the model's own parameters, and its buffers too or copies of them."""
    kept: dict[int, Any] = {id(p): p for p in model.parameters()}
    if with_buffers:
        kept |= {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, kept)


def _rate(step: int, steps: int) -> float:
    begun = min(1.0, (step + 1) / max(_WARM_UP * steps, 1.0))
    return begun * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def _heldout(model: nn.Module, workload: Workload) -> float:
    with _random_of((0,)):
        return evaluate(model, workload, num_batches=_HELDOUT_BATCHES)


def _accuracy(model: nn.Module, workload: Workload) -> float | None:
    """Return the share of held-out targets that are found; None where there are no classes."""
    model.eval()
    found = total = 0
    with torch.no_grad():
        for inputs, targets in workload.heldout(_HELDOUT_BATCHES):
            outputs = model(inputs)
            if not isinstance(outputs, torch.Tensor) or targets.is_floating_point():
                return None
            found += int((outputs.argmax(-1) == targets).sum())
            total += targets.numel()
    model.train()
    return found / total


@contextmanager
def _random_of(key: tuple[int, ...]) -> Iterator[None]:
    """Draw random numbers of this key inside, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash(key) % 2**63)
        yield
