"""Profiles without measurement: of operators, other batch shapes, grown models, absent devices.

Filled costs are marked (`Profile.origin`, `Profile.filled`), so that every output can say so. Replay reads
them like any other cost. No model prices launches (`Profile.launches`): a filled profile has none, as if the
host always stayed ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from qsync.errors import CalibrationError, MismatchError
from qsync.operators.declaration import Role
from qsync.operators.precision import LARGEST, Precision, is_encoded
from qsync.operators.registry import PRECISIONS_BY_KIND, operand_type
from qsync.predictor.cost_model.model import CostModel, Priced, costs_of
from qsync.predictor.cost_model.op_calls import Call, calls, calls_by_name, cast_call, modes, value_call
from qsync.predictor.cost_model.samples import Sample, samples_of, sheet_of
from qsync.records.datasheets import DataSheet
from qsync.records.graph import Op, OpGraph
from qsync.records.memory_residuals import MemoryResiduals
from qsync.records.profiles import CARRIED, DEVICE_MEASURED, LEARNED, Cost, Profile
from qsync.records.variant import CHANNELS_LAST, variant_of

T = TypeVar("T")
Casts = Mapping[tuple[str, str, str], Cost]
# The two numbers of elements whose predicted costs define the line that prices casts of a pair of types.
_FEW_ELEMENTS, _MANY_ELEMENTS = 2**12, 2**20
_CARRIED_TYPES = ("fp32", "bf16")


def fill(
    profile: Profile,
    graph: OpGraph,
    model: CostModel | None = None,
    measured_on: OpGraph | None = None,
    sheet: DataSheet | None = None,
) -> Profile:
    """Return the profile for `graph` at its batch shape, with learned costs for unmeasured operators.

    At the profiled shape only missing operators and precisions are filled in. At another shape of the same
    model every cost is the measured one times the cost model's ratio,

        t_new = t_measured model(new) / model(old),

    for which `measured_on` must be the profiled graph. Without a `model` one is learned from the profile
    itself. `sheet` has the device's peaks, relative to which the model prices. Raises MismatchError for
    another model, or for another shape without `measured_on`.

    >>> larger = fill(profile, qsync.capture(model, larger_batch), measured_on=graph)
    """
    if profile.graph_hash != graph.hash:
        raise MismatchError(
            f"the profile of {profile.device_class} was measured for another model (graph "
            f"{profile.graph_hash}, this one is {graph.hash}); simulate this one, or profile it"
        )
    same = profile.shapes_hash == graph.shapes_hash
    before = graph if same else measured_on
    if before is None or before.shapes_hash != profile.shapes_hash:
        raise MismatchError(
            f"the profile of {profile.device_class} was measured for another batch shape; give the graph "
            "that it was measured on as measured_on=, or profile this shape"
        )
    device = sheet or sheet_of(before, profile)
    model = model or learned_from(before, profile, device)
    ops, added = _filled_ops(profile, graph, calls_by_name(before), model, device)
    casts = profile.casts if same else _scaled_casts(profile, graph, value_call(before), model, device)
    grown = 1.0 if same else _size(graph) / max(_size(before), 1)
    outside = Cost(profile.outside.forward_s * grown, profile.outside.backward_s * grown)
    return replace(
        profile, shapes_hash=graph.shapes_hash, batch=graph.batch_shapes, ops=ops, casts=casts,
        outside=outside, step_s=profile.step_s if same else {},
        origin=_origin(profile, LEARNED) if added else profile.origin,
        filled={**profile.filled, **added}, error=profile.error if same else _error(profile, model),
        loading_s=profile.loading_s * grown, launches=None if added or not same else profile.launches,
        memory_residuals=profile.memory_residuals if same else profile.memory_residuals.scaled(grown),
    )  # fmt: skip


def carry(
    profile: Profile,
    graph: OpGraph,
    before: OpGraph,
    sources: Mapping[str, str],
    model: CostModel | None = None,
) -> Profile:
    """Carry the profile of one model over to a model that was grown from it.

    `sources` maps operators and values of `graph` to their sources in `before`, the profiled graph; several
    may share one source. Costs are scaled by the same ratio as in `fill`, with the model's stated error.
    Operators without a source get the model's cost. All costs are marked.

    >>> carry(profile, deeper, graph, {"blocks.1.fc": "blocks.0.fc", ...}).origin
    'carried'
    """
    profile.check_graph(before)
    device = sheet_of(before, profile)
    model = model or learned_from(before, profile, device)
    old, old_values = calls_by_name(before), value_call(before)
    by_value: dict[str, dict[tuple[str, str], Cost]] = {}
    for (value, start, end), cost in profile.casts.items():
        by_value.setdefault(value, {})[start, end] = cost
    named = replace(
        profile,
        ops=_renamed(profile.ops, sources),
        refused=_renamed(profile.refused, sources),
        casts={
            (name, *types): cost
            for name, source in sources.items()
            for types, cost in by_value.get(source, {}).items()
        },
    )
    ops, added = _filled_ops(named, graph, _renamed(old, sources), model, device)
    casts = _scaled_casts(named, graph, _renamed(old_values, sources), model, device)
    outside = _size(graph) / max(_size(before), 1)
    return replace(
        named, graph_hash=graph.hash, shapes_hash=graph.shapes_hash, model=graph.model,
        batch=graph.batch_shapes, ops=ops, casts=casts,
        outside=Cost(profile.outside.forward_s * outside, profile.outside.backward_s * outside),
        step_s={}, origin=_origin(profile, CARRIED), filled=added, error=_error(profile, model),
        launches=None, memory_residuals=MemoryResiduals(),
    )  # fmt: skip


def _renamed(found: Mapping[str, T], sources: Mapping[str, str]) -> dict[str, T]:
    """Return the entries of `found` under new names; `sources` maps new names to names in `found`."""
    return {name: found[source] for name, source in sources.items() if source in found}


def simulate(
    profile: Profile, graph: OpGraph, sheet: DataSheet, device_class: str, model: CostModel | None = None
) -> Profile:
    """Simulate the profile of an absent device that reaches a measured device's fractions of peak.

    The fractions come from the measured `profile` of any device, or from a `model`. A profile that was filled
    in for another shape needs a model learned at the measured shape. Loss and optimizer scale with bandwidth;
    the host's part and data loading stay. No measurement shows that another device reaches the same fractions
    of its own peaks, so the result is labelled simulated. Raises CalibrationError if no product was measured
    and no model is given.

    >>> simulate(profile, graph, datasheet("T4"), "infer").origin
    'simulated'
    """
    profile.check_graph(graph)
    here = sheet_of(graph, profile)
    model = model or CostModel(_measured(graph, profile, here))
    ops, casts = priced_on(graph, model, sheet)
    slower = here.bytes_per_s / sheet.bytes_per_s
    share = profile.emulated_share or 1.0
    return Profile(
        device_class, graph.hash, graph.shapes_hash, ops, {}, casts,
        Cost(profile.outside.forward_s * slower, profile.outside.backward_s * slower),
        host_s=profile.host_s * share, optimizer_s=profile.optimizer_s * slower,
        optimizer_bytes=profile.optimizer_bytes, state_bytes=profile.state_bytes, step_s={},
        machine=_where_from(sheet, profile, model),
        bucket_s_per_byte=profile.bucket_s_per_byte * slower, origin="simulated",
        loading_s=profile.loading_s * share,
    )  # fmt: skip


def priced_on(
    graph: OpGraph, model: Priced, sheet: DataSheet
) -> tuple[dict[str, dict[str, Cost]], dict[tuple[str, str], tuple[Cost, Cost]]]:
    """Return a model's costs of all operators, and cost lines of all casts, in a profile's form."""
    asked = [(op, call, mode) for op, call in calls(graph) for mode in modes(op, sheet.precisions)]
    ops: dict[str, dict[str, Cost]] = {op.name: {} for op in graph.ops}
    found = costs_of(model, [(call, mode) for _, call, mode in asked], sheet)
    for (op, _, mode), cost in zip(asked, found, strict=True):
        ops[op.name][mode] = cost
    pairs = sorted({(source, target) for _, source, target in possible_casts(graph, sheet.precisions)})
    return ops, cast_lines(pairs, model, sheet)


def _origin(profile: Profile, origin: str) -> str:
    """Return `origin`, or the profile's own origin if its device was not measured."""
    return origin if profile.origin in DEVICE_MEASURED else profile.origin


