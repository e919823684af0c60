"""Predict the memory of a training step of a grown model on every device class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from qsync.backend.devices.device_detection import detect_class, device_of
from qsync.errors import FormatError, InfeasibleError, UnsupportedError, shortened
from qsync.expansion.apply.grow import build_grown
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.lowering.incremental import lower
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory.peak import peak_memory
from qsync.predictor.profiling.made_optimizer import MakeOptimizer, made, state_bytes
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import OpGraph
from qsync.records.json_files import check_kind
from qsync.tracing.tracer import capture


@dataclass(frozen=True, slots=True)
class Fit:
    """The predicted memory of a training step on one device class.

    All sizes are bytes per rank, margin included. `fp32_bytes` is the peak in FP32. `least_bytes` is the
    lowest peak with one precision for all operators, `least_in` that precision, `budget_bytes` the memory of
    the class.
    """

    device_class: str
    fp32_bytes: int
    least_bytes: int
    least_in: str
    budget_bytes: int

    @property
    def is_lowered(self) -> bool:
        """Return whether the step fits only in a lower precision."""
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
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
) -> tuple[Fit, ...]:
    r"""Predict whether the grown model can train within the memory of every device class.

    The grown model is built and traced on the meta device, which needs no memory. qsync's memory model
    (`predictor.memory`) predicts the peak of a training step: parameters, gradients, optimizer state and
    activations. A class whose memory is too small for FP32 is judged by the precision with the lowest peak.
    Activation recomputation is not considered. Neither is the host memory of the expansion itself: the small
    model and twice the grown one.

    Args:
        model: The small model; the meta device is supported.
        plan: The plan to grow it.
        budgets: A cluster, or bytes by the name of a device class like this device.
        example_inputs: One batch of a rank: a tensor, a tuple or a dict.
        make_optimizer: Creates the optimizer, or a list of several, for a list of parameters.

    Returns:
        The prediction for each class.

    Raises:
        InfeasibleError: A class cannot hold the step. The message states class, need and budget.
        FormatError: No budget is given, or an argument is of another kind.
        MismatchError: `model` is not the planned model.
        TracingError: The grown model cannot be traced.
        UnsupportedError: The optimizer cannot step on the meta device.

    Example:
        >>> print(*qsync.check_growth(model, plan, {"t4": 16 * 2**30}, batch), sep="\n")
        t4: 21.3 GiB in FP32, 15.1 GiB in int8, of 16.0 GiB
    """
    check_kind(plan, ExpansionPlan, "plan", "qsync.plan_expansion")
    plan.check_small(model)
    cluster = budgets if isinstance(budgets, Cluster) else _cluster_like_here(model, budgets)
    graph, optimizer_bytes = _traced(model, plan, example_inputs, make_optimizer)
    found = tuple(_fit(one, graph, optimizer_bytes, cluster.num_ranks) for one in cluster.classes)
    for fit in found:
        if fit.least_bytes > fit.budget_bytes:
            num = sum(value.num_elements for value in graph.parameters)
            lower_too = f" and {_size(fit.least_bytes)} in {fit.least_in}" if fit.least_in != "fp32" else ""
            raise InfeasibleError(
                f"{fit.device_class}: a step of the grown {graph.model} ({num:,} parameters) needs "
                f"{_size(fit.fp32_bytes)} in FP32{lower_too}, but its memory is {_size(fit.budget_bytes)}; "
                "grow less, use a smaller batch, or give the class more memory"
            )
    return found


def _traced(
    model: torch.nn.Module,
    plan: ExpansionPlan,
    example_inputs: Any,
    make_optimizer: MakeOptimizer,
) -> tuple[OpGraph, int]:
    """Return the training graph of the grown model and the bytes of its optimizer state."""
    with torch.device("meta"):
        new = build_grown(model, plan).to("meta").train()
    small = dict(model.named_parameters(remove_duplicate=False))
    for name, value in new.named_parameters():
        source = small[plan.tensors[name].source]
        value.data = value.data.to(source.dtype)
        value.requires_grad_(source.requires_grad)
    inputs = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, example_inputs)
    return capture(new, inputs), _optimizer_bytes(new, make_optimizer)


def _optimizer_bytes(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> int:
    """Return the bytes of an optimizer's state after one step."""
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = made(make_optimizer, trained)
    try:
        for value in trained:
            value.grad = torch.empty_like(value)
        with _ZerosOnMeta():  # type: ignore[no-untyped-call]
            optimizer.step()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UnsupportedError(
            f"make_optimizer's optimizer cannot take a step on the meta device ({shortened(error)}); "
            "give an optimizer with equal state that can, such as torch.optim.AdamW without fused=True"
        ) from error
    return state_bytes(optimizer, trained)


class _ZerosOnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Read 0 from tensors on the meta device, which have no values (Adafactor reads weight norms)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _fit(device_class: DeviceClass, graph: OpGraph, optimizer_bytes: int, num_ranks: int) -> Fit:
    """Predict the memory on one device class."""

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
    """Return a cluster with one rank per budget, on devices like the model's.

    The device of a model on the meta device is the CPU.
    """
    if not budgets:
        raise FormatError("budgets is empty; give a cluster, or bytes by device class")
    if not isinstance(budgets, Mapping):
        raise FormatError(
            f"budgets must be a cluster or bytes by device class, found {shortened(budgets)}; give "
            '{"t4": 16 * 2**30}'
        )
    for name, num in budgets.items():
        if not isinstance(name, str) or type(num) not in (int, float) or not 0 < num < math.inf:
            raise FormatError(
                f"the budget of {shortened(name)} must be a positive number of bytes, found "
                f'{shortened(num)}; give {{"t4": 16 * 2**30}}'
            )
    device = device_of(model)
    here = detect_class(torch.device("cpu") if device.type == "meta" else device)
    classes = tuple(replace(here, name=name, memory_bytes=int(num)) for name, num in budgets.items())
    return Cluster(classes, Link(0.0, 1e12))


def _size(num_bytes: int) -> str:
    """Format a number of bytes."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
