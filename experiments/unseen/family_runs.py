"""What is measured of one family of the suite, each in a fresh process: speeds, profile, plans, memory.

On CPUs all run on one thread. Variants of a step take turns in one process, so that their ratios are free of
drift. A failure is a result: the sentence that the user would read.
"""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from statistics import median
from typing import Any

import torch
from torch import nn

import qsync
from qsync import Cluster, OpGraph, Precision, Profile, api
from qsync.backend import select
from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import default_precisions, emulated_precisions
from qsync.distributed import job
from qsync.distributed.ddp_profiling import ProfileOptions
from qsync.distributed.monitoring import liveness
from qsync.errors import shortened
from qsync.experiments.harness import peers
from qsync.experiments.harness.emulated_profiles import GLOO, HERE
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.measured_memory import step_peak_bytes
from qsync.experiments.harness.pairing import Samples, measure, ratios
from qsync.experiments.harness.ranks import Place, process_group_of_one, run_on_ranks
from qsync.experiments.kernels.cases import Bench, Case
from qsync.experiments.kernels.whole_steps import peer_step, training_step
from qsync.experiments.memory.memory_runs import Choice, Trained
from qsync.experiments.prediction.random_plans import random_plans, run_plans
from qsync.experiments.workloads.families import Batch, family_named
from qsync.runtime import choosers, planned_forward

EAGER, AUTOCAST, MODES = "eager", "autocast", ("fp32", "bf16", "int8", "int8_all")
_PROFILE_S, _TINY_PROFILE_S = 30.0, 1.0  # of steps, for a profile
_PATIENCE_S = 60.0  # with a rank that says nothing
Assignment = Mapping[str, str]


