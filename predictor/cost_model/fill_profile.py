"""Profiles without measurement: of an operator, another batch shape, a grown model, an absent device.

Filled costs are marked (`Profile.origin`, `Profile.filled`), so that every output can say so. Replay reads
them like any other cost. No model prices launches (`Profile.launches`): a filled profile has none, as if the
host always stayed ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from qsync.errors import CalibrationError, MismatchError
from qsync.predictor.cost_model.model import CostModel, Priced, costs_of
from qsync.predictor.cost_model.op_calls import Call, calls, cast_call, modes, value_call
from qsync.predictor.cost_model.samples import Sample, samples_of, sheet_of
from qsync.records.datasheets import DataSheet
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.memory_residuals import MemoryResiduals
from qsync.records.precision import LARGEST, PRECISIONS_BY_KIND, Precision, is_encoded, operand_type
from qsync.records.profiles import CARRIED, DEVICE_MEASURED, LEARNED, Cost, Profile

Casts = dict[tuple[str, str, str], Cost]
# The casts of a pair of types are priced by the line between these numbers of elements.
_FEW_ELEMENTS, _MANY_ELEMENTS = 2**12, 2**20
_CARRIED_TYPES = ("fp32", "bf16")


def fill(
    profile: Profile,
    graph: OpGraph,
    model: CostModel | None = None,
    measured_on: OpGraph | None = None,
    sheet: DataSheet | None = None,
) -> Profile:
    """Return the profile for `graph` at its batch shape, with learned costs where nothing was measured.

    At the profiled shape only missing operators and precisions are filled in. At another shape of the same
    model every cost is the measured one times the cost model's ratio,

        t_new = t_measured model(new) / model(old),

    for which `measured_on` must be the graph that was profiled. Without a `model` one is learned from the
    profile itself; `sheet` is the device as the model knows it. Raises MismatchError for another model, or
    another shape without `measured_on`.

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
    filled = _Filled(profile, graph, _calls(before), value_call(before), model, device)
    ops, added = filled.ops()
    casts = {**profile.casts} if same else filled.casts()
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
    """Return the profile of one model carried over to another that was made from it.

    `sources` maps operators and values of `graph` to those of `before`, the profiled graph, from which they
    come; several may come from one. Costs are scaled by the same ratio as in `fill`, with the model's stated
    error; operators without a source get the model's cost. All of it is marked.

    >>> carry(profile, deeper, graph, {"blocks.1.fc": "blocks.0.fc", ...}).origin
    'carried'
    """
    profile.check_graph(before)
    device = sheet_of(before, profile)
    model = model or learned_from(before, profile, device)
    old, old_values = _calls(before), value_call(before)
    by_value: dict[str, dict[tuple[str, str], Cost]] = {}
    for (value, start, end), cost in profile.casts.items():
        by_value.setdefault(value, {})[start, end] = cost
    named = replace(
        profile,
        ops={name: profile.ops[source] for name, source in sources.items() if source in profile.ops},
        refused={n: profile.refused[source] for n, source in sources.items() if source in profile.refused},
        casts={
            (name, *types): cost
            for name, source in sources.items()
            for types, cost in by_value.get(source, {}).items()
        },
    )
    filled = _Filled(
        named, graph,
        {name: old[source] for name, source in sources.items() if source in old},
        {name: old_values[source] for name, source in sources.items() if source in old_values},
        model, device,
    )  # fmt: skip
    ops, added = filled.ops()
    outside = _size(graph) / max(_size(before), 1)
    return replace(
        named, graph_hash=graph.hash, shapes_hash=graph.shapes_hash, model=graph.model,
        batch=graph.batch_shapes, ops=ops, casts=filled.casts(),
        outside=Cost(profile.outside.forward_s * outside, profile.outside.backward_s * outside),
        step_s={}, origin=_origin(profile, CARRIED), filled=added, error=_error(profile, model),
        launches=None, memory_residuals=MemoryResiduals(),
    )  # fmt: skip


