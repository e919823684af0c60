"""Time training steps as they run: periods, and blocked time of this rank."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync import Plan
from qsync.distributed.data_parallel import in_ddp
from qsync.experiments.harness.measured_memory import state_bytes, step_peak_bytes
from qsync.experiments.harness.pairing import synchronize
from qsync.experiments.harness.ranks import BUCKET_CAP_MB
from qsync.experiments.workloads.workload import Batch, Workload, make_optimizer
from qsync.runtime import choosers, planned_forward


@dataclass(slots=True)
class Runner:
    """Trains in one way on one rank: a model, alone or in DDP, with its optimizer.

    `periods_s` holds the times between the last reduced gradients of successive steps, `turns_s` each turn's
    median, `blocked_s` the time from this rank's last gradient to the end of backward.
    """

    name: str
    model: torch.nn.Module
    trained: torch.nn.Module
    workload: Workload
    seed: int
    rank: int
    device: torch.device
    shares: Sequence[int] = ()  # shares of the global batch by rank; empty if each rank has its own batch
    passes: int = 1
    optimizer: torch.optim.Optimizer = field(init=False)
    step: int = 0
    periods_s: list[float] = field(default_factory=list)
    turns_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _last_gradient: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = self._new_optimizer()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]
        if self.shares and self.trained is not self.model:  # in DDP
            qsync.weigh_gradients(self.trained, self.shares[self.rank], passes=self.passes)

    def _mark(self, _: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def train(self, num_steps: int) -> None:
        """Run steps; the first starts with all ranks aligned and is not timed."""
        reduced: float | None = None
        begun = len(self.periods_s)
        for _ in range(num_steps):
            batch = tuple(tensor.to(self.device) for tensor in self._batch())
            parts = [self._backward(part) for part in qsync.micro_batches(self.trained, batch, self.passes)]
            synchronize(self.device)
            now = time.perf_counter()
            if reduced is not None:
                self.periods_s.append(now - reduced)
                self.blocked_s.append(now - self._last_gradient)
            reduced = now
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(float(torch.stack(parts).mean()))
            self.step += 1
        if len(self.periods_s) > begun:
            self.turns_s.append(statistics.median(self.periods_s[begun:]))

    def _backward(self, part: Batch) -> torch.Tensor:
        loss = self.workload.loss(self.trained, part)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _batch(self) -> Batch:
        """Return this rank's part of the step's global batch; the first rank has the first samples."""
        if not self.shares:
            return self.workload.batch(self.seed, self.step, self.rank)
        begin = sum(self.shares[: self.rank])
        whole = whole_batch(self.workload, self.seed, self.step)
        inputs, targets = (tensor[begin : begin + self.shares[self.rank]] for tensor in whole)
        return inputs, targets

    def warm_up(self) -> None:
        """Run two steps and undo them: restore weights and buffers, drop optimizer state and samples."""
        with self._undone():
            self.train(2)
        self.optimizer = self._new_optimizer()
        self.step = 0
        for samples in (self.periods_s, self.turns_s, self.blocked_s, self.losses):
            samples.clear()

    def outcome(self) -> dict[str, Any]:
        """Return this rank's results of a finished run; one more step, undone later, measures memory."""
        digest = hashlib.sha256()
        for value in self.model.parameters():
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        with self._undone():
            peak = self._persistent_bytes() + step_peak_bytes(lambda: self.train(1), self.device)
        return {
            "rank": self.rank, "parameters": digest.hexdigest(), "losses": self.losses,
            "periods_s": self.periods_s, "turns_s": self.turns_s, "peak_memory_bytes": peak,
            "blocked_s": statistics.fmean(self.blocked_s) if self.blocked_s else 0.0,
        }  # fmt: skip

    def _persistent_bytes(self) -> int:
        """Return the persistent bytes: parameters, buffers, gradients (DDP's buckets), optimizer state."""
        parameters = list(self.model.parameters())
        held = sum(t.nbytes for t in [*parameters, *self.model.buffers()]) + state_bytes(self.optimizer)
        return held + sum(p.nbytes for p in parameters if p.requires_grad)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.workload.lr)([p for p in self.model.parameters() if p.requires_grad])

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore weights and buffers after the context."""
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        yield
        self.model.load_state_dict(saved)


def whole_batch(workload: Workload, seed: int, step: int) -> Batch:
    """Return the samples of all ranks in a step."""
    own = [workload.batch(seed, step, rank) for rank in range(dist.get_world_size())]
    inputs, targets = (torch.cat(parts) for parts in zip(*own, strict=True))
    return inputs, targets


def attached_runner(
    name: str,
    plan: Plan,
    workload: Workload,
    device: torch.device,
    seed: int,
    classes: Sequence[str],
    group: dist.ProcessGroup | None,
) -> Runner | None:
    """Return this rank's runner of a way; None if the plan lacks its class.

    `classes` lists all ranks' classes; `group` has the ranks of the strongest class.
    """
    rank = dist.get_rank()
    if classes[rank] not in plan.classes:
        return None
    model = workload.make_model(seed).to(device)
    planned_forward.attach(model, choosers.following(plan[classes[rank]].assignment), plan.check_graph)
    shares, passes, is_alone = list[int](), 1, len(plan.classes) < len(set(classes))
    if plan.levers is not None and (plan.levers.used or is_alone):
        equal = plan.batch[0][0]
        shares = [plan.levers_of(name).samples or equal if name in plan.classes else 0 for name in classes]
        passes = plan.levers_of(classes[rank]).passes
    trained: torch.nn.Module = model
    if not is_alone:
        trained = in_ddp(model, BUCKET_CAP_MB)
    elif classes.count(classes[rank]) > 1 or passes > 1:
        trained = in_ddp(model, BUCKET_CAP_MB, {"process_group": group})
    return Runner(name, model, trained, workload, seed, rank, device, shares, passes)