def _or_failure(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return what the function returns, or `failed` with the first line of its error."""

    @wraps(run)
    def found(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return run(*arguments, **options)
        except Exception as error:
            traceback.print_exc()  # for the log; the result holds the sentence
            return {"failed": f"{type(error).__name__}: {shortened(error, quote=False)}"}

    return found


def _begin(name: str, tiny: bool, device: str) -> tuple[nn.Module, list[Batch]]:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # every variant of a model is one more entry for the same code
    keep_freed_memory()
    model, batches = family_named(name).make(tiny)
    on_device = [
        {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        for batch in batches
    ]
    return model.to(device), on_device


def speeds(
    name: str, rounds: int, modes: Sequence[str], with_peers: bool, tiny: bool = False,
    device: str = "cpu", compiled: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Time FP32 eager, torch.autocast, these modes and (if asked) every other peer in turns.

    With `compiled` every mode once more under torch.compile. Of each variant: seconds by round; on GPUs the
    bytes of a step's peak. Each variant trains a copy of the model; the last ones go where memory ends.
    """
    (model, batches), where = _begin(name, tiny, device), torch.device(device)
    bench, case = Bench(where), Case("", name, EAGER)

    def in_mode(mode: str) -> Callable[[], None]:
        return training_step(qsync.wrap(copy.deepcopy(model), mode), batches)

    case.add(EAGER, lambda: training_step(copy.deepcopy(model), batches))

    def as_one(mode: str) -> Callable[[], None]:
        whole = qsync.wrap(copy.deepcopy(model), mode)
        step = training_step(whole, batches, torch.compile(whole, mode="reduce-overhead"))
        for _ in range(2):  # a CUDA graph is recorded by the second call and replayed by the third: `add`'s
            step()
        return step

    linear = not any(isinstance(module, (nn.Conv1d, nn.Conv2d)) for module in model.modules())
    autocast, *others = peers.peers_on(where, inductor=with_peers, linear=with_peers and linear)
    makers = {
        autocast.name: partial(peer_step, bench, autocast, model, batches)
    }  # what all are compared with
    makers |= {mode: partial(in_mode, mode) for mode in modes}
    for mode in modes if compiled else ():
        makers[f"{mode}, torch.compile"] = partial(as_one, mode)
    makers |= {peer.name: partial(peer_step, bench, peer, model, batches) for peer in others}
    for of, make in makers.items():
        case.add(of, make, theirs=True)
    samples = _measured_together(case, rounds, where)
    on_gpu = where.type == "cuda"
    peaks_of = {of: step_peak_bytes(case.runs[of], where) if on_gpu else None for of in samples}
    return {
        "variants": {
            of: {"seconds": found.seconds, "peak_bytes": peaks_of[of]}
            for of, found in samples.items()
        },
        "unavailable": case.unavailable,
    }  # fmt: skip


def _measured_together(case: Case, rounds: int, where: torch.device) -> dict[str, Samples]:
    """Time the variants of a case in turns; while memory runs out, without the one that was added last.

    Each ran when it was added, beside fewer copies. Eager FP32 and torch.autocast stay.
    """
    while True:
        gc.collect()
        try:
            return measure(case.runs, rounds, where)
        except torch.OutOfMemoryError as error:
            last = list(case.runs)[-1]
            if last in (EAGER, AUTOCAST):
                raise
            why = f"{type(error).__name__}: {shortened(error, quote=False)}"
        case.unavailable[last] = f"beside {', '.join(list(case.runs)[:-1])}: {why}"
        del case.runs[last]


@_or_failure
def profiled(name: str, num_plans: int, seed: int, tiny: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Profile a family; return random plans, and the seconds of a step that replay predicts for each.

    The first plan is FP32 everywhere.
    """
    model, batches = _begin(name, tiny, device)
    own = replace(detect_class(torch.device(device)), name=HERE)
    able = (*default_precisions(own), *({Precision.INT8_ALL} - emulated_precisions(torch.device(device))))
    graph = api.trace_step(model, batches[0], None)
    profile = qsync.profile(
        model, batches[0], device_class=own, precisions=able, seconds=_TINY_PROFILE_S if tiny else _PROFILE_S
    )
    cluster = Cluster((own,), GLOO)
    plans: list[Any] = [{HERE: {}}, *random_plans(graph, cluster, {HERE: able}, num_plans, seed)]
    return {
        "plans": [{op: str(p) for op, p in plan[HERE].items()} for plan in plans],
        "predicted_s": [_predicted_s(graph, plan, profile, cluster) for plan in plans],
        "rounds": profile.num_steps, "noise": profile.noise,
    }  # fmt: skip


def _predicted_s(graph: OpGraph, plan: Mapping[str, Any], profile: Profile, cluster: Cluster) -> float:
    return qsync.replay(graph, plan, {HERE: profile}, cluster).step_s  # type: ignore[arg-type]


@_or_failure
def planned(
    name: str, assignment: Assignment, rounds: int, tiny: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Time a plan in turns with FP32 everywhere; return the seconds of both, and the plan's over FP32's."""
    model, batches = _begin(name, tiny, device)
    steps = {}
    for of, chosen in (("fp32", {}), ("plan", assignment)):
        run = copy.deepcopy(model)
        planned_forward.attach(run, choosers.following({op: Precision(p) for op, p in chosen.items()}))
        steps[of] = training_step(run, batches[:1])
    found: dict[str, Samples] = measure(steps, rounds, torch.device(device))
    return {
        **{of: samples.median_s for of, samples in found.items()},
        "ratio": median(ratios(found["plan"], found["fp32"])),
    }


@_or_failure
def ranks(name: str, num_plans: int, seed: int, tiny: bool = False) -> dict[str, Any]:
    """Run random plans on two ranks; return by how much replay misses each, and what lies in its interval."""
    config = {"name": name, "num_plans": num_plans, "seed": seed, "tiny": tiny, "weak_share": 1.0}
    found: dict[str, Any] = run_on_ranks(_on_ranks, config, command="unseen")
    return found


def _on_ranks(config: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Compare plans on one rank with their replay."""
    model, batches = _begin(config["name"], config["tiny"], str(place.device))
    with liveness.start(_PATIENCE_S):
        step, rank = job.TrainingStep(model, batches[0]), job.detect_rank(model)
        runs, _ = run_plans(step, rank, ProfileOptions(), config["num_plans"], seed=config["seed"])
    return {"errors": [run.error for run in runs], "inside": [run.is_inside for run in runs]}


class _OfBatch(nn.Module):
    """A model that takes a whole batch and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


@_or_failure
def memory(
    name: str, tiny: bool = False, device: str = "cpu", modes: Sequence[str] = MODES
) -> dict[str, Any]:
    """Return the bytes of a step in each mode: saved for backward and at the peak, both ways."""
    model, batches = _begin(name, tiny, device)
    with process_group_of_one():
        trained = Trained(_OfBatch(model), (batches[0], None), lambda loss, _: loss)
        found = {}
        for mode in modes:
            trained.program.choose(choosers.uniform(Precision(mode), select(device)), strict=False)
            trained.step()
            found[mode] = trained.measure(Choice(trained.program.assignment()))
    return found
