"""The profile of an unmeasured device: a roofline at typical fractions of its peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.cost_model.fill_profile import priced_on
from qsync.predictor.cost_model.op_calls import Call, Direction, calls, least_s, moved_bytes
from qsync.predictor.cost_model.roofline_law import Array
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph
from qsync.records.profiles import SIMULATED, Cost, Profile, Sensitivity

# Fractions of the peaks that training steps reach (an assumption; docs/results/gpu.md has steps of an H100).
# FP32 products keep CUDA cores busier than memory can keep tensor cores.
# 8-bit kernels of the H100 reached 0.2 to 0.28 without casts, and were no faster than BF16 kernels.
PART_OF_BANDWIDTH = 0.8
PART_OF_FLOPS = {"fp32": 0.85, "tf32": 0.55, "bf16": 0.55, "fp16": 0.55, "int8": 0.3, "fp8": 0.3}
# Host seconds (forward, backward) for one operator of an eager step: a product with its casts, and any other.
# From two host-bound steps on an H100: BERT-base and GPT-2 medium in BF16.
HOST_OF_PRODUCT, HOST_OF_OTHER = Cost(160e-6, 230e-6), Cost(22e-6, 32e-6)
# Bytes that AdamW moves per FP32 parameter (reads four numbers, writes three), keeps as state, and has in use
# beside it in its step: a root of every parameter on GPUs, where torch updates them at once, and two tensors
# of one parameter's size on CPUs.
_OPTIMIZER_BYTES, _STATE_BYTES, _WORKSPACE_BYTES = 28, 8, 4


class PartsOfPeaks:
    """A `CostModel` replacement that prices calls at typical fractions of a device's peaks.

    >>> costs_of(PartsOfPeaks(), [(call, "int8")], datasheet("T4"))
    """

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Array:
        """Return the seconds (N,) of calls in a mode and direction on a device."""
        return np.array([least_s(call, mode, d, _usual(sheet)) for call, mode, d, sheet in asked])


def _usual(sheet: DataSheet) -> DataSheet:
    """Return a data sheet with peaks reduced to the rates that steps reach."""
    rates = {name: rate * PART_OF_FLOPS[name] for name, rate in sheet.flops_per_s.items()}
    return replace(sheet, flops_per_s=rates, bytes_per_s=sheet.bytes_per_s * PART_OF_BANDWIDTH)


def sheet_profile(graph: OpGraph, sheet: DataSheet, device_class: str) -> Profile:
    """Return the simulated profile of a class from its data sheet alone, with AdamW.

    The host launches every kernel of an eager step, and a faster GPU waits for the launches.

    >>> sheet_profile(graph, datasheet("T4"), "T4").origin
    'simulated'
    """
    is_gpu, (ops, casts) = sheet.capability is not None, priced_on(graph, PartsOfPeaks(), sheet)
    sizes = [value.num_elements for value in graph.parameters if value.requires_grad]
    trained, largest = sum(sizes), max(sizes, default=0)
    found = Profile(
        device_class, graph.hash, graph.shapes_hash, ops, {}, casts, Cost(0.0),
        host_s=0.0, optimizer_s=trained * _OPTIMIZER_BYTES / sheet.bytes_per_s / PART_OF_BANDWIDTH,
        optimizer_bytes=trained * _STATE_BYTES, step_s={},
        optimizer_workspace_bytes=_WORKSPACE_BYTES * (trained if is_gpu else 2 * largest),
        machine={"data sheet": sheet.name, "source": sheet.source, "device": "cuda" if is_gpu else "cpu"},
        origin=SIMULATED, model=graph.model, batch=graph.batch_shapes,
        state_bytes={p.name: p.num_elements * _STATE_BYTES for p in graph.parameters if p.requires_grad},
    )  # fmt: skip
    if not is_gpu:
        return found
    launches = {op.name: {mode: _launch(call, mode) for mode in ops[op.name]} for op, call in calls(graph)}
    nothing = dict.fromkeys(casts, (Cost(0.0), Cost(0.0)))  # HOST_OF_PRODUCT includes a product's casts
    return replace(found, launches=replace(found, ops=launches, cast_fit=nothing))


def _launch(call: Call, mode: str) -> Cost:
    """Return the host's seconds of launching a call; a view takes none."""
    if moved_bytes(call, mode, "forward") == 0.0:
        return Cost(0.0)
    host = HOST_OF_PRODUCT if call.is_product else HOST_OF_OTHER
    return Cost(host.forward_s, host.backward_s if call.num_gradients else 0.0)


def assumed_sensitivity(graph: OpGraph) -> Sensitivity:
    """Return a sensitivity assumed from operations and mantissa bits, for a model without data.

    Its unit is not the squared gradient norm: it only orders operators and precisions.
    """
    total = sum(op.flops for op in graph.adjustable) or 1
    omega = {
        op.name: {str(p): op.flops / total * 4.0**-p.facts.bits for p in PRECISIONS_BY_KIND[op.kind]}
        for op in graph.adjustable
    }
    return Sensitivity(graph.hash, "assumed", omega)
