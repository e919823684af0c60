"""Twenty planted faults are named, each by what it is; two clean hours name nothing.

A running job sees phases that take longer than predicted (`find_drift`). A profile of the faulty job then
shows the operator or phase on the critical path, or the change that helps most.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator import what_ifs
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.plans import ClassPlan, Plan
from qsync.replayer import find_critical_path, replay, slowed
from qsync.replayer.explanation.phases import Phases, expected, find_drift, median
from qsync.replayer.levers.batch_size import times

GRAPH = encoder(2)
BASE = {op.name: Precision.FP32 for op in GRAPH.adjustable}


@dataclass(frozen=True)
class Job:
    """What a job is predicted from; `train` and `infer` have two ranks each."""

    profiles: dict[str, Any]
    link: Link
    infer: tuple[tuple[str, Precision], ...] = ()
    cap: int | None = 100_000

    @property
    def parts(self) -> tuple[Any, ...]:
        infer = ClassPlan({**BASE, **dict(self.infer)})
        plan = Plan(
            GRAPH.model, GRAPH.hash, {"train": ClassPlan(BASE), "infer": infer}, bucket_cap_bytes=self.cap
        )
        return GRAPH, plan, self.profiles, cluster_of({"train": 2, "infer": 2}, link=self.link)

    def path(self):
        return find_critical_path(*self.parts)

    def phases(self) -> dict[str, Phases]:
        return expected(replay(*self.parts))

    def helps_most(self):
        graph, plan, profiles, cluster = self.parts
        found = what_ifs(graph, plan, profiles, sensitivity_of(GRAPH), cluster)
        return next(one for one in found if one.kind != "card")  # more cards always help

    def bucket_gain(self) -> float:
        """The part of the step that buckets of another size win."""
        graph, plan, profiles, cluster = self.parts
        found = what_ifs(graph, plan, profiles, sensitivity_of(GRAPH), cluster)
        return sum(one.won_s / self.path().step_s for one in found if one.kind == "buckets")

    def of(self, name: str, **changes: Any) -> Job:
        return replace(self, profiles={**self.profiles, name: replace(self.profiles[name], **changes)})

    def slower_op(self, name: str, op: str, factor: float) -> Job:
        ops = self.profiles[name].ops
        slower = {mode: times(cost, factor) for mode, cost in ops[op].items()}
        return self.of(name, ops={**ops, op: slower})


CLEAN = Job({
    "train": profile_of(GRAPH, "train", loading_s=2e-4, host_s=2e-4, optimizer_s=2e-4),
    "infer": profile_of(GRAPH, "infer", slow=1.5, loading_s=3e-4, host_s=3e-4, optimizer_s=3e-4),
}, Link(1e-5, 2e8))  # fmt: skip


def largest(job: Job, phase: str = "") -> tuple[str, str]:
    """Class and name of the event that takes most of the critical path."""
    events = [event for event in job.path().events if event.phase == phase or not phase]
    event = max(events, key=lambda event: event.duration_s)
    return event.device_class, event.name


def everything_slower(name: str, factor: float) -> Job:
    return replace(CLEAN, profiles={**CLEAN.profiles, name: slowed(CLEAN.profiles[name], factor)})


def slow_op(name: str, op: str) -> tuple[Job, Callable[[Job], object], object, str]:
    return (
        CLEAN.slower_op(name, op, 40.0), lambda job: (largest(job), job.helps_most().device_class),
        ((name, f"{op} [fp32], backward"), name), f"{name} compute",
    )  # fmt: skip


def helps(job: Job) -> tuple[str, str | None]:
    one = job.helps_most()
    return one.kind, one.device_class


def slow_cast() -> Job:
    fit = {
        key: (times(base, 3000.0), rise) if key[1] == "bf16" else (base, rise)
        for key, (base, rise) in CLEAN.profiles["infer"].cast_fit.items()
    }
    return replace(CLEAN.of("infer", cast_fit=fit), infer=(("layer.0.fc1", Precision.BF16),))


# name: (the job with the fault, how it is asked, what it must say, class and phase that a running job blames)
FAULTS: dict[str, tuple[Job, Callable[[Job], object], object, str]] = {
    "out slow on infer": slow_op("infer", "layer.0.out"),
    "fc2 slow on infer": slow_op("infer", "layer.1.fc2"),
    "query slow on train": slow_op("train", "layer.0.query"),
    "attention slow on infer": slow_op("infer", "layer.1.attention"),
    "fc1 slow on train": slow_op("train", "layer.1.fc1"),
    "gelu slow on infer": (
        CLEAN.slower_op("infer", "layer.0.gelu", 300.0), largest,
        ("infer", "layer.0.gelu [fp32], backward"), "infer compute",
    ),
    "norm slow on train": (
        CLEAN.slower_op("train", "layer.1.norm2", 2000.0), largest,
        ("train", "layer.1.norm2 [fp32], backward"), "train compute",
    ),
    "loss slow on infer": (
        CLEAN.of("infer", outside=times(CLEAN.profiles["infer"].outside, 3000.0)), helps, ("loss", "infer"),
        "infer compute",
    ),
    **{
        f"{kind} slow on {name}": (
            CLEAN.of(name, **{f"{kind}_s": 2e-2}), helps, (kind, name), f"{name} {shown}",
        )
        for kind, shown in (("loading", "data loading"), ("host", "host"), ("optimizer", "optimizer"))
        for name in ("infer", "train")
    },
    "all of train slow": (
        everything_slower("train", 5.0), lambda job: job.path().classes, ("train",), "train compute",
    ),
    "all of infer slow": (
        everything_slower("infer", 5.0), lambda job: job.path().classes, ("infer",), "infer compute",
    ),
    "link narrow": (
        replace(CLEAN, link=Link(1e-5, 1e7)), lambda job: job.helps_most().what,
        "the link has twice the bandwidth", "any communication",
    ),
    "link far": (
        replace(CLEAN, link=Link(2e-2, 2e8)), lambda job: job.helps_most().what,
        "the link has half the latency", "any communication",
    ),
    "bucket oversized": (
        replace(CLEAN, cap=600_000), lambda job: job.bucket_gain() > 0.05, True, "any communication",
    ),
    "an operator lowered in vain": (
        slow_cast(), lambda job: (job.helps_most().kind, job.helps_most().what.split(" in ")[0]),
        ("precision", "layer.0.fc1"), "infer compute",
    ),
}  # fmt: skip


def test_there_are_twenty_faults():
    assert len(FAULTS) == 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    job, ask, answer, _ = FAULTS[fault]
    assert job.path().step_s > 1.2 * CLEAN.path().step_s
    assert ask(CLEAN) != answer or fault == "all of infer slow"
    assert ask(job) == answer


def noisy(phases: dict[str, Phases], draw: random.Random, parts: float) -> list[tuple[str, Phases]]:
    """One step of the four ranks: own work varies, and who is early waits for who is late."""
    names = ["train", "train", "infer", "infer"]
    factors = [draw.lognormvariate(0.0, parts) for _ in names]
    own = [
        replace(
            phases[name], compute_s=f * phases[name].compute_s, host_s=f * phases[name].host_s,
            optimizer_s=f * phases[name].optimizer_s, blocked_s=0.0,
        )
        for name, f in zip(names, factors, strict=True)
    ]  # fmt: skip
    exposed_s = min(one.blocked_s for one in phases.values())
    step_s = max(one.period_s for one in own) + exposed_s
    return [
        (name, replace(one, blocked_s=step_s - one.period_s)) for name, one in zip(names, own, strict=True)
    ]


def medians(phases: dict[str, Phases], draw: random.Random, num_steps: int = 50) -> list[tuple[str, Phases]]:
    """The medians that every rank publishes after so many steps that vary by five parts in a hundred."""
    steps = [noisy(phases, draw, 0.05) for _ in range(num_steps)]
    return [(of_rank[0][0], median(phases for _, phases in of_rank)) for of_rank in zip(*steps, strict=True)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_running_job_blames_the_class_and_phase_of_a_planted_fault(fault):
    job, *_, blamed = FAULTS[fault]
    found = find_drift(CLEAN.phases(), medians(job.phases(), random.Random(fault)))
    assert found is not None
    device_class, phase = blamed.split(" ", 1)
    assert found.phase == phase
    assert device_class in ("any", found.device_class)


def test_two_clean_hours_name_nothing():
    """A step of 0.3 s makes 480 comparisons of 50 steps in two hours."""
    draw, predicted = random.Random(0), CLEAN.phases()
    alarms = [find_drift(predicted, medians(predicted, draw)) for _ in range(480)]
    assert not [alarm for alarm in alarms if alarm is not None]
