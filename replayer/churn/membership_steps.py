"""The step time of a plan at any membership, without a solver, in under a millisecond. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import samples_of
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.check_records import costs_of_classes
from qsync.replayer.simulate import replay
from qsync.replayer.synchronous_step import GradientExchange, Work, step_time


class MembershipSteps:
    """Seconds of a step at any membership of a plan's cluster: `steps({"train": 1, "infer": 2})`.

    Every class keeps its assignment. The global batch stays as planned. Each membership divides it in the
    plan's proportions: equally over all ranks, or with more samples on faster classes if the plan has the
    lever "share". A rank takes more passes only if the samples of a planned pass no longer fit in its memory
    (activations grow with the samples). Loading, forward and backward are proportional to samples, and Python
    to passes; the optimizer and copies to buckets do not change. In each class, the rank with the most
    samples counts.

    >>> steps = MembershipSteps(graph, plan, profiles, cluster)
    >>> steps({"train": 1, "infer": 2}), steps.shares({"train": 1, "infer": 2})
    """

    def __init__(self, graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster) -> None:
        self._graph, self._cluster, self._cap = graph, cluster, plan.bucket_cap_bytes
        self._costs = costs_of_classes(graph, plan, profiles, cluster)
        timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=self._cap)
        weights_bytes = sum(
            (1 + value.requires_grad) * value.num_bytes for value in graph.parameters
        )  # of weights and their gradients
        self._planned: dict[str, tuple[int, int]] = {}  # class -> samples of a step, passes
        self._limits: dict[str, int] = {}  # class -> the most samples that fit in a pass
        for c in cluster.classes:
            setting = profiles[c.name].setting
            samples, passes = (setting.samples, setting.levers.passes) if setting else (samples_of(graph), 1)
            fixed_bytes = weights_bytes + profiles[c.name].optimizer_bytes
            grows_bytes = max(1, timeline[c.name].memory_bytes - fixed_bytes)  # grow with samples
            budget_bytes = plan.budgets.get(c.name, c.memory_bytes)
            room = max(1.0, (budget_bytes - fixed_bytes) / grows_bytes)
            self._planned[c.name] = samples, passes
            self._limits[c.name] = int(room * (samples // passes))
        self.samples_per_step = sum(c.count * self._planned[c.name][0] for c in cluster.classes)

    def __call__(self, ranks: Mapping[str, int]) -> float:
        """Return the seconds of a step with these ranks present (class -> number)."""
        classes = tuple(replace(c, count=ranks[c.name]) for c in self._cluster.classes if ranks.get(c.name))
        exchange = GradientExchange(self._graph, self._cluster.with_classes(classes), self._cap)
        works = [self._work(name, samples, exchange) for name, samples in self.shares(ranks).items()]
        return step_time(works, exchange)

    def shares(self, ranks: Mapping[str, int]) -> dict[str, int]:
        """Return the samples of one rank of each present class, rounded up."""
        present = {name: count for name, count in ranks.items() if count}
        parts = sum(count * self._planned[name][0] for name, count in present.items())
        return {name: -(-self.samples_per_step * self._planned[name][0] // parts) for name in present}

    def _work(self, name: str, samples: int, exchange: GradientExchange) -> Work:
        """Return the work of a rank with `samples` samples, scaled from the planned step."""
        costs, (planned, planned_passes) = self._costs[name], self._planned[name]
        full, empty = (exchange.work(of, name) for of in (costs, costs.without_backward()))
        passes = max(-(-samples // self._limits[name]), min(samples, planned_passes))
        part = samples * planned_passes / (planned * passes)  # samples of a pass / of a planned pass
        backward_s = full.backward_s - empty.backward_s
        host_s = costs.profile.host_s
        of_samples_s = full.lead_s - host_s + backward_s  # includes the last pass's backward
        return replace(
            full,
            lead_s=host_s * passes / planned_passes + of_samples_s * samples / planned - part * backward_s,
            ready_s=tuple(a + part * (b - a) for a, b in zip(empty.ready_s, full.ready_s, strict=True)),
            backward_s=empty.backward_s + part * backward_s,
        )
