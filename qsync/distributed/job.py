"""What the ranks of a running job find out together before the first step: who they are, what they cost, what
to run.

Every phase is one `agree`: an error on one rank is raised, with its rank, on all of them, and nobody hangs.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync import api
from qsync.backend.device_detection import detect_class, device_of, machine
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.ddp_profiling import Lockstep
from qsync.errors import MismatchError
from qsync.predictor.profiling.link_benchmark import LinkMeasurement, measure_link
from qsync.predictor.profiling.runner import check_finite, check_scalar
from qsync.records.basis import Basis
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import OpGraph, digest
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.runtime import program as runtime

Progress = Callable[[str], None]

# Profiling a class takes no longer than this, but for the rounds it takes in any case.
PROFILE_S = 30.0


def join_job(device: torch.device, timeout_s: float = 600.0) -> None:
    """Join the job that torchrun (or the environment it would set) describes, unless that is done already.

    Whoever joins here leaves when Python ends, if it ends well.
    """
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    # Ranks on GPU and CPU together speak gloo, which takes tensors of either.
    backend = os.environ.get("QSYNC_BACKEND") or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    atexit.register(_leave_job)


def _leave_job() -> None:
    """End the process group's threads while there still is an interpreter.

    One that gives back a Python object later takes the process down with SIGABRT ("terminate called without
    an active exception", once in some hundred runs on a busy machine). After an error nothing is ended: a
    peer may be gone, and ending would wait for it.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_models(model: torch.nn.Module, extra: Mapping[str, object] | None = None) -> None:
    """MismatchError on every rank, with both sides, unless all ranks run the same software on the same
    parameters.
    """
    layout = [
        f"{name} {tuple(p.shape)} strides {p.stride()} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    facts: dict[str, object] = {
        "qsync": qsync.__version__,
        "torch": torch.__version__,
        "the model's class": type(model).__name__,
    }
    facts["the number of parameters"] = len(layout)
    check_same({**facts, **(extra or {})})
    check_same({f"parameter {i}": text for i, text in enumerate(layout)})


def own_class(model: torch.nn.Module, emulated_share: float | None, name: str | None = None) -> DeviceClass:
    """This rank's device class, under its detected name or the one the user gives it."""
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = detect_class(device_of(model), emulated_share, on_host)
    return replace(found, name=name) if name else found


def agree_on_class(model: torch.nn.Module, emulated_share: float | None, name: str | None) -> DeviceClass:
    """This rank's device class; an error on one rank is raised on all."""
    found: list[DeviceClass] = []
    agree("detecting devices", lambda: found.append(own_class(model, emulated_share, name)))
    return found[0]


def form_cluster(
    own: DeviceClass, device: torch.device, progress: Progress = lambda text: None, rounds: int = 6
) -> tuple[Cluster, LinkMeasurement]:
    """The classes of all ranks, with their counts, and the link between them as measured here."""
    everyone = agree(
        "finding device classes", lambda: {**asdict(own), "precisions": [str(p) for p in own.precisions]}
    )
    classes: dict[str, DeviceClass] = {}
    for rank, entry in enumerate(everyone):
        found = DeviceClass(**{**entry, "precisions": tuple(Precision(p) for p in entry["precisions"])})
        known = classes.get(found.name)
        if known is not None:
            _check_alike(known, found, rank)
        count = known.count + 1 if known else 1
        memory = min(found.memory_bytes, known.memory_bytes) if known else found.memory_bytes
        classes[found.name] = replace(found, count=count, memory_bytes=memory)
    alone = LinkMeasurement(Link(0.0, 1e12), 0.0, 0.0)
    exchanged = measure_link(device, own.emulated_share, rounds, progress) if len(everyone) > 1 else alone
    return Cluster(tuple(classes.values()), exchanged.link), exchanged


def _check_alike(known: DeviceClass, found: DeviceClass, rank: int) -> None:
    """MismatchError, with both sides, unless a rank can share the profile of its class's ranks before it."""
    for what in ("device", "hardware", "precisions", "emulated_share"):
        own, theirs = (getattr(one, what) for one in (found, known))
        if own != theirs:
            if what == "precisions":
                own, theirs = ", ".join(own), ", ".join(theirs)
            raise MismatchError(
                f"rank {rank} calls itself {found.name!r}, but its {what} is {own}, and that of others of "
                f"that class {theirs}; give it another device_class"
            )


def form_basis(
    model: torch.nn.Module,
    example_batch: Any,
    loss_fn: api.LossFunction | None,
    own: DeviceClass,
    formed: tuple[Cluster, LinkMeasurement],
    *,
    graph: OpGraph,
    precisions: Sequence[Precision | str] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    progress: Progress = lambda text: None,
    loader: Iterable[Any] | None = None,
    bucket_cap_mb: float | None = None,
    save_less: bool = False,
) -> Basis:
    """Profile every class on its own ranks, in steps of the job, and gather the sensitivity of the model.

    The link of the basis's cluster is the one measured, as fast as those steps say. The ranks of a class
    measure alike; the first one's profile stands for the class. Each rank takes the sensitivity on its own
    batch, and the mean over ranks counts. With `save_less` following operators are also timed as they save
    less for backward, which takes twice as many steps.
    """
    cluster, exchanged = formed
    if world_size() > 1:
        cap = int(bucket_cap_mb * 2**20) if bucket_cap_mb else None
        with api.running(model) as program:
            together = _lockstep(
                program, model, example_batch, loss_fn, own, precisions,
                make_optimizer, bucket_cap_mb, progress, loader, save_less,
            )  # fmt: skip
            together.fill(PROFILE_S)
            profile = with_toll(together.profile(machine(device_of(model))), exchanged)
            profiles = first_of_each_class(agree("gathering profiles", profile.to_json))
            cluster = together.cluster_in_use(graph, profiles, cluster, cap)
        del together
        gc.collect()  # a DDP that is gone takes its hooks along
    else:
        profile = api.profile(
            model, example_batch, loss_fn, device_class=own, precisions=precisions, seconds=PROFILE_S,
            make_optimizer=make_optimizer, progress=progress, save_less=save_less, loader=loader,
        )  # fmt: skip
        profiles = {own.name: profile}
    progress("sensitivity")
    found = agree("sensitivity", lambda: api.sensitivity(model, [example_batch], loss_fn).to_json())
    return Basis(graph, cluster, profiles, mean_sensitivity(found))


def _lockstep(
    program: runtime.Program, model: torch.nn.Module, batch: Any, loss_fn: api.LossFunction | None,
    own: DeviceClass, precisions: Sequence[Precision | str] | None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer], bucket_cap_mb: float | None, progress: Progress,
    loader: Iterable[Any] | None, save_less: bool,
) -> Lockstep:  # fmt: skip
    chosen: list[Precision] = []
    trained: list[torch.nn.Parameter] = []

    def check() -> None:
        chosen.extend(api.precisions_to_profile(own, precisions))
        trained.extend(api.trained_parameters(model))

    agree("profiling", check)
    bare = api.loss_of(model, batch, loss_fn)

    def named() -> torch.Tensor:
        with api.naming_operators(program, bare, trained):
            loss = bare()
            check_scalar(loss)
            check_finite(loss)
        return loss

    def parallel(group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
        return api.loss_of(in_ddp(model, bucket_cap_mb, group), batch, loss_fn)

    return Lockstep(
        program, named, parallel, trained, own, device_of(model), chosen, make_optimizer, progress, loader,
        save_less,
    )  # fmt: skip


def in_ddp(
    model: torch.nn.Module, bucket_cap_mb: float | None = None, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """The model in DDP with gradients living in the buckets, as replay assumes."""
    device = device_of(model)
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        model,
        device_ids=ids,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        process_group=group,
    )


def with_toll(profile: Profile, exchanged: LinkMeasurement) -> Profile:
    """A profile that knows what an all-reduce takes from its class's compute."""
    return replace(
        profile, reduce_s_per_call=exchanged.toll_s_per_call, reduce_s_per_byte=exchanged.toll_s_per_byte
    )


def first_of_each_class(found: Sequence[Mapping[str, Any]]) -> dict[str, Profile]:
    """Profiles by class, from what each rank measured, in rank order."""
    profiles: dict[str, Profile] = {}
    for entry in found:
        profile = Profile.from_json(entry)
        profiles.setdefault(profile.device_class, profile)
    return profiles


def form_graph(model: torch.nn.Module, example_batch: Any, loss_fn: api.LossFunction | None) -> OpGraph:
    """The graph of this rank's model on its batch, known to be the same on every rank."""
    graphs: list[OpGraph] = []
    agree("tracing the model", lambda: graphs.append(api.trace_step(model, example_batch, loss_fn)))
    graph = graphs[0]
    check_same({"the traced graph": graph.hash, "the batch's shapes": graph.shapes_hash})
    return graph


def basis_key(graph: OpGraph, cluster: Cluster, options: Mapping[str, object]) -> str:
    """What a cached plan is filed under: the model, its batch shapes, the classes, the versions and the
    options.

    The link is left out: it is measured anew in every job and never twice the same.
    """
    classes = [
        [
            *(c.name, c.device, c.hardware, c.emulated_share, c.count, c.memory_bytes),
            [str(p) for p in c.precisions],
        ]
        for c in cluster.classes
    ]
    versions = [qsync.__version__, torch.__version__]
    chosen = {name: _stable(value) for name, value in options.items()}
    return digest([graph.hash, graph.shapes_hash, classes, versions, chosen])


def _stable(value: object) -> str:
    """Text that stands for an option alike in every run: a function's place and code, not its address."""
    code = getattr(value, "__code__", None)
    if code is not None:
        constants = [repr(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
        return digest([code.co_qualname, code.co_code.hex(), constants])
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)


def mean_sensitivity(entries: Sequence[Mapping[str, Any]]) -> Sensitivity:
    """The mean of what each rank found on its own batch."""
    found = [Sensitivity.from_json(entry) for entry in entries]
    first = found[0]
    omega = {
        op: {mode: sum(entry.omega[op][mode] for entry in found) / len(found) for mode in modes}
        for op, modes in first.omega.items()
    }
    return replace(first, omega=omega, num_batches=sum(entry.num_batches for entry in found))
