"""Batch size: a graph and its profile at another number of samples than the captured one. Pure.

Two captures of one model at different numbers of samples s0 and s1 give every dimension at s samples:

    size(s) = size(s0) + (size(s1) - size(s0)) (s - s0) / (s1 - s0)

Two profiles give the seconds of every operator by the same formula. With only one profile, or if noise makes
more samples take no longer, the cost of an operator on batch data is assumed proportional to the samples; in
fact small batches cost more per sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qsync.errors import FormatError, MismatchError
from qsync.records.graph import Derivative, OpGraph
from qsync.records.levers import samples_of
from qsync.records.profiles import MEASURED, SIMULATED, Cost, Profile

INTERPOLATED, PROPORTIONAL = "interpolated", "proportional"
OTHER = "other"  # name of the second capture's folder inside a plan's folder

# Interpolation of profiles at s0 < s1 samples is trusted from s0 / REACH to s1 x REACH samples.
REACH = 1.5
# Proportional costs from one profile at s samples are trusted from s / REACH_ALONE to s x REACH_ALONE.
REACH_ALONE = 4.0
# Data-sheet costs follow a law of the size, so the line is trusted from 1 sample to s1 x REACH_BY_LAW.
REACH_BY_LAW = 64


@dataclass(frozen=True, slots=True)
class Recapture:
    """A second capture of a model with another number of samples, and second profiles of classes.

    The number of samples of a second profile may differ between classes.

    >>> Recapture(qsync.capture(model, smaller_batch), {"infer": qsync.profile(model, smaller_batch)})
    """

    graph: OpGraph
    profiles: Mapping[str, Profile]

    def save(self, folder: Path) -> None:
        """Write the graph and the profiles to FOLDER/other, where `load` looks for them."""
        self.graph.save(folder / OTHER / "graph.json")
        for name, profile in self.profiles.items():
            profile.save(folder / OTHER / f"profile-{name}.json")

    @classmethod
    def load(cls, folder: Path) -> Recapture | None:
        """Read the second capture in FOLDER/other; return None if that has no graph.json.

        Planning of batch shares and passes needs it. Profiles beside its graph are read as well.

        >>> qsync.capture(model, smaller_batch).save("demo-out/other/graph.json")
        >>> qsync.profile(model, smaller_batch).save("demo-out/other/profile-infer.json")
        """
        other = folder / OTHER
        if not (other / "graph.json").is_file():
            return None
        found = [Profile.load(path) for path in sorted(other.glob("profile-*.json"))]
        return cls(OpGraph.load(other / "graph.json"), {profile.device_class: profile for profile in found})

    def second_of(self, device_class: str, first: int) -> tuple[Profile, int] | None:
        """Return a class's second profile and its samples; None without one, or at `first` samples."""
        found = self.profiles.get(device_class)
        if found is None:
            return None
        samples = next((shape[0] for shape in found.batch if shape), samples_of(self.graph))
        return (found, samples) if samples != first else None