def _where_from(sheet: DataSheet, profile: Profile, model: CostModel) -> dict[str, str]:
    """Return the sources of a simulated profile, and a note if the model's samples contain no cast."""
    found = {"data sheet": sheet.name, "source": sheet.source, "shares of": profile.device_class}
    if not any(sample.call.kind == "cast" for sample in model.samples):
        found["casts"] = "not measured; as other passes over memory"
    return found


def learned_from(graph: OpGraph, profile: Profile, sheet: DataSheet | None = None) -> CostModel:
    """Learn a cost model from the measured operators and casts of one profile.

    Raises CalibrationError if the graph has products and none was measured, as in a filled profile.

    >>> model = learned_from(graph, profile)
    """
    return CostModel.learn(_measured(graph, profile, sheet))


def _measured(graph: OpGraph, profile: Profile, sheet: DataSheet | None) -> list[Sample]:
    """Return the samples of a profile; raise CalibrationError if all products are missing."""
    samples = samples_of(graph, profile, sheet)
    if any(call.is_product for _, call in calls(graph)) and not any(s.call.is_product for s in samples):
        raise CalibrationError(
            f"no product of the profile of {profile.device_class} was measured at this shape; give a model "
            "learned from the one that was: learned_from(graph, profile)"
        )
    return samples


