"""The host's seconds of launching kernels on a GPU, from steps that wait for the GPU at every node."""

from __future__ import annotations

from collections import defaultdict

from qsync.predictor.profiling.clocks import LaunchClock
from qsync.predictor.profiling.node_timer import NodeTimer, StepTimes, timing_hook_s
from qsync.predictor.profiling.step_statistics import fit_casts, median, median_cost, node_costs
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile


class Launches:
    """The measured launches of one model's steps, by assignment.

    `samples` and `optimizer_s` come from steps in which the host waits for the GPU at every node. `free` maps
    labels to steps without a timer: seconds until all kernels were launched, and until all were done.
    """

    def __init__(self, clock: LaunchClock) -> None:
        self.timer = NodeTimer(clock, timing_hook_s(clock))
        self.samples: list[tuple[str, StepTimes]] = []
        self.optimizer_s: list[float] = []
        self.free: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def part_without_waits(self) -> float:
        """Return the launch time without waits at nodes, as a fraction of the time with waits.

        If the GPU is slower than the host, its queue fills up and lengthens the host's time. Therefore the
        least fraction over all assignments counts.
        """
        took: dict[str, list[float]] = defaultdict(list)
        for (label, step), optimizer_s in zip(self.samples, self.optimizer_s, strict=True):
            took[label].append(step.total_s + optimizer_s)
        parts = [
            median(launched_s for launched_s, _ in free) / median(took[label])
            for label, free in self.free.items()
        ]
        return min(1.0, *parts)

    def whole_s(self, optimizer_s: float) -> dict[str, list[float]]:
        """Return the seconds of untimed steps without the optimizer, by assignment."""
        return {label: [max(0.0, s - optimizer_s) for _, s in free] for label, free in self.free.items()}

    def profile(self, device_class: str, graph: OpGraph) -> Profile:
        """Return the host's seconds of launches as a profile (`Profile.launches`)."""
        part = self.part_without_waits()
        prices = node_costs(self.samples, [1.0 / part] * len(self.samples))
        steps = [step for _, step in self.samples]
        return Profile(
            device_class=device_class,
            graph_hash=graph.hash,
            shapes_hash=graph.shapes_hash,
            ops=prices.ops,
            casts=prices.casts,
            cast_fit=fit_casts(prices.casts, graph),
            switch_s=prices.switch_s,
            outside=median_cost([step.outside for step in steps], scale=part),
            host_s=part * median(step.host_s for step in steps),
            optimizer_s=part * median(self.optimizer_s),
            optimizer_bytes=0,
            step_s={},
            machine={},
        )
