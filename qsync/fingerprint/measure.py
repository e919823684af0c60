"""Measure small models: prediction errors, chosen precisions, and operators inside a step beside alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from qsync import api
from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import precisions_to_profile
from qsync.fingerprint.in_step import Steps, gaps_of
from qsync.fingerprint.small_models import loss_of_targets, made
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import LoweredGraph
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory.peak import StepMemory, bytes_throughout
from qsync.predictor.profiling.clocks import ShareClock
from qsync.predictor.profiling.memory_trace import TimeMarks, trace_memory
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.records.cluster import Cluster, Link
from qsync.records.fingerprint import SmallModel
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.replayer import replay
from qsync.runtime import choosers

_WIDTH, _TURNS, _PLANS = 384, 3, 2
Unsupported = Callable[[OpGraph, Precision], Mapping[str, str]]


def measure_model(
    name: str, until_s: float, progress: Callable[[str], None], width: int | None = None
) -> SmallModel:
    """Measure one of `SMALL_MODELS` on one thread of a CPU.

    After `until_s` (of `time.perf_counter`) plans take no further turn, and no operator runs alone.
    """
    model, batch = made(name, width or _WIDTH)
    loss, trained = api.loss_of(model, batch, loss_of_targets), api.trained_parameters(model)
    device_class = replace(detect_class(torch.device("cpu")), name="cpu", emulated_share=1.0)  # for CPU time
    precisions = precisions_to_profile(device_class, model)
    with api.running(model, loss, dynamic=False) as program:
        steps, kernels = Steps(program, loss, torch.optim.AdamW(trained)), program.kernels
        options = ProfilerOptions(progress=lambda text: progress(f"{name}: {text}"))
        profiler = Profiler(program, loss, trained, precisions, ShareClock(1.0), options)
        graph = profiler.graph
        plans = [_drawn(graph, precisions, seed, program.unsupported) for seed in range(_PLANS)]
        measured_s: list[list[float]] = [[] for _ in plans]
        for turn in range(_TURNS):
            if turn and time.perf_counter() > until_s:
                break
            profiler.round()
            for plan, found in zip(plans, measured_s, strict=True):
                steps.begin(choosers.following(plan))
                found += [steps.seconds() for _ in range(2)]
        profile = profiler.profile("cpu", {}, 1.0)
        memory_errors = []
        for plan in plans:
            program.choose(choosers.following(plan), marks := TimeMarks(graph))
            most = int(trace_memory(marks, loss, trained).most.max())
            memory_errors.append(_memory_error(lower(graph, plan, kernels.sixteen_bit), most, profile))
        gaps, chosen, why = [], {}, {}
        for precision in precisions:
            if time.perf_counter() < until_s:
                progress(f"{name}: operators in {precision}, in a step and alone")
                gaps += gaps_of(steps, choosers.uniform(precision, kernels))
            if precision is not Precision.FP32:
                program.choose(choosers.uniform(precision, kernels), strict=False)
                loss()
                chosen[str(precision)] = {op: str(p) for op, p in program.assignment().items()}
                why[str(precision)] = program.why_not(graph, precision)
    cluster = Cluster((device_class,), Link(0.0, 1e9))
    predicted_s = [replay(graph, {"cpu": plan}, {"cpu": profile}, cluster).step_s for plan in plans]
    step_errors = [p / statistics.median(m) - 1.0 for p, m in zip(predicted_s, measured_s, strict=True)]
    uniform_s = {str(precision): profile.step_s[str(precision)] for precision in precisions}
    return SmallModel(name, uniform_s, tuple(step_errors), tuple(memory_errors), chosen, why, tuple(gaps))


def _drawn(
    graph: OpGraph, precisions: Sequence[Precision], seed: int, unsupported: Unsupported
) -> dict[str, Precision]:
    """Draw a mixed plan of what the device has a kernel for."""
    draw, without = random.Random(seed), {p: unsupported(graph, p) for p in precisions}
    return {
        op.name: draw.choice(
            [p for p in PRECISIONS_BY_KIND[op.kind] if op.name not in without.get(p, {op.name})]
        )
        for op in graph.adjustable
    }


def _memory_error(lowered: LoweredGraph, measured: int, profile: Profile) -> float:
    """Return the relative error of a predicted peak, with weights, gradients and optimizer."""
    predicted = StepMemory(lowered, num_ranks=2, residuals=profile.memory_residuals).come_and_go()
    always = bytes_throughout(lowered.graph) + profile.optimizer_bytes
    return (always + int(predicted.max())) / (always + measured) - 1.0
