"""Whether a grown model will fit: the memory of a training step on every device class, before it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from qsync.backend.device_detection import detect_class, device_of
from qsync.errors import FormatError, InfeasibleError, UnsupportedError
from qsync.expansion.apply.grow import built
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.lowering.rules import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.tracing.tracer import capture


@dataclass(frozen=True, slots=True)
class Fit:
    """One device class: the peak of a step in FP32, the least that one precision for all operators comes to,
    which precision that is, and what the class has. Bytes per rank, margin included; predicted.
    """

    device_class: str
    fp32_bytes: int
    least_bytes: int
    least_in: str
    budget_bytes: int

    @property
    def is_lowered(self) -> bool:
        """Whether it fits only in a lower precision."""
        return self.fp32_bytes > self.budget_bytes

    def __str__(self) -> str:
        lowered = f", {_size(self.least_bytes)} in {self.least_in}" if self.is_lowered else ""
        return (
            f"{self.device_class}: {_size(self.fp32_bytes)} in FP32{lowered}, of {_size(self.budget_bytes)}"
        )


def check_growth(
    model: torch.nn.Module,
    plan: ExpansionPlan,
    budgets: Cluster | Mapping[str, int],
    example_inputs: Any,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[Fit, ...]:
    """Whether what `model` grows to by `plan` can train within the memory of every device class.

    The grown model is made on the meta device, which takes no memory, traced there, and the peak of a
    training step predicted by qsync's memory model (`predictor.memory`): parameters, gradients, what
    `make_optimizer` keeps, activations. `budgets` is a cluster, or bytes by the name of a class of devices
    like this one. Where FP32 does not fit, the least of the class's precisions counts; recomputing blocks is
    left out, and so is what growing itself takes on the host: the small model and the grown one twice.
    `model` may be on the meta device too.

    Returns what was predicted of each class. Raises InfeasibleError with class, need and budget where one
    cannot hold it, TracingError for a model that cannot be traced, UnsupportedError for an optimizer that
    cannot take a step on the meta device.

    >>> print(*qsync.check_growth(model, plan, {"t4": 16 * 2**30}, batch), sep="\\n")
    t4: 21.3 GiB in FP32, 15.1 GiB in int8, of 16.0 GiB
    """
    cluster = budgets if isinstance(budgets, Cluster) else _cluster_like_here(model, budgets)
    graph, optimizer_bytes = _traced(model, plan, example_inputs, make_optimizer)
    found = tuple(_fit(one, graph, optimizer_bytes, cluster.num_ranks) for one in cluster.classes)
    for fit in found:
        if fit.least_bytes > fit.budget_bytes:
            num = sum(value.num_elements for value in graph.parameters)
            lower_too = f" and {_size(fit.least_bytes)} in {fit.least_in}" if fit.least_in != "fp32" else ""
            raise InfeasibleError(
                f"{fit.device_class}: a step of the grown {graph.model} ({num:,} parameters) needs "
                f"{_size(fit.fp32_bytes)} in FP32{lower_too}, and its memory is {_size(fit.budget_bytes)}; "
                "grow less, take a smaller batch, or give the class more memory"
            )
    return found


def _traced(
    model: torch.nn.Module,
    plan: ExpansionPlan,
    example_inputs: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
) -> tuple[OpGraph, int]:
    """The graph of the grown model in training, and the bytes that its optimizer keeps; nothing is
    computed.
    """
    with torch.device("meta"):
        new = built(model, plan).to("meta").train()
    small = dict(model.named_parameters(remove_duplicate=False))
    for name, value in new.named_parameters():
        source = small[plan.tensors[name].source]
        value.data = value.data.to(source.dtype)
        value.requires_grad_(source.requires_grad)
    inputs = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, example_inputs)
    return capture(new, inputs), _optimizer_bytes(new, make_optimizer)


def _optimizer_bytes(model: torch.nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> int:
    trained = [value for value in model.parameters() if value.requires_grad]
    try:
        optimizer = make_optimizer(trained)
        for value in trained:
            value.grad = torch.empty_like(value)
        optimizer.step()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UnsupportedError(
            f"make_optimizer's optimizer cannot take a step on the meta device ({error}); give one that "
            "keeps as much, without fused=True, as torch.optim.AdamW does"
        ) from error
    kept = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(value.numel() * value.element_size() for value in kept if isinstance(value, torch.Tensor))


def _fit(device_class: DeviceClass, graph: OpGraph, optimizer_bytes: int, num_ranks: int) -> Fit:
    def peak(precision: Precision) -> int:
        assignment = {
            op.name: precision
            for op in graph.adjustable
            if precision in PRECISIONS_BY_KIND[op.kind] and precision is not Precision.FP32
        }
        return peak_memory(
            lower(graph, assignment), optimizer_bytes=optimizer_bytes, num_ranks=num_ranks,
            device=device_class.device,
        ).peak_bytes  # fmt: skip

    fp32 = peak(Precision.FP32)
    least, name = fp32, Precision.FP32
    if fp32 > device_class.memory_bytes:
        least, name = min(((peak(p), p) for p in device_class.precisions), key=lambda found: found[0])
    return Fit(device_class.name, fp32, least, str(name), device_class.memory_bytes)


def _cluster_like_here(model: torch.nn.Module, budgets: Mapping[str, int]) -> Cluster:
    """One rank of each class, on devices like the model's; of a model on the meta device, the CPU."""
    if not budgets:
        raise FormatError("there is no budget to check; give a cluster, or bytes by device class")
    device = device_of(model)
    here = detect_class(torch.device("cpu") if device.type == "meta" else device)
    classes = tuple(replace(here, name=name, memory_bytes=num) for name, num in budgets.items())
    return Cluster(classes, Link(0.0, 1e12))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
