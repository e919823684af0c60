"""Profile a model on two unequal ranks, plan for little memory in every way, and train under some plans."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync import Plan
from qsync.allocator import allocate, uniform
from qsync.allocator.block_levers import block_levers
from qsync.distributed import ddp_profiling, job
from qsync.distributed.agreement import agree
from qsync.distributed.job_options import HybridOptions
from qsync.errors import InfeasibleError
from qsync.experiments.harness.planned_steps import PlannedSteps, plans_of_first_rank
from qsync.experiments.harness.ranks import FAST, WEAK, Place
from qsync.experiments.workloads.bert import Bert, masked
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.subjects import demo_workload, subject
from qsync.experiments.workloads.workload import Workload, digits_workload, make_optimizer, text_workload
from qsync.records.levers import RECOMPUTE, SAVE_LESS, ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.replayer import Recapture, profiles_under_levers
from qsync.replayer.levers.recomputation import blocks

MODELS, TINY, LEVERS = ("gpt", "bert", "vit", "resnet-18"), "tiny", "gpt-small"
PRECISIONS = ("fp32", "bf16", "int8")
# Budgets of the weak rank, of its peak in FP32; the strong rank has this many times its own.
PARTS, STRONG = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3), 2.0
JOINT, ALONE, RECOMPUTED, DIVIDED, SIXTEEN = WAYS = (
    "every lever", "precisions alone", "FP32, every block recomputed", "FP32, state divided equally (ZeRO-1)",
    "BF16",
)  # fmt: skip
_SEED, _WARM, _NUM_MEASURED = 0, 3, 2
_ANY_STEP_S = 1e3  # a target that every plan reaches


def workload_named(name: str) -> Workload:
    """Return a model with its data."""
    if name == "bert":
        return text_workload(
            name, lambda: Bert(4, 512, 8), 8, 128, "byte-level BERT, 4 layers of 512; text: {source}",
            prepare=lambda inputs, targets, key: masked(inputs, key),
        )  # fmt: skip
    if name == "resnet-18":
        return digits_workload(name, lambda: ResNet((64, 128, 256, 512)), 32, "ResNet-18; digits, 16 x 16")
    if name == TINY:
        return text_workload(name, lambda: Gpt(2, 64, 2, context=64), 8, 64, "a GPT of no size; {source}")
    return subject(name, 64) if name == "vit" else demo_workload(name)


def measure(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return what every way is predicted to make of every budget, and measurements of two joint plans."""
    trained = _Trained(config, place)
    basis = trained.basis(trained.batch)
    plans = plans_of_first_rank(lambda: dict(_planned(basis, config["parts"], config["limit_s"])))
    joint = [title for title in plans if title.startswith(JOINT)]
    measured = trained.measured({title: plans[title] for title in joint[-_NUM_MEASURED:]})
    whole = uniform(basis.graph, basis.profiles, basis.cluster, {})
    return {
        "step_s": whole.step_s, "needed_bytes": _bytes(whole), "parts": config["parts"],
        "plans": {title: figures(plan) for title, plan in plans.items()}, "measured": measured,
    }  # fmt: skip