def simulate(
    profile: Profile, graph: OpGraph, sheet: DataSheet, device_class: str, model: CostModel | None = None
) -> Profile:
    """Simulate the profile of an absent device, at the shares of its peaks that a measured device reaches.

    Those shares come from the measured `profile` of any device, or from a `model`; a profile that was filled
    in for another shape needs one, learned at the shape that was measured. Of the work outside the graph,
    loss and optimizer scale by bandwidth; the host's part and data loading stay. Nobody measured that another
    device reaches the same shares of its own peaks: the result is labelled simulated. Raises CalibrationError
    if no product was measured and no model is given.

    >>> simulate(profile, graph, datasheet("T4"), "infer").origin
    'simulated'
    """
    profile.check_graph(graph)
    here = sheet_of(graph, profile)
    model = model or CostModel(_measured(graph, profile, here))
    asked = [(op, call, mode) for op, call in calls(graph) for mode in modes(op, sheet.precisions)]
    ops: dict[str, dict[str, Cost]] = {op.name: {} for op in graph.ops}
    found = costs_of(model, [(call, mode) for _, call, mode in asked], sheet)
    for (op, _, mode), cost in zip(asked, found, strict=True):
        ops[op.name][mode] = cost
    slower = here.bytes_per_s / sheet.bytes_per_s
    share = profile.emulated_share or 1.0
    pairs = sorted({(source, target) for _, source, target in possible_casts(graph, sheet.precisions)})
    return Profile(
        device_class, graph.hash, graph.shapes_hash, ops, {}, cast_lines(pairs, model, sheet),
        Cost(profile.outside.forward_s * slower, profile.outside.backward_s * slower),
        host_s=profile.host_s * share, optimizer_s=profile.optimizer_s * slower,
        optimizer_bytes=profile.optimizer_bytes, step_s={},
        machine=_where_from(sheet, profile, model),
        bucket_s_per_byte=profile.bucket_s_per_byte * slower, origin="simulated",
        loading_s=profile.loading_s * share,
    )  # fmt: skip


def _origin(profile: Profile, origin: str) -> str:
    """Return the origin of costs made from a profile's: a device that was not measured stays so."""
    return origin if profile.origin in DEVICE_MEASURED else profile.origin


def _where_from(sheet: DataSheet, profile: Profile, model: CostModel) -> dict[str, str]:
    """Return what a simulated profile stands on, and which of its costs nothing like was measured."""
    found = {"data sheet": sheet.name, "source": sheet.source, "shares of": profile.device_class}
    if not any(sample.call.kind == "cast" for sample in model.samples):
        found["casts"] = "not measured; as other passes over memory"
    return found


def priced_as(graph: OpGraph, profile: Profile, model: Priced, sheet: DataSheet) -> Profile:
    """Return a profile with every measured cost replaced by a model's: to judge the model.

    >>> priced_as(graph, profile, Linear(samples), sheet)
    """
    known, values = _calls(graph), value_call(graph)
    runs = [(name, mode) for name, costs in profile.ops.items() for mode in costs]
    keys = list(profile.casts)
    wanted = [(known[name], mode.partition(" ")[0]) for name, mode in runs]
    wanted += [(values[value], f"{source.partition(' ')[0]} {target}") for value, source, target in keys]
    found = costs_of(model, wanted, sheet)
    ops: dict[str, dict[str, Cost]] = {}
    for (name, mode), cost in zip(runs, found, strict=False):
        ops.setdefault(name, {})[mode] = cost
    return replace(profile, ops=ops, casts=dict(zip(keys, found[len(runs) :], strict=True)))


def learned_from(graph: OpGraph, profile: Profile, sheet: DataSheet | None = None) -> CostModel:
    """Learn a cost model from one profile alone: the operators and casts that were measured.

    Raises CalibrationError where products are in the graph and none was measured, as in a filled profile.

    >>> model = learned_from(graph, profile)
    """
    return CostModel.learn(_measured(graph, profile, sheet))


def _measured(graph: OpGraph, profile: Profile, sheet: DataSheet | None) -> list[Sample]:
    """Return the samples of a profile, in which some product was measured if there is any."""
    samples = samples_of(graph, profile, sheet)
    if any(call.is_product for _, call in calls(graph)) and not any(s.call.is_product for s in samples):
        raise CalibrationError(
            f"no product of the profile of {profile.device_class} was measured at this shape; give a model "
            "learned from the one that was: learned_from(graph, profile)"
        )
    return samples


