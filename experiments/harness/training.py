"""Training steps that are timed as they run: period, and how long this rank was blocked by the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qsync.experiments.workloads.demo_workloads import Workload


@dataclass(slots=True)
class Runner:
    """One run of the demo on one rank: a model, alone or in DDP, with its optimizer.

    `periods_s` holds the time from one step's last reduced gradient to the next step's, `blocked_s` how long
    each backward pass lasted after this rank's own last gradient was there, `cpu_s` the CPU time of this
    process in that period (all its threads: on a CPU that is compute and communication without pauses).
    """

    name: str
    model: torch.nn.Module
    trained: torch.nn.Module
    optimizer: torch.optim.Optimizer
    workload: Workload
    seed: int
    rank: int
    device: torch.device
    step: int = 0
    periods_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _last_gradient: float = 0.0

    def __post_init__(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._mark)

    def _mark(self, _: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def train(self, num_steps: int) -> None:
        """Take steps; the first of them starts with all ranks aligned and is not a period."""
        reduced: float | None = None
        reduced_cpu = 0.0
        for _ in range(num_steps):
            inputs, targets = self.workload.batch(self.seed, self.step, self.rank)
            loss = self.workload.loss_fn(self.trained(inputs.to(self.device)), targets.to(self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            self._wait()
            now, cpu = time.perf_counter(), time.process_time()
            if reduced is not None:
                self.cpu_s.append(cpu - reduced_cpu)
                self.periods_s.append(now - reduced)
                self.blocked_s.append(now - self._last_gradient)
            reduced, reduced_cpu = now, cpu
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(float(loss.detach()))
            self.step += 1

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_optimizer(lr: float) -> Callable[[object], torch.optim.Optimizer]:
    """The demo's optimizer, also what the profiler times."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=True)  # type: ignore[arg-type]


def persistent_bytes(runner: Runner) -> int:
    """Bytes that stay between steps: parameters, buffers, gradients (they live in DDP's buckets) and
    optimizer state.
    """
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    gradients = sum(p.numel() * p.element_size() for p in runner.model.parameters() if p.requires_grad)
    state = [
        v for entry in runner.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)
    ]
    return gradients + sum(t.numel() * t.element_size() for t in (*tensors, *state))
