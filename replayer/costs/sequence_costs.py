"""The cost of a sequence by length and device class, and the division of sequences over ranks.

A profile measures one batch, B sequences of length L. Operators whose result holds a number per pair of
tokens (attention and the operators inside it) take time in proportion to B L^2. Weights and the optimizer
take a fixed time. All other operators take time in proportion to B L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from qsync.errors import FormatError
from qsync.lowering.lowered_graph import Cast
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile
from qsync.records.record_json import Record
from qsync.replayer.costs.class_costs import cast_cost, run_cost
from qsync.replayer.timeline import Timeline

_PRODUCTS_OF_ACTIVATIONS = ("matmul", "baddbmm")
_NUM_HALVINGS = 40  # bisection steps in the search for the least time


@dataclass(frozen=True, slots=True)
class SequenceCost(Record):
    """Seconds of a step of one rank: `fixed_s + n (L linear_s + L^2 quadratic_s)`.

    n is the number of sequences and L the length that they are padded to.
    """

    fixed_s: float
    linear_s: float
    quadratic_s: float

    def seconds(self, num_sequences: int, length: int) -> float:
        """Return the seconds of a step on sequences padded to a length."""
        return self.fixed_s + num_sequences * length * (self.linear_s + length * self.quadratic_s)


def sequence_costs(
    graph: OpGraph, timeline: Timeline, profiles: Mapping[str, Profile]
) -> dict[str, SequenceCost] | None:
    """Return the cost of a sequence on every class, from the timeline of a replayed step.

    The first tensor of the batch must have the shape (sequences, length, ...); otherwise return None.
    """
    shape = next((shape for shape in graph.batch_shapes if len(shape) >= 2), None)
    if shape is None:
        return None
    num, length = shape[:2]
    ops, quadratic = {op.name: op for op in graph.ops}, quadratic_ops(graph, num, length)
    found = {}
    for name, entry in timeline.classes.items():
        profile = profiles[name]
        taken = profile.setting.samples if profile.setting else num  # under levers a class has its own share
        own = [event for event in timeline.events if event.device_class == name]
        fixed = sum(event.duration_s for event in own if event.kind in ("host", "optimizer"))
        of_pairs = 0.0
        for node in entry.nodes:
            if isinstance(node, Cast):
                cost = cast_cost(profile, node).total_s
                fixed += cost if node.of_parameter else 0.0
                of_pairs += cost if node.value in quadratic else 0.0
            elif node.op in quadratic:
                of_pairs += run_cost(profile, node, ops[node.op]).total_s
        linear = max(0.0, entry.compute_s - entry.loading_s - fixed - of_pairs)
        found[name] = SequenceCost(fixed, linear / (taken * length), of_pairs / (taken * length**2))
    return found


def quadratic_ops(graph: OpGraph, num_sequences: int, length: int) -> set[str]:
    """Return the operators whose time grows with the square of the length.

    They are attention, products of two activations, and operators whose result has a number per pair of
    tokens: a shape that ends in (length, length). An activation of width `length` also has the shape
    (sequences, length, length). It counts only if no input is a parameter and some input is quadratic.
    """
    parameters = {value.name for value in graph.inputs if value.kind == "parameter"}
    found: set[str] = set()
    for op in graph.ops:
        of_activations = op.kind in _PRODUCTS_OF_ACTIVATIONS and not parameters & set(op.inputs)
        of_pairs = op.shape[-2:] == (length, length)
        if op.shape == (num_sequences, length, length):
            of_pairs = not parameters & set(op.inputs) and bool(found & set(op.inputs))
        if op.kind == "attention" or of_activations or of_pairs:
            found.add(op.name)
    return found


def hand_out(
    lengths: Sequence[int], costs: Sequence[SequenceCost], max_tokens: int | None = None
) -> list[list[int]]:
    """Divide sequences over ranks to shorten the slowest rank's time; return positions by rank.

    Sequences are sorted by length and cut into one contiguous run per rank, since a rank pads its sequences
    to the longest of them. Bisection finds the cuts of least time. The longest sequences go to the fastest
    ranks or to the slowest ranks, whichever takes less time.

    Args:
        lengths: tokens of every sequence of a step.
        costs: of one sequence, by rank.
        max_tokens: the most padded tokens of a rank; None for no limit.

    Raises:
        FormatError: fewer sequences than ranks, or more tokens than all ranks may take.

    Example:
        >>> hand_out([9, 1, 2, 8], [SequenceCost(0, 1, 0), SequenceCost(0, 2, 0)])
        [[0, 3], [2, 1]]
    """
    if len(lengths) < len(costs):
        raise FormatError(
            f"a step has {len(lengths)} sequences for {len(costs)} ranks; give at least one for each rank"
        )
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ordered = [lengths[i] for i in longest_first]
    by_speed = sorted(range(len(costs)), key=lambda rank: (costs[rank].seconds(1, ordered[0]), rank))
    best: tuple[float, list[int], list[int]] | None = None
    for ranks in (by_speed, by_speed[::-1]):
        found = _least_cuts(ordered, [costs[rank] for rank in ranks], max_tokens)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], found[1], ranks)
    if best is None:
        raise FormatError(
            f"sequences of {sum(lengths)} tokens do not fit in {max_tokens} tokens a rank when padded; give "
            "more, or fewer sequences a step"
        )
    _, counts, ranks = best
    ends = list(accumulate(counts))
    taken: list[list[int]] = [[] for _ in costs]
    for rank, count, end in zip(ranks, counts, ends, strict=True):
        taken[rank] = longest_first[end - count : end]
    return taken


def _least_cuts(
    ordered: Sequence[int], costs: Sequence[SequenceCost], max_tokens: int | None
) -> tuple[float, list[int]] | None:
    """Return the least seconds for ranks in this order, and each rank's number of sequences."""
    high = max(cost.seconds(len(ordered), ordered[0]) for cost in costs)
    counts = _counts_within(high, ordered, costs, max_tokens)
    if counts is None:
        return None
    low = 0.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        within = _counts_within(middle, ordered, costs, max_tokens)
        low, high, counts = (low, middle, within) if within is not None else (middle, high, counts)
    return high, counts


def _counts_within(
    time_s: float, ordered: Sequence[int], costs: Sequence[SequenceCost], max_tokens: int | None
) -> list[int] | None:
    """Return the number of sequences of each rank within `time_s`; None if they do not fit."""
    counts, start = [], 0
    for k, cost in enumerate(costs):
        left_for_others = len(costs) - 1 - k
        most, length = len(ordered) - start - left_for_others, ordered[start]
        per_sequence = cost.seconds(1, length) - cost.fixed_s
        count = most if per_sequence <= 0 else min(most, int((time_s - cost.fixed_s) / per_sequence + 1e-9))
        if max_tokens is not None:
            count = min(count, max_tokens // length)
        if count < 1:
            return None
        counts.append(count)
        start += count
    return counts if start == len(ordered) else None


def waiting(lengths: Sequence[int], taken: Sequence[Sequence[int]], costs: Sequence[SequenceCost]) -> float:
    """Return the fraction of all ranks' time spent waiting for the slowest rank, by the costs."""
    times = [
        cost.seconds(len(own), max(lengths[i] for i in own)) for own, cost in zip(taken, costs, strict=True)
    ]
    return 1.0 - sum(times) / (len(times) * max(times))
