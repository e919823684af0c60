"""Run a model's training steps under plans of rank 0: timed, with peak bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import qsync
from qsync import Plan, api
from qsync.distributed.agreement import from_rank_zero
from qsync.distributed.data_parallel import in_ddp
from qsync.experiments.harness.measured_memory import bucket_bytes, state_bytes, step_peak_bytes


def plans_of_first_rank(make: Callable[[], Mapping[str, Plan]]) -> dict[str, Plan]:
    """Create plans on rank 0, and return them by name on every rank."""
    made = from_rank_zero("planning", lambda: {name: plan.to_json() for name, plan in make().items()})
    return {name: Plan.from_json(plan) for name, plan in made.items()}


class PlannedSteps:
    """A model trained on this rank under a plan: precisions, samples, passes, recomputed blocks, state.

    A share larger than the batch repeats its samples.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        name: str,
        batch: Any,
        loss: Callable[..., torch.Tensor],
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        torch._dynamo.reset()
        api.wrap(model, plan, device_class=name)
        cap = plan.bucket_cap_bytes
        self._ddp = in_ddp(model, cap / 2**20 if cap else None)
        self._loss = loss
        share = plan.levers_of(name)
        samples = share.samples or len(batch[0])
        twice = [torch.cat([t, t]) for t in batch]
        self._batch, self._passes = tuple(t[:samples].clone() for t in twice), share.passes
        if share.samples is not None:
            qsync.weigh_gradients(self._ddp, samples, passes=share.passes)
        self._optimizer = make_optimizer(list(model.parameters()))
        if plan.levers is not None and plan.levers.state_parts is not None:
            qsync.divide_optimizer(self._ddp, self._optimizer)
        self._buckets = 0

    def timed(self) -> float:
        """Return the seconds of one step."""
        begun = time.perf_counter()
        self._step()
        return time.perf_counter() - begun

    def peak_bytes(self) -> int:
        """Return the peak bytes of one step: persistent ones, and the step's own."""
        self._step()
        comes_and_goes = step_peak_bytes(self._step, torch.device("cpu"))
        tensors = [*self._ddp.parameters(), *self._ddp.buffers(), *self._batch[:1]]
        held = sum(t.nbytes for t in tensors) + state_bytes(self._optimizer)
        return held + self._buckets + comes_and_goes

    def _step(self) -> None:
        for part in qsync.micro_batches(self._ddp, self._batch, self._passes):
            self._loss(self._ddp, part).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._buckets = sum(bucket_bytes(self._ddp))
        self._optimizer.zero_grad(set_to_none=True)