def possible_casts(graph: OpGraph, precisions: tuple[Precision, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield (value, source, target) of every possible cast in lowerings of the graph, each once."""
    dtypes = {value.name: value.dtype for value in graph.inputs} | {op.name: op.dtype for op in graph.ops}
    carried = [name for name in _CARRIED_TYPES if name == "fp32" or Precision.BF16 in precisions]
    seen = set()
    for op in graph.ops:
        for j, name in enumerate(op.inputs):
            if dtypes[name] not in LARGEST:
                continue
            for target in _taken(op, j, precisions, carried):
                for source in dict.fromkeys((dtypes[name], *carried)):
                    key = (name, source, target)
                    if source != target and key not in seen:
                        seen.add(key)
                        yield key


def _taken(op: Op, index: int, precisions: tuple[Precision, ...], carried: list[str]) -> list[str]:
    """List the types to which an operator's input may be cast."""
    if op.role is Role.ADJUSTABLE:
        chosen = [p for p in PRECISIONS_BY_KIND[op.kind] if p in precisions]
        return list(dict.fromkeys(operand_type(op.kind, index, p) for p in chosen))
    return carried if op.role is Role.FOLLOWING else [op.dtype]


def _filled_ops(
    profile: Profile, graph: OpGraph, old: Mapping[str, Call], model: CostModel, sheet: DataSheet
) -> tuple[dict[str, dict[str, Cost]], dict[str, float]]:
    """Return the costs of all operators, and the stated errors of operators with predicted costs.

    `old` maps operators of `graph` to their measured calls.
    """
    asked = [
        (op, call, mode)
        for op, call in calls(graph)
        for mode in _modes_of(profile, graph, op)
        if not (call == old.get(op.name) and mode in profile.ops.get(op.name, {}))
    ]
    both = [(call, old.get(op.name, call), variant_of(mode).mode) for op, call, mode in asked]
    ops = {op.name: dict(profile.ops[op.name]) for op in graph.ops if op.name in profile.ops}
    added = {}
    for (op, _, mode), (new, then) in zip(asked, _new_and_old(model, both, sheet), strict=True):
        measured = profile.ops.get(op.name, {}).get(mode)
        is_known = measured is not None and op.name in old
        ops.setdefault(op.name, {})[mode] = scaled(measured, new, then) if measured and is_known else new
        added[op.name] = model.error.of(op.kind) if model.error else 1.0
    return ops, added


def _scaled_casts(
    profile: Profile, graph: OpGraph, old: Mapping[str, Call], model: CostModel, sheet: DataSheet
) -> Casts:
    """Return the costs of measured casts at new sizes; `old` maps values to their measured calls."""
    values = value_call(graph)
    keys = [key for key in profile.casts if key[0] in values and key[0] in old]
    both = [
        (values[v], old[v], f"{source.removesuffix(CHANNELS_LAST)} {target}") for v, source, target in keys
    ]
    found = zip(keys, _new_and_old(model, both, sheet), strict=True)
    return {key: scaled(profile.casts[key], new, then) for key, (new, then) in found}


def _new_and_old(
    model: CostModel, asked: Sequence[tuple[Call, Call, str]], sheet: DataSheet
) -> Iterator[tuple[Cost, Cost]]:
    """Yield the model's costs of (new call, old call, mode) triples: (new cost, old cost)."""
    new = costs_of(model, [(call, mode) for call, _, mode in asked], sheet)
    old = costs_of(model, [(call, mode) for _, call, mode in asked], sheet)
    return zip(new, old, strict=True)


def _modes_of(profile: Profile, graph: OpGraph, op: Op) -> list[str]:
    """List an operator's measured modes, and the modes that only other operators of its role have."""
    own = list(profile.ops.get(op.name, {}))
    if op.role is not Role.ADJUSTABLE:
        return own or list(modes(op, (Precision.FP32, Precision.BF16)))
    names = [other.name for other in graph.adjustable]
    seen = {variant_of(mode).mode for name in names for mode in profile.ops.get(name, {})}
    lacking = (seen & {str(p) for p in PRECISIONS_BY_KIND[op.kind]}) - {variant_of(m).mode for m in own}
    return own + sorted(lacking - set(profile.refused.get(op.name, {})))


def scaled(measured: Cost, new: Cost, old: Cost) -> Cost:
    """Scale a measured cost to another size by the model's ratio between the sizes."""
    return Cost(
        measured.forward_s * (new.forward_s / old.forward_s if old.forward_s else 1.0),
        measured.backward_s * (new.backward_s / old.backward_s if old.backward_s else 1.0),
        measured.spread_s * (new.total_s / old.total_s if old.total_s else 1.0),
    )


def cast_lines(
    pairs: list[tuple[str, str]], model: Priced, sheet: DataSheet
) -> dict[tuple[str, str], tuple[Cost, Cost]]:
    """Return the cost line of each pair of types, through a small and a large predicted cast."""
    fits = {}
    for source, target in pairs:
        gradient, sizes = not is_encoded(target), (_FEW_ELEMENTS, _MANY_ELEMENTS)
        asked = [(cast_call((size,), gradient, False), f"{source} {target}") for size in sizes]
        few, many = ((cost.forward_s, cost.backward_s) for cost in costs_of(model, asked, sheet))
        rise = [max(b - a, 0.0) / (_MANY_ELEMENTS - _FEW_ELEMENTS) for a, b in zip(few, many, strict=True)]
        start = [max(a - _FEW_ELEMENTS * r, 0.0) for a, r in zip(few, rise, strict=True)]
        fits[source, target] = (Cost(*start), Cost(*rise))
    return fits


def _error(profile: Profile, model: CostModel) -> float:
    """Return the expected relative error of a step: of profile and model, added in quadrature."""
    if model.error is None:
        return profile.error
    return math.hypot(profile.error, model.error.overall[0] if model.error.step is None else model.error.step)


def _size(graph: OpGraph) -> int:
    """Count the elements of the graph's outputs, which a loss outside the graph reads."""
    sizes = {value.name: value.num_elements for value in graph.inputs}
    sizes |= {op.name: op.num_elements for op in graph.ops}
    last = graph.ops[-1:]
    return sum(sizes[name] for op in last for name in (op.inputs if op.kind == "output" else (op.name,)))
