"""Costs, noise and error of a profile, from the times of all its steps. Pure.

Every statistic is robust: medians, and deviations by the median distance from the median. The machine's drift
is divided out of each sample before (`machine_drift`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qsync.lowering.lowered_graph import CHANNELS_LAST, Cast, Run
from qsync.predictor.profiling.node_timer import StepTimes
from qsync.records.graph import OpGraph
from qsync.records.profiles import Cost

Samples = Sequence[tuple[str, StepTimes]]  # (label of the assignment, times of one step)
CastKey = tuple[str, str, str]  # (value, source type, target type)
Runs = Mapping[tuple[str, str], Sequence[tuple[Run, Cost]]]  # by operator and mode

_PRODUCTS_FOR_A_PRICE = 3  # of a switch between precisions
_MEDIAN_ERROR = 1.2533  # of normal values, over the error of their mean: sqrt(pi / 2)
_LEAST_OWN = 0.1  # of a node's timed seconds: what is taken out of them is an estimate, and no node is free


class NodeCosts(NamedTuple):
    """The prices of a profile's operators, casts and switches between precisions."""

    ops: dict[str, dict[str, Cost]]
    casts: dict[CastKey, Cost]
    switch_s: dict[str, Cost]


def median(values: Iterable[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def robust_deviation(values: Sequence[float]) -> float:
    """Return the median distance from the median, times 1.4826.

    For a normal distribution the result equals the standard deviation.
    """
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def median_cost(costs: Sequence[Cost], timer_s: float = 0.0, scale: float = 1.0) -> Cost:
    """Return the median of forward and backward seconds, and the deviation of their sum.

    `timer_s` is subtracted from both in proportion, never all of them; all is multiplied by `scale`.
    """
    forward_s, backward_s = median(c.forward_s for c in costs), median(c.backward_s for c in costs)
    own = scale * max(_LEAST_OWN, 1.0 - timer_s / (forward_s + backward_s)) if timer_s else scale
    return Cost(own * forward_s, own * backward_s, scale * robust_deviation([c.total_s for c in costs]))


def timer_seconds(steps: Sequence[StepTimes], plain_s: Sequence[float | None]) -> float:
    """Return the seconds that the timer adds to each node: timed steps less the same without, by nodes.

    The difference is much the same for every node, whatever its own time: a common factor would charge the
    steps of slow precisions, and spare those of fast ones. Zero where no step was taken without the timer.
    """
    added = [
        (step.total_s - without_s) / len(step.nodes)
        for step, without_s in zip(steps, plain_s, strict=True)
        if without_s is not None
    ]
    return max(0.0, statistics.median(added)) if added else 0.0


def node_costs(samples: Samples, drift: Sequence[float], timer_s: float = 0.0) -> NodeCosts:
    """Return the median cost of each (operator, mode) and of each cast, over all steps that contained it.

    Noise only adds time, so the medians of the nodes sum to less than the median of a whole step. All costs
    are scaled up by the ratio of the two. `timer_s` are the seconds that the timer added to each node. The
    price of a switch between precisions is taken out of the products that paid it.
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
    """Return by precision what a product takes longer beside a product of another precision.

    Forward that is the product before it, backward the one after it. It is as long for a small product as for
    a large one (Zen 5: linear in BF16 of 0.2 and 0.8 ms, 0.05 ms each), as if caches filled again. Of every
    product that was timed both ways the difference of the medians counts; of these, the median. Fewer than
    three products show noise, not a price; so do products whose differences are as often negative.
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
    """Return the median, or zero where it is within two of its standard errors, of few values or negative."""
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
    """Return the relative deviation of steps from the median step of their assignment, without the drift."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for (label, step), factor in zip(samples, drift, strict=True):
        seconds[label].append(step.total_s / factor)
    # A median is taken from the same steps, so the steps lie closer to it than to the true median.
    deviations = []
    for times in seconds.values():
        correction = math.sqrt(len(times) / (len(times) - 1)) if len(times) > 1 else 0.0
        middle = statistics.median(times)
        deviations += [correction * (time_s / middle - 1.0) for time_s in times] if correction else []
    return robust_deviation(deviations) if deviations else 0.0


def leave_one_out_error(samples: Samples, drift: Sequence[float]) -> float:
    """Return the relative error of mixed steps predicted from all other steps: root mean square.

    A mixture is predicted from the costs that the steps of all other assignments give.
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
            if found is not None:  # no other step contained it: there is nothing to compare
                predicted += found.total_s
                if isinstance(node, Run):
                    price = switch_s.get(node.mode, Cost(0.0))
                    predicted += node.after_other * price.forward_s + node.before_other * price.backward_s
                measured += median(step.nodes[j][1].total_s / factor for step, factor in own)
        if predicted:
            errors.append(measured / predicted - 1.0)
    return math.sqrt(statistics.fmean(error**2 for error in errors)) if errors else 0.0


def _whole_over_parts(samples: Samples) -> float:
    """Return the median time of all nodes of a step, over the sum of the nodes' medians; over all labels."""
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

    Least squares; neither is negative.
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
    # A pair that no step contained costs as much as a measured cast from another float to the same target.
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