def resized(graph: OpGraph, other: OpGraph, samples: int) -> OpGraph:
    """Return the graph at a number of samples, computed from captures at two other numbers.

    Raises MismatchError if the captures are of different models or have equally many samples. Raises
    FormatError if a size would not be a positive integer.

    >>> resized(graph_of_8, graph_of_4, 6)
    """
    first, second = samples_of(graph), samples_of(other)
    if samples == first:
        return graph
    check_other(graph, other)

    def whole(name: str, here: int, there: int) -> int:
        numerator = here * (second - first) + (there - here) * (samples - first)
        size, rest = divmod(numerator, second - first)
        if rest or size < 1:
            raise FormatError(
                f"{name} would have a size of {numerator / (second - first):g} with {samples} samples "
                f"(it has {here} with {first}, {there} with {second}); choose another number"
            )
        return size

    def shape(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a if a == b else whole(name, a, b) for a, b in zip(here, there, strict=True))

    def count(here: int, there: int) -> int:
        return max(0, here + (there - here) * (samples - first) // (second - first))

    def derivative(here: Derivative | None, there: Derivative | None) -> Derivative | None:
        if here is None or there is None or len(here.besides) != len(there.besides):
            return here
        pairs = zip(here.besides, there.besides, strict=True)
        besides = tuple((dtype, count(a, b)) for (dtype, a), (_, b) in pairs)
        return replace(
            here, besides=besides, workspace_bytes=count(here.workspace_bytes, there.workspace_bytes)
        )

    inputs = tuple(
        replace(a, shape=shape(a.name, a.shape, b.shape))
        for a, b in zip(graph.inputs, other.inputs, strict=True)
    )
    ops = tuple(
        replace(
            a,
            shape=shape(a.name, a.shape, b.shape),
            flops=count(a.flops, b.flops),
            derivative=derivative(a.derivative, b.derivative),
        )
        for a, b in zip(graph.ops, other.ops, strict=True)
    )
    return replace(graph, inputs=inputs, ops=ops)


def check_other(graph: OpGraph, other: OpGraph) -> None:
    """Raise MismatchError unless two graphs have equal operators and different numbers of samples.

    Inputs are compared by position, since their names depend on the caller of the model.
    """

    def frame(of: OpGraph) -> list[object]:
        places = {value.name: i for i, value in enumerate(of.inputs)}
        entering: list[object] = [(i, value.kind, len(value.shape)) for i, value in enumerate(of.inputs)]
        return entering + [
            (op.name, op.kind, [places.get(x, x) for x in op.inputs], [places.get(x, x) for x in op.kept],
             len(op.shape))
            for op in of.ops
        ]  # fmt: skip

    mine, theirs = frame(graph), frame(other)
    if graph.hash != other.hash or mine != theirs:
        names = [*(value.name for value in graph.inputs), *(op.name for op in graph.ops)]
        differing = (name for name, a, b in zip(names, mine, theirs, strict=False) if a != b)
        where = next((f", they first differ in {name}" for name in differing), "")
        raise MismatchError(
            f"the second capture is not of the same operators of {graph.model}{where}; capture both alike, "
            "with another number of samples"
        )
    if (samples := samples_of(graph)) == samples_of(other):
        raise MismatchError(
            f"both captures of {graph.model} have {samples} samples; capture it once more with another number"
        )


def reach(profile: Profile, graph: OpGraph, other: Recapture | None) -> tuple[int, int]:
    """Return the fewest and the most samples of a pass at which a class's costs are trusted.

    >>> reach(profile, graph, Recapture(smaller, {}))
    """
    sizes, factor = _sizes(profile, graph, other), REACH
    if profile.origin == SIMULATED and len(sizes) > 1:
        return 1, max(sizes) * REACH_BY_LAW
    if len(sizes) == 1:
        factor = REACH_ALONE
    return math.ceil(min(sizes) / factor), int(max(sizes) * factor)


def _sizes(profile: Profile, graph: OpGraph, other: Recapture | None) -> list[int]:
    """Return the one or two numbers of samples at which a class was profiled."""
    first = samples_of(graph)
    second = other.second_of(profile.device_class, first) if other is not None else None
    return [first, second[1]] if second else [first]


def at_samples(
    profile: Profile,
    graph: OpGraph,
    other: Recapture,
    samples: int,
    at: OpGraph,
    loaded: int | None = None,
) -> Profile:
    """Return a profile at another number of samples; `at` is the graph at that number.

    `loaded` is the number of samples that the loader supplies per step, if it differs from `samples`. Raises
    FormatError for a number too far from the profiled ones.

    >>> at_samples(profile, graph, Recapture(smaller, {"infer": its}), 6, resized(graph, smaller, 6))
    """
    first, loaded = samples_of(graph), loaded or samples
    second = other.second_of(profile.device_class, first)
    if samples == first and loaded == first:
        return profile
    has_samples = {
        a.name
        for pairs in (zip(graph.inputs, at.inputs, strict=True), zip(graph.ops, at.ops, strict=True))
        for a, b in pairs
        if a.shape != b.shape
    }
    _check_reach(profile, graph, other, samples)
    law = INTERPOLATED if second is not None and _grows(profile, first, *second) else PROPORTIONAL
    if second is None or law is PROPORTIONAL:
        found = _in_proportion(profile, graph, has_samples, samples / first, loaded / first)
    else:
        theirs, apart = second[0], second[1] - first
        theirs.check_graph(resized(graph, other.graph, second[1]))
        part, part_loaded = ((s - first) / apart for s in (samples, loaded))
        pairs = zip(other.graph.inputs, graph.inputs, strict=True)
        names = {value.name: mine.name for value, mine in pairs}
        casts = {(names.get(value, value), a, b): cost for (value, a, b), cost in theirs.casts.items()}
        found = _between(profile, replace(theirs, casts=casts), part, part_loaded)
    return replace(
        found, shapes_hash=at.shapes_hash, batch=at.batch_shapes, step_s={},
        memory_residuals=profile.memory_residuals.scaled(samples / first),
        origin=law if profile.origin == MEASURED else profile.origin,
    )  # fmt: skip


def _check_reach(profile: Profile, graph: OpGraph, other: Recapture, samples: int) -> None:
    least, most = reach(profile, graph, other)
    if not least <= samples <= most:
        known = " and ".join(map(str, _sizes(profile, graph, other)))
        raise FormatError(
            f"{samples} samples in one pass are too far from the {known} that {profile.device_class} was "
            f"profiled with; choose {least} to {most}, or profile it with more or fewer"
        )


def _grows(one: Profile, first: int, other: Profile, second: int) -> bool:
    """Return whether the operators of two profiles take longer in all with more samples."""
    mine_s, theirs_s = (
        of.outside.total_s
        + sum(
            of.ops[op][mode].total_s
            for op in one.ops
            if op in other.ops
            for mode in one.ops[op].keys() & other.ops[op].keys()
        )
        for of in (one, other)
    )
    return (theirs_s - mine_s) * (second - first) > 0.0


def _in_proportion(
    profile: Profile, graph: OpGraph, has_samples: set[str], factor: float, loaded: float
) -> Profile:
    """Scale batch-dependent costs and loading linearly; keep host, optimizer and weight costs."""
    ops = dict(profile.ops)
    for op in graph.ops:
        if op.name in ops and not has_samples.isdisjoint((op.name, *op.inputs, *op.kept)):
            ops[op.name] = {mode: times(cost, factor) for mode, cost in ops[op.name].items()}
    casts = {
        key: times(cost, factor) if key[0] in has_samples else cost for key, cost in profile.casts.items()
    }
    return replace(
        profile, ops=ops, casts=casts, outside=times(profile.outside, factor),
        loading_s=profile.loading_s * loaded,
    )  # fmt: skip


def _between(one: Profile, other: Profile, part: float, loaded: float) -> Profile:
    """Interpolate linearly between two profiles: `part` is 0 at the first and 1 at the second.

    A mode measured only in the first profile scales as the operator's other modes do. Operators measured in
    only one profile are dropped. Fitted costs of casts are those of the nearer profile.
    """

    def line(a: float, b: float, at: float = part) -> float:
        return max(0.0, a + (b - a) * at)

    def cost(a: Cost, b: Cost) -> Cost:
        return Cost(
            line(a.forward_s, b.forward_s), line(a.backward_s, b.backward_s), line(a.spread_s, b.spread_s)
        )

    def of_op(modes: Mapping[str, Cost], theirs: Mapping[str, Cost]) -> dict[str, Cost]:
        both = modes.keys() & theirs.keys()
        mine_s, theirs_s = (sum(of[mode].total_s for mode in both) for of in (modes, theirs))
        growth = theirs_s / mine_s if mine_s else 1.0
        return {
            mode: cost(c, theirs[mode] if mode in both else times(c, growth)) for mode, c in modes.items()
        }

    ops = {op: of_op(modes, other.ops[op]) for op, modes in one.ops.items() if op in other.ops}
    casts = {
        key: cost(c, other.casts[key]) if key in other.casts else c
        for key, c in one.casts.items()
        if key in other.casts or key[1:] not in one.cast_fit
    }
    nearer = one if part <= 0.5 else other
    return replace(
        one, ops=ops, casts=casts, cast_fit={**one.cast_fit, **nearer.cast_fit},
        outside=cost(one.outside, other.outside), host_s=line(one.host_s, other.host_s),
        loading_s=line(one.loading_s, other.loading_s, loaded),
        noise=max(one.noise, other.noise), drift=max(one.drift, other.drift),
        error=max(one.error, other.error),
    )  # fmt: skip


def times(cost: Cost, factor: float) -> Cost:
    """Return a cost scaled by a factor."""
    return Cost(cost.forward_s * factor, cost.backward_s * factor, cost.spread_s * factor)