def measure_levers(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return the figures and measurements of one small model in FP32 with one lever at a time."""
    trained = _Trained(config, place)
    whole, half = (trained.basis(tuple(t[: len(t) // k] for t in trained.batch)) for k in (1, 2))
    plans = plans_of_first_rank(lambda: _one_by_one(whole, Recapture(half.graph, half.profiles)))
    measured = trained.measured(plans)
    return {title: {**figures(plan), **measured[title]} for title, plan in plans.items()}


def figures(plan: Plan) -> dict[str, Any]:
    """Return a plan's predictions and levers."""
    return {
        "predicted_s": plan.step_s, "added_variance": plan.added_variance, "predicted_bytes": _bytes(plan),
        "levers": {name: str(entry) for name, entry in plan.levers.classes.items()} if plan.levers else {},
        "saving_less": len(plan[WEAK].saving_less), "lowered": len(plan[WEAK].lowered),
        "budgets": dict(plan.budgets),
    }  # fmt: skip


class _Trained:
    """A model on this rank of two: its profiles with the other rank, and its steps under plans."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        rank, workload = dist.get_rank(), workload_named(config["model"])
        self._name, self._loss, self._config = WEAK if rank else FAST, workload.loss, config
        self._model, self.batch = workload.make_model(_SEED), workload.batch(_SEED, 0, rank)
        self._rank = job.detect_rank(self._model, place.measured_share(), self._name)

    def basis(self, batch: tuple[torch.Tensor, ...]) -> Basis:
        """Profile both ranks in steps of the job on a batch."""
        torch._dynamo.reset()
        step = job.TrainingStep(self._model, batch, self._loss)
        graph, ddp_profiling.PROFILE_S = job.form_graph(step), self._config["profile_s"]
        asked = HybridOptions(precisions=PRECISIONS, make_optimizer=make_optimizer(1e-3))
        options = ddp_profiling.ProfileOptions(asked, save_less=True)
        formed = job.form_cluster(self._rank)
        return ddp_profiling.form_basis(step, self._rank, graph, formed, options)[0]

    def measured(self, plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
        """Return median seconds of a step and both ranks' peaks by plan; plans take turns."""
        times: dict[str, list[float]] = {title: [] for title in plans}
        peaks: dict[str, list[int]] = {}
        for turn in range(self._config["turns"]):
            for title, plan in plans.items():
                make = make_optimizer(1e-3)
                steps = PlannedSteps(self._model, plan, self._name, self.batch, self._loss, make)
                every = [steps.timed() for _ in range(self._config["steps"])]
                times[title].append(statistics.median(every[_WARM:] or every))
                if turn == 0:
                    peaks[title] = agree("memory", steps.peak_bytes)
        return {
            title: {
                "step_s": statistics.median(times[title]), "turns_s": times[title],
                "peak_bytes": peaks[title],
            }
            for title in plans
        }  # fmt: skip


def _planned(basis: Basis, parts: list[float], limit_s: float) -> Iterator[tuple[str, Plan]]:
    """Yield every way's plan for every budget that it fits, as "way at part"."""
    records = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)

    def fp32(classes: Mapping[str, ClassLevers], precisions: Mapping[str, str] | None = None) -> Plan:
        profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, Levers(classes))
        kept: dict[str, Any] = {"sensitivity": basis.sensitivity, "strict": True}
        return uniform(basis.graph, profiles, basis.cluster, precisions or {}, **kept)

    needed = _bytes(fp32({}))
    equal = ClassLevers(state_part=1 / basis.cluster.num_ranks)
    simple = {
        RECOMPUTED: fp32({WEAK: ClassLevers(recomputed=blocks(basis.graph))}),
        DIVIDED: fp32({FAST: equal, WEAK: equal}),
        SIXTEEN: fp32({}, {WEAK: "bf16"}),
    }
    for part in parts:
        budgets = {FAST: int(STRONG * needed[0]), WEAK: int(part * needed[1])}
        options: dict[str, Any] = {"slack": 0.0, "budgets": budgets, "time_limit_s": limit_s}
        levers, joint = {**options, "block_levers": (RECOMPUTE, SAVE_LESS)}, list[Plan]()
        for divide_state in (False, True):
            with suppress(InfeasibleError):
                joint.append(qsync.plan(*records, divide_state=divide_state, **levers))
        if joint:
            yield f"{JOINT} at {part:g}", min(joint, key=lambda one: (one.step_s, one.added_variance))
        with suppress(InfeasibleError):
            yield f"{ALONE} at {part:g}", allocate(*records, **options)
        for way, plan in simple.items():
            if all(own <= most for own, most in zip(_bytes(plan), budgets.values(), strict=True)):
                yield f"{way} at {part:g}", plan


def _one_by_one(basis: Basis, other: Recapture) -> dict[str, Plan]:
    """Return plans in FP32 without and with one lever each."""
    records, able = (basis.sensitivity, basis.cluster), blocks(basis.graph)[:2]
    captured = basis.graph.batch_shapes[0][0]
    equal, quarter = ClassLevers(state_part=0.5), captured // 4
    less = block_levers(basis.graph, basis.profiles[WEAK], [SAVE_LESS])[:2]

    def fp32(levers: Mapping[str, ClassLevers], **options: Any) -> Plan:
        profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, Levers(levers), other)
        return allocate(basis.graph, profiles, *records, pins={"*": "fp32"}, target_s=_ANY_STEP_S, **options)

    return {
        "FP32": fp32({}),
        "a quarter less on the weak rank": fp32(
            {FAST: ClassLevers(captured + quarter), WEAK: ClassLevers(captured - quarter)}
        ),
        "two passes on the weak rank": fp32({WEAK: ClassLevers(passes=2)}),
        "two blocks recomputed on the weak rank": fp32({WEAK: ClassLevers(recomputed=able)}),
        "two blocks saving less on the weak rank": fp32(
            {}, saving_less={WEAK: [pattern for block in less for pattern in block.patterns]}
        ),
        "state divided equally": fp32({FAST: equal, WEAK: equal}),
    }


def _bytes(plan: Plan) -> list[int]:
    """Return the predicted peak of the strong and of the weak rank."""
    entries = [plan[name].predicted for name in (FAST, WEAK)]
    return [entry.memory_bytes for entry in entries if entry is not None]
