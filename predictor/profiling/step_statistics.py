"""Costs, noise and error of a profile, from the times of all its steps. Pure.

All statistics are robust: medians, and deviations from the median absolute deviation. Samples are first
divided by the machine's drift (`machine_drift`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.profiling.node_timer import StepTimes
from qsync.records.graph import OpGraph
from qsync.records.profiles import Cost
from qsync.records.variant import CHANNELS_LAST

Samples = Sequence[tuple[str, StepTimes]]  # (label of the assignment, times of one step)
CastKey = tuple[str, str, str]  # (value, source type, target type)
Runs = Mapping[tuple[str, str], Sequence[tuple[Run, Cost]]]  # (operator, mode) -> timed runs

_PRODUCTS_FOR_A_PRICE = 3  # least number of products that determine the price of a switch
_MEDIAN_ERROR = 1.2533  # error of the median / error of the mean, for normal values: sqrt(pi / 2)
_LEAST_OWN = 0.1  # least fraction of a node's timed seconds that remains after subtracted estimates


class NodeCosts(NamedTuple):
    """The prices of a profile's operators, casts and switches between precisions."""

    ops: dict[str, dict[str, Cost]]
    casts: dict[CastKey, Cost]
    switch_s: dict[str, Cost]


def median(values: Iterable[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def robust_deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation times 1.4826.

    For a normal distribution, this equals the standard deviation.
    """
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def median_cost(costs: Sequence[Cost], timer_s: float = 0.0, scale: float = 1.0) -> Cost:
    """Return the median forward and backward seconds, and the robust deviation of their sum.

    `timer_s` is subtracted from both in proportion, down to _LEAST_OWN of them. `scale` multiplies all.
    """
    forward_s, backward_s = median(c.forward_s for c in costs), median(c.backward_s for c in costs)
    own = scale * max(_LEAST_OWN, 1.0 - timer_s / (forward_s + backward_s)) if timer_s else scale
    return Cost(own * forward_s, own * backward_s, scale * robust_deviation([c.total_s for c in costs]))


def timer_seconds(steps: Sequence[StepTimes], plain_s: Sequence[float | None]) -> float:
    """Return the seconds that the timer adds per node: timed minus untimed steps, per node.

    The timer costs about the same at every node, whatever its duration. A common factor instead would charge
    slow precisions too much and fast ones too little. Zero without untimed steps.
    """
    added = [
        (step.total_s - without_s) / len(step.nodes)
        for step, without_s in zip(steps, plain_s, strict=True)
        if without_s is not None
    ]
    return max(0.0, statistics.median(added)) if added else 0.0


def node_costs(samples: Samples, drift: Sequence[float], timer_s: float = 0.0) -> NodeCosts:
    """Return the median cost of each (operator, mode) and of each cast, over all their steps.

    Noise only adds time, so the medians of the nodes sum to less than the median of a whole step. All costs
    are scaled up by the ratio of the two. `timer_s` are the seconds that the timer added to each node. The
    price of a switch between precisions is subtracted from the products that paid it.
    """
    runs: dict[tuple[str, str], list[tuple[Run, Cost]]] = defaultdict(list)
    casts: dict[CastKey, list[Cost]] = defaultdict(list)
    for (_, step), factor in zip(samples, drift, strict=True):
        for node, cost in step.nodes:
            cost = Cost(cost.forward_s / factor, cost.backward_s / factor)
            if isinstance(node, Cast):
                casts[node.profile_key].append(cost)
            else:
                runs[node.op, node.timed_as].append((node, cost))
    scale, switch_s = _whole_over_parts(samples), switch_costs(runs)
    ops: dict[str, dict[str, Cost]] = defaultdict(dict)
    for (op, mode), timed in runs.items():
        price = switch_s.get(timed[0][0].mode, Cost(0.0))
        costs = [_without_switch(run, cost, price) for run, cost in timed]
        ops[op][mode] = median_cost(costs, timer_s, scale)
    return NodeCosts(
        dict(ops),
        {key: median_cost(costs, timer_s, scale) for key, costs in casts.items()},
        {mode: Cost(scale * price.forward_s, scale * price.backward_s) for mode, price in switch_s.items()},
    )


def switch_costs(runs: Runs) -> dict[str, Cost]:
    """Return by precision the extra seconds of a product beside a product of another precision.

    The neighbour is the preceding product in forward and the following one in backward. Small and large
    products pay the same price (Zen 5: linear in BF16 of 0.2 and 0.8 ms, 0.05 ms each), as if caches were
    refilled. The price is the median, over products timed both ways, of their differences of medians. It is 0
    for fewer than three products, and for differences within their noise.
    """
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for timed in runs.values():
        forward = [(run.after_other, cost.forward_s) for run, cost in timed]
        backward = [(run.before_other, cost.backward_s) for run, cost in timed]
        for way, samples in enumerate((forward, backward)):
            beside_other = [seconds for switched, seconds in samples if switched]
            beside_like = [seconds for switched, seconds in samples if not switched]
            if beside_other and beside_like:
                found[timed[0][0].mode][way].append(median(beside_other) - median(beside_like))
    return {mode: Cost(*map(_beyond_noise, ways)) for mode, ways in found.items()}


def _beyond_noise(differences: Sequence[float]) -> float:
    """Return the median; 0 if it is negative, within two standard errors, or of too few values."""
    if len(differences) < _PRODUCTS_FOR_A_PRICE:
        return 0.0
    middle, deviation = median(differences), robust_deviation(differences)
    return middle if middle > 2 * _MEDIAN_ERROR * deviation / math.sqrt(len(differences)) else 0.0


def _without_switch(run: Run, cost: Cost, price: Cost) -> Cost:
    return Cost(
        max(_LEAST_OWN * cost.forward_s, cost.forward_s - run.after_other * price.forward_s),
        max(_LEAST_OWN * cost.backward_s, cost.backward_s - run.before_other * price.backward_s),
    )


def noise(samples: Samples, drift: Sequence[float]) -> float:
    """Return the relative deviation of steps from their assignment's median, without drift."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for (label, step), factor in zip(samples, drift, strict=True):
        seconds[label].append(step.total_s / factor)
    # Steps lie closer to their own sample median than to the true median, so deviations are corrected.
    deviations = []
    for times in seconds.values():
        correction = math.sqrt(len(times) / (len(times) - 1)) if len(times) > 1 else 0.0
        middle = statistics.median(times)
        deviations += [correction * (time_s / middle - 1.0) for time_s in times] if correction else []
    return robust_deviation(deviations) if deviations else 0.0


def leave_one_out_error(samples: Samples, drift: Sequence[float]) -> float:
    """Return the root mean square of relative errors of predicted mixed steps.

    Each mixture is predicted from the costs of the steps of all other assignments.
    """
    errors = []
    pairs = list(zip(samples, drift, strict=True))
    for label in dict.fromkeys(label for label, _ in samples if label.startswith("mixture")):
        others = [(sample, factor) for sample, factor in pairs if sample[0] != label]
        own = [(step, factor) for (name, step), factor in pairs if name == label]
        ops, casts, switch_s = node_costs([sample for sample, _ in others], [factor for _, factor in others])
        predicted = measured = 0.0
        for j, (node, _) in enumerate(own[0][0].nodes):
            found = (
                casts.get(node.profile_key)
                if isinstance(node, Cast)
                else ops.get(node.op, {}).get(node.timed_as)
            )
            if found is not None:  # else no other step contains the node
                predicted += found.total_s
                if isinstance(node, Run):
                    price = switch_s.get(node.mode, Cost(0.0))
                    predicted += node.after_other * price.forward_s + node.before_other * price.backward_s
                measured += median(step.nodes[j][1].total_s / factor for step, factor in own)
        if predicted:
            errors.append(measured / predicted - 1.0)
    return math.sqrt(statistics.fmean(error**2 for error in errors)) if errors else 0.0


def _whole_over_parts(samples: Samples) -> float:
    """Return the median of steps' summed node times / the sum of nodes' medians, over all labels."""
    whole = parts = 0.0
    by_label: dict[str, list[StepTimes]] = defaultdict(list)
    for label, step in samples:
        by_label[label].append(step)
    for steps in by_label.values():
        whole += median(sum(cost.total_s for _, cost in step.nodes) for step in steps)
        parts += sum(
            median_cost([cost for _, cost in same]).total_s
            for same in zip(*(s.nodes for s in steps), strict=True)
        )
    return whole / parts if parts else 1.0


def fit_casts(casts: Mapping[CastKey, Cost], graph: OpGraph) -> dict[tuple[str, str], tuple[Cost, Cost]]:
    """Fit latency and seconds per element to the casts of each pair of types, forward and backward.

    The fit is by least squares with non-negative parameters.
    """
    sizes = {value.name: value.num_elements for value in graph.inputs}
    sizes |= {op.name: op.num_elements for op in graph.ops}
    pairs: dict[tuple[str, str], list[tuple[int, Cost]]] = defaultdict(list)
    for (value, source, target), cost in casts.items():
        pairs[source.removesuffix(CHANNELS_LAST), target].append((sizes[value], cost))
    fits = {}
    for pair, points in pairs.items():
        forward = _line([(n, cost.forward_s) for n, cost in points])
        backward = _line([(n, cost.backward_s) for n, cost in points])
        fits[pair] = (Cost(forward[0], backward[0]), Cost(forward[1], backward[1]))
    # A pair without measured casts gets the line of another source type with the same target.
    for source in ("fp32", "bf16"):
        for _, target in list(fits):
            known = [fits[s, t] for s, t in list(fits) if t == target]
            fits.setdefault((source, target), known[0])
    return fits


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return intercept and slope of a least-squares line, neither negative."""
    mean_n = statistics.fmean(n for n, _ in points)
    mean_s = statistics.fmean(s for _, s in points)
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    if not spread:
        return 0.0, mean_s / max(mean_n, 1.0)
    slope = max(sum((n - mean_n) * (s - mean_s) for n, s in points) / spread, 0.0)
    intercept = mean_s - slope * mean_n
    return (intercept, slope) if intercept >= 0 else (0.0, mean_s / max(mean_n, 1.0))