def possible_casts(graph: OpGraph, precisions: tuple[Precision, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield (value, source, target) of every cast that some lowering of the graph may contain, once."""
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
    """List the types in which an operator may take its input."""
    if op.role is Role.ADJUSTABLE:
        chosen = [p for p in PRECISIONS_BY_KIND[op.kind] if p in precisions]
        return list(dict.fromkeys(operand_type(op.kind, index, p) for p in chosen))
    return carried if op.role is Role.FOLLOWING else [op.dtype]


class _Filled:
    """The costs of one profile, scaled or filled in for a graph.

    `old` and `old_values` are the measured calls, by the names in the graph.
    """

    def __init__(
        self,
        profile: Profile,
        graph: OpGraph,
        old: Mapping[str, Call],
        old_values: Mapping[str, Call],
        model: CostModel,
        sheet: DataSheet,
    ) -> None:
        self.profile, self.graph, self.model, self.sheet = profile, graph, model, sheet
        self.old, self.old_values = old, old_values

    def ops(self) -> tuple[Mapping[str, Mapping[str, Cost]], dict[str, float]]:
        """Return the costs of every operator, and the stated error of each that has costs of the model."""
        known = self.profile.ops
        asked = []
        for op, call in calls(self.graph):
            for mode in self._modes(op):
                if not (call == self.old.get(op.name) and mode in known.get(op.name, {})):
                    asked.append((op, call, mode))
        plain = [(call, mode.partition(" ")[0]) for _, call, mode in asked]
        new = costs_of(self.model, plain, self.sheet)
        old = costs_of(
            self.model,
            [
                (self.old.get(op.name, call), mode)
                for (op, call, _), (_, mode) in zip(asked, plain, strict=True)
            ],
            self.sheet,
        )
        names = {op.name for op in self.graph.ops}
        ops = {name: dict(costs) for name, costs in known.items() if name in names}
        added = {}
        for (op, _, mode), priced, then in zip(asked, new, old, strict=True):
            measured = known.get(op.name, {}).get(mode)
            cost = priced if measured is None or op.name not in self.old else scaled(measured, priced, then)
            ops.setdefault(op.name, {})[mode] = cost
            added[op.name] = self.model.error.of(op.kind) if self.model.error else 1.0
        return ops, added

    def casts(self) -> Casts:
        """Return the measured casts at their new sizes."""
        values = value_call(self.graph)
        keys = [key for key in self.profile.casts if key[0] in values and key[0] in self.old_values]
        new = costs_of(
            self.model, [(values[v], f"{s.partition(' ')[0]} {t}") for v, s, t in keys], self.sheet
        )
        old = costs_of(
            self.model, [(self.old_values[v], f"{s.partition(' ')[0]} {t}") for v, s, t in keys], self.sheet
        )
        return {
            key: scaled(self.profile.casts[key], priced, then)
            for key, priced, then in zip(keys, new, old, strict=True)
        }

    def _modes(self, op: Op) -> list[str]:
        """List the modes measured for this operator, and those it lacks but others of its role have."""
        own = list(self.profile.ops.get(op.name, {}))
        if op.role is not Role.ADJUSTABLE:
            return own or list(modes(op, (Precision.FP32, Precision.BF16)))
        names = [other.name for other in self.graph.adjustable]
        seen = {mode.partition(" ")[0] for name in names for mode in self.profile.ops.get(name, {})}
        lacking = (seen & {str(p) for p in PRECISIONS_BY_KIND[op.kind]}) - {m.partition(" ")[0] for m in own}
        return own + sorted(lacking - set(self.profile.refused.get(op.name, {})))


def _calls(graph: OpGraph) -> dict[str, Call]:
    return {op.name: call for op, call in calls(graph)}


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
    """Fit for each pair of types the line through a small and a large cast, as profiles store it."""
    fits = {}
    for source, target in pairs:
        gradient = not is_encoded(target)
        few, many = costs_of(
            model,
            [
                (cast_call((size,), gradient, False), f"{source} {target}")
                for size in (_FEW_ELEMENTS, _MANY_ELEMENTS)
            ],
            sheet,
        )
        rise = [
            max(b - a, 0.0) / (_MANY_ELEMENTS - _FEW_ELEMENTS)
            for a, b in zip(_pair(few), _pair(many), strict=True)
        ]
        start = [max(a - _FEW_ELEMENTS * r, 0.0) for a, r in zip(_pair(few), rise, strict=True)]
        fits[source, target] = (Cost(*start), Cost(*rise))
    return fits


def _pair(cost: Cost) -> tuple[float, float]:
    return cost.forward_s, cost.backward_s


def _error(profile: Profile, model: CostModel) -> float:
    """Return the relative deviation to expect of a step: the profile's own, and the model's of steps."""
    if model.error is None:
        return profile.error
    return math.hypot(profile.error, model.error.overall[0] if model.error.step is None else model.error.step)


def _size(graph: OpGraph) -> int:
    """Count the elements of the graph's outputs, which a loss outside of it reads."""
    sizes = {value.name: value.num_elements for value in graph.inputs}
    sizes |= {op.name: op.num_elements for op in graph.ops}
    last = graph.ops[-1:]
    return sum(sizes[name] for op in last for name in (op.inputs if op.kind == "output" else (op.name,)))
