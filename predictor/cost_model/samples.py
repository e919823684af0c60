"""Samples: calls with their measured seconds on a device; the choice of calls to measure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from qsync.errors import MismatchError
from qsync.lowering.lowered_graph import FUSED
from qsync.operators.registry import FORMS
from qsync.predictor.cost_model.op_calls import (
    Call,
    Direction,
    calls,
    has_direction,
    least_s,
    moved_bytes,
    operations,
    sum_s,
    value_call,
)
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.records.variant import CHANNELS_LAST, variant_of

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
_FORMS = {form for forms in FORMS.values() for form in forms} - {"plain"}
# The least seconds of a sample: the resolution of clocks.
MIN_SAMPLE_S = 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """One direction of a call in a mode, with its measured seconds on the device of `sheet`."""

    call: Call
    mode: str
    direction: Direction
    seconds: float
    sheet: DataSheet
    source: str = ""


def samples_of(graph: OpGraph, profile: Profile, sheet: DataSheet | None = None) -> list[Sample]:
    """List the measured operators and casts of a profile; equal calls give one median sample.

    Without a `sheet`, the peaks are those of the profile's fastest operators (`sheet_of`). Filled-in costs
    are left out, and so are operators that save less or run in another operator's epilogue. An 8-bit product
    includes the activation in its epilogue. Raises MismatchError for a profile of another graph.

    >>> samples_of(graph, profile)
    """
    profile.check_graph(graph)
    if profile.origin == "simulated":
        raise MismatchError(f"the profile of {profile.device_class} is simulated; learn from a measured one")
    sheet = sheet or sheet_of(graph, profile)
    seconds: dict[tuple[Call, str, Direction], list[float]] = defaultdict(list)
    for op, call in calls(graph):
        if op.name in profile.filled or (call.is_product and all(a.parameter for a in call.inputs)):
            continue  # a product of parameters only: part of graphs that time single calls
        for key, cost in profile.ops.get(op.name, {}).items():
            variant = variant_of(key)
            if variant.form not in (*_FORMS, FUSED) and not variant.as_traced:
                _record(seconds, call, variant.mode, cost.forward_s, cost.backward_s)
    values = value_call(graph)
    for (value, source, target), cost in profile.casts.items():
        if value in values:
            taken = source.removesuffix(CHANNELS_LAST)
            _record(seconds, values[value], f"{taken} {target}", cost.forward_s, cost.backward_s)
    return [
        Sample(call, mode, direction, max(statistics.median(times), MIN_SAMPLE_S), sheet, graph.hash)
        for (call, mode, direction), times in seconds.items()
    ]


def without_sums(sample: Sample) -> float:
    """Return a sample's seconds without the additions of its gradients (`sum_s`).

    At least half of the seconds remain, as the added bytes may still be in a cache.
    """
    return max(sample.seconds - sum_s(sample.call, sample.direction, sample.sheet), sample.seconds / 2)


def _record(
    seconds: dict[tuple[Call, str, Direction], list[float]], call: Call, mode: str, *times: float
) -> None:
    for direction, time in zip(DIRECTIONS, times, strict=True):
        if has_direction(call, mode, direction):
            seconds[call, mode, direction].append(time)


def sheet_of(graph: OpGraph, profile: Profile) -> DataSheet:
    """Estimate a device's data sheet from the highest rates among a profile's operators.

    `launch_s` is the median time of operators that move no bytes. Measured peaks are better
    (`qsync.what_if.cost_learning.measure_sheet`).
    """
    rates: dict[str, float] = {}
    rough: dict[str, float] = {}  # rates of types whose products were all too short to time
    bandwidth, idle = 0.0, []
    for op, call in calls(graph):
        for key, cost in profile.ops.get(op.name, {}).items():
            mode, form = variant_of(key).mode, variant_of(key).form
            if form == FUSED:
                continue
            done = operations(call, mode, "forward", "bf16")
            if not cost.forward_s > MIN_SAMPLE_S:
                rough |= {name: max(rough.get(name, 1.0), n / MIN_SAMPLE_S) for name, n in done.items()}
                continue
            for type_name, count in done.items():
                rates[type_name] = max(rates.get(type_name, 0.0), count / cost.forward_s)
            moved = moved_bytes(call, mode, "forward")
            if not moved:
                idle.append(cost.forward_s)
            elif not done:
                bandwidth = max(bandwidth, moved / cost.forward_s)
    bandwidth = bandwidth or max(rates.values(), default=1e11) / 10
    launch = statistics.median(idle) if idle else 1e-5
    source = f"the profile of {profile.device_class}"
    return DataSheet(profile.device_class, {**rough, **rates}, bandwidth, 0, 2**25, launch, None, source)


def choose(wanted: Iterable[Call], num: int, sheet: DataSheet) -> list[Call]:
    """Choose about `num` calls to measure, spread over each kind from smallest to largest.

    The spread determines a kind's law of launch, products and bytes (`roofline_law`). Every kind gets its
    proportional number, and at least one.

    >>> choose(pool(2000), 120, sheet)
    """
    distinct = list(dict.fromkeys(wanted))
    by_kind: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(distinct, key=lambda call: least_s(call, "fp32", "forward", sheet)):
        by_kind[call.kind].append(call)
    chosen: list[Call] = []
    for members in by_kind.values():
        share = min(max(round(num * len(members) / len(distinct)), 1), len(members))
        chosen += [members[int((k + 0.5) * len(members) / share)] for k in range(share)]
    return chosen
