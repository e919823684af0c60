"""Profiles taken in steps of the job: all ranks step together, through DDP, as they will in training.

A rank that runs alone finds its caches warm. Beside peers that compute, and all-reduces that run on its
cores, its operators take a few per cent longer; operators bound by memory take up to a quarter longer (CPU,
gloo, two ranks). Therefore whole steps of the job are timed. The time that communication adds to a step tells
how fast the links are in use and what they take from compute, if every rank has a clock that tells its work
from waiting. Classes take the steps of a round in orders in which as many as possible arrive together, as
they will under a plan: an all-reduce takes a third more from compute where its peer only waits (CPU, gloo).
Where some rank has no such clock (GPUs, several threads a rank), the ranks step together without DDP,
copies to buckets are timed by themselves, and links stay as they were measured between barriers.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from qsync import api
from qsync.backend.devices.device_detection import machine
from qsync.backend.precisions_that_pay import precisions_to_profile
from qsync.distributed import data_parallel, job
from qsync.distributed.agreement import agree, agree_locally, check_same
from qsync.distributed.exchange_prices import compression_errors, measure_codecs
from qsync.distributed.gradient_weighting import compress_gradients, compressed_sum_of
from qsync.distributed.job_options import HybridOptions
from qsync.errors import FormatError, UnsupportedError, shortened
from qsync.operators.precision import Precision
from qsync.predictor.profiling.clocks import Clock, ShareClock, clock_for
from qsync.predictor.profiling.link_benchmark import LinkMeasurement
from qsync.predictor.profiling.loader_wait import undrawn
from qsync.predictor.profiling.machine_drift import drift_factors
from qsync.predictor.profiling.profiler import Profiler, ProfilerOptions
from qsync.predictor.profiling.runner import check_finite, check_scalar
from qsync.records.cluster import Cluster
from qsync.records.compression import AUTO, kinds_for
from qsync.records.graph import OpGraph
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile, Sensitivity, shown_shapes
from qsync.replayer import Recapture, buckets
from qsync.replayer.exchange_calibration import MeasuredStep, with_exchange_in_use
from qsync.runtime.program import Program

# Planning takes at most so many seconds, or so many steps where these take longer, and in any case what every
# plan needs: a trace, the sensitivity, a round of steps.
PROFILE_S, PROFILE_STEPS = 16.0, 40
PROFILE_S_VARIABLE = "QSYNC_PROFILE_S"  # of the environment: a bound in the place of both
# How long ranks wait for the gradients of a rank that failed in the midst of a step: the longer of so many
# seconds and so many steps.
MIN_PATIENCE_S, PATIENCE_STEPS = 60.0, 20
_MORE_FOR_SECOND = 0.2  # of the time of one number of samples, for a second one
_NEVER = 1e6  # assignment cost that excludes pairing a step that saves less with one that does not


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How the classes of a job are profiled, beside the options of the job.

    Before every step a batch is fetched from the job's loader, timed and not used. With `save_less` following
    operators are also timed in their forms that save less for backward, which takes twice as many steps. A
    plan's `base` is profiled even where it is not worth choosing. Planning began at `began_s`
    (`time.perf_counter`). With `briefly` a round is enough: no choice hangs on the times.
    """

    asked: HybridOptions = field(default_factory=HybridOptions)
    save_less: bool = False
    progress: job.Progress = job.silent
    base: Precision | None = None
    began_s: float = field(default_factory=time.perf_counter)
    briefly: bool = False

    def until_s(self, step_s: float, more: float = 0.0) -> float:
        """Return when planning shall end, if a step takes so long, with so much `more` of the time.

        Raises FormatError for an unusable bound.
        """
        asked = bool(os.environ.get(PROFILE_S_VARIABLE))
        whole_s = profile_seconds() if asked else max(PROFILE_S, PROFILE_STEPS * step_s)
        return self.began_s + (1.0 + more) * whole_s

    def of_profiler(self, num_precisions: int, warm_until_s: float) -> ProfilerOptions:
        """Return the part of these options that one rank's profiler takes."""
        return ProfilerOptions(
            self.asked.make_optimizer, self.progress, self.save_less, self.asked.loader, num_precisions,
            warm_until_s,
        )  # fmt: skip


def form_basis(
    step: job.TrainingStep,
    rank: job.Rank,
    graph: OpGraph,
    formed: tuple[Cluster, LinkMeasurement],
    options: ProfileOptions,
    second: Callable[[Basis], Any] | None = None,
) -> tuple[Basis, Recapture | None]:
    """Profile every class on its own ranks, in steps of the job, and gather the sensitivity of the model.

    `formed` is what `job.form_cluster` returned. All ranks of a class take the same measurements; the profile
    of the first rank stands for the class. Each rank gathers the sensitivity on its own batch; the basis has
    the mean. Links and tolls are as the measured steps of the job say.

    `second` returns this rank's batch with another number of samples, from the basis of the first round. Both
    numbers are then measured in turns, so that a drift of the machine falls on both alike; the second's graph
    is this rank's own.
    """
    cluster, link = formed
    if options.asked.compression is not None:
        options.progress("compressed exchanges")
        is_alike = len({each.hardware for each in cluster.classes}) == 1
        kinds = kinds_for(is_alike) if options.asked.compression == AUTO else (options.asked.compression,)
        link = measure_codecs([kind for kind in kinds if kind != "fp32"], formed, rank)
        cluster = replace(cluster, codecs=link.codecs, compression=options.asked.kinds or {})
    ddp = options.asked.ddp_options or {}
    broadcasts = ddp.get("forward_sync_buffers", ddp.get("broadcast_buffers", True))
    cluster = replace(cluster, broadcasts_buffers=bool(broadcasts), link=link.link)
    options.progress("sensitivity")
    found = agree("sensitivity", lambda: api.sensitivity(step.model, [step.batch], step.loss_fn).to_json())

    def basis_of(profiles: dict[str, Profile]) -> Basis:
        return Basis(graph, cluster, profiles, replace(mean_sensitivity(found), exchange=errors))

    errors: dict[str, tuple[float, ...]] = {}
    # One batch, whose shapes are those of the graph; what a loader gives is not used.
    running = api.running(step.model, step.loss(), dynamic=False)
    with undrawn(options.asked.loader), running as program:
        profilers = [DdpProfiler(program, step, rank, options)]
        first, more = profilers[0], 0.0
        if second is not None:
            fill_in_turns(profilers, -math.inf)
            options.progress("another number of samples")
            profilers.append(first.beside(second(basis_of(first.gathered(link)))))
            more = _MORE_FOR_SECOND
        fill_in_turns(profilers, -math.inf if options.briefly else options.until_s(first.step_s, more))
        profiles, *others = gathered_together(profilers, link)
        steps = measured_together(profilers, others)
        graphs = [replace(profiler.profiler.graph, num_calls=graph.num_calls) for profiler in profilers[1:]]
        if options.asked.compression == AUTO and job.world_size() > 1:
            options.progress("errors of compression")
            gradients = agree_locally("errors of compression", partial(_gradients, step))
            those = buckets(graph, options.asked.bucket_cap_bytes)
            offered = [kind for kind in link.codecs if kind != "fp32"]
            errors = compression_errors(gradients, those, offered)
        if second is not None:  # training goes on from the planned batch
            agree_locally("profiling", step.loss())
    group, sums = first.group, compressed_sum_of(first.model)
    del first, profilers
    gc.collect()  # a DDP that is gone takes its hooks along
    if group is not None:
        dist.destroy_process_group(group)
    if sums is not None and sums.hosts is not None:
        sums.hosts.destroy()
    agree_locally("profiling", partial(_check_stateless, graph, profiles[rank.device_class.name]))
    options.progress("links in use")
    basis = calibrated(basis_of(profiles), steps, options.asked.bucket_cap_bytes)
    return basis, Recapture(graphs[0], others[0]) if others else None


def _gradients(step: job.TrainingStep) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of one step by parameter; zeros of one that it does not reach."""
    named = {name: each for name, each in step.model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(step.loss()(), list(named.values()), allow_unused=True)
    return {
        name: gradient if gradient is not None else torch.zeros_like(parameter)
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }


def calibrated(basis: Basis, steps: Sequence[MeasuredStep], bucket_cap_bytes: int | None) -> Basis:
    """Return the basis with links and tolls as measured steps of the job say, if there are any."""
    cluster, profiles = with_exchange_in_use(
        basis.graph, basis.profiles, basis.cluster, steps, bucket_cap_bytes
    )
    return replace(basis, cluster=cluster, profiles=profiles)


def profile_seconds() -> float:
    """Return the longest time to plan for. FormatError for a variable that is no such time."""
    text = os.environ.get(PROFILE_S_VARIABLE)
    if not text:
        return PROFILE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise FormatError(f"{PROFILE_S_VARIABLE} must be a number of seconds, found {shortened(text)}")
    return seconds


def _check_stateless(graph: OpGraph, profile: Profile) -> None:
    """Raise UnsupportedError where profiled calls take other tensors than the first did of the same batch."""
    if graph.batch_shapes != profile.batch:
        sides = [shown_shapes(batch) for batch in (graph.batch_shapes, profile.batch)]
        raise UnsupportedError(
            f"{graph.model} takes other tensors in a later call ({sides[1]}) than in the first ({sides[0]}), "
            "of one batch: it keeps state from call to call; let loss_fn reset that state"
        )


class DdpProfiler:
    """The profiler of one rank of a job (or of a single process), a step at a time with all others.

    The first steps run the model without DDP: a rank whose data or kernels are unusable finds out while
    nobody waits for its gradients. A class with fewer precisions than another repeats the first steps
    of its round. An error that any rank meets is raised on every rank.

    A profiler `beside` a first one, of another batch of the same model, takes its DDP, optimizer and weights,
    and steps of uniform precisions alone: memory and mixed precisions are in the first profile.

    >>> profiler = DdpProfiler(program, step, rank, ProfileOptions(save_less=True))
    >>> fill_in_turns([profiler], time.perf_counter() + 30.0)
    """

    def __init__(
        self,
        program: Program,
        step: job.TrainingStep,
        rank: job.Rank,
        options: ProfileOptions,
        first: DdpProfiler | None = None,
    ) -> None:
        self._program, self._step, self._rank, self._options = program, step, rank, options
        self._turn = 0
        self.precisions = agree_locally(
            "profiling",
            lambda: precisions_to_profile(
                rank.device_class, step.model, options.asked.precisions, options.base
            ),
        )
        parameters = agree_locally("profiling", lambda: api.trained_parameters(step.model))
        clock = job_clock(rank.device, rank.device_class.emulated_share)
        tells_waiting = agree("profiling", lambda: isinstance(clock, ShareClock))
        self.in_ddp = all(tells_waiting) and job.world_size() > 1  # whether steps go through DDP
        self.model = step.model  # what steps call: the model, or DDP around it
        self.group: dist.ProcessGroup | None = None  # of that DDP
        self._loss = _checked_loss(program, step.loss(), parameters)
        self._bucket_bytes = _bucket_bytes(parameters, options.asked.ddp_options or {})
        most = max(agree("profiling", lambda: len(self.precisions)))
        warm_until_s = options.until_s(math.inf) if first is None else -math.inf
        self.profiler = agree_locally("profiling", lambda: Profiler(
            program, lambda: self._loss(), parameters, self.precisions, clock,
            options.of_profiler(most, warm_until_s), first.profiler if first is not None else None,
        ))  # fmt: skip
        is_late = agree("profiling", lambda: time.perf_counter() > warm_until_s)
        if any(is_late) and not options.save_less:
            self.profiler.shorten_round(most)
        self.step_s = max(self.profiler.typical_s())  # of the slowest assignment and rank
        self._order = list(range(self.profiler.num_choices))  # by turn of a round, which of this rank's steps
        if job.world_size() > 1:
            self._step_together(first)

    def beside(self, batch: Any) -> DdpProfiler:
        """Return a profiler of another batch, to take steps in turns with this one (`fill_in_turns`)."""
        step = replace(self._step, batch=batch)
        other = DdpProfiler(self._program, step, self._rank, self._options, self)
        check_same({"the traced graph of another number of samples": other.profiler.graph.hash})
        return other

    def _step_together(self, first: DdpProfiler | None) -> None:
        """Time steps on all ranks as the slowest rank would; if `in_ddp`, step through DDP from now on."""
        everyone: list[Any] = agree("profiling", lambda: [
            self._rank.device_class.name, self.profiler.typical_s(),
            [self.profiler.saves_less(k) for k in range(self.num_choices)],
        ])  # fmt: skip
        orders = orders_of_classes(everyone) if self.in_ddp else {}
        self._order = orders.get(self._rank.device_class.name, self._order)
        taken = [[times[k] for k in orders.get(name, range(len(times)))] for name, times, _ in everyone]
        typical_s = [max(of_ranks) for of_ranks in zip(*taken, strict=True)]
        self.step_s = max(typical_s)
        uniform = agree("profiling", lambda: [self.profiler.is_uniform(k) for k in self._order])
        twinned = [any(of_ranks) for of_ranks in zip(*uniform, strict=True)]
        turn = {k: turn for turn, k in enumerate(self._order)}
        own = [turn[k] for k in range(self.num_choices)]
        self.profiler.set_typical_s([typical_s[t] for t in own], [twinned[t] for t in own])
        if self.in_ddp and first is not None:
            self.group, self.model = first.group, first.model
        elif self.in_ddp:
            options = self._options
            patience = timedelta(seconds=max(MIN_PATIENCE_S, PATIENCE_STEPS * max(typical_s)))
            ddp_options = dict(options.asked.ddp_options or {})
            agree_locally("profiling", lambda: self._check_unused(self._step.model, ddp_options))
            given = ddp_options.get("process_group")
            backend = dist.get_backend(given) if given is not None else None
            self.group = ddp_options["process_group"] = dist.new_group(timeout=patience, backend=backend)
            ddp_options["init_sync"] = False  # it would write to the model, which is put back afterwards
            self.model = data_parallel.in_ddp(self._step.model, options.asked.bucket_cap_mb, ddp_options)
            compress_gradients(self.model, options.asked.kinds, self.group)
        if self.in_ddp:
            self._loss = replace(self._step, model=self.model).loss()

    def _check_unused(self, model: torch.nn.Module, ddp_options: Mapping[str, object]) -> None:
        """Raise UnsupportedError where DDP would wait for the gradient of a parameter that is not used."""
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # DDP's own mark
        names = [
            name
            for name, parameter in model.named_parameters()
            if id(parameter) in self.profiler.unused and name not in ignored
        ]
        if names and not any(map(ddp_options.get, ("find_unused_parameters", "static_graph"))):
            raise UnsupportedError(
                f"a step gives {shortened(names[0])} no gradient, and DDP waits for one: give "
                'ddp_options={"find_unused_parameters": True}, or freeze what is not trained '
                "(requires_grad_(False))"
            )

    @property
    def num_choices(self) -> int:
        """The number of steps of a round, the same on every rank."""
        return self.profiler.num_choices

    def measure(self, k: int) -> None:
        """Take the k-th step of a round, on all ranks."""
        agree("profiling", partial(self.profiler.measure, self._order[k]))

    def take_round(self, until_s: float) -> bool:
        """Take the rest of a round's steps while any rank wants more; return whether one was taken.

        No rank wants more once it knows a step's time to half a per cent, or after `until_s` (of
        `time.perf_counter`); in any case the first step of a round is taken twice and every other step once.
        """
        begun = self._turn
        while any(agree("profiling", lambda: self.profiler.wants_more(until_s))):
            self.measure(self._turn % self.num_choices)
            self._turn += 1
            if self._turn % self.num_choices == 0:
                break
        return self._turn > begun

    def gathered(self, link: LinkMeasurement, drift: Sequence[float] | None = None) -> dict[str, Profile]:
        """Return the profiles of all classes, with the tolls of the link as measured between barriers.

        They are the same on every rank. `drift` is the factor by which the machine was slow at each sample,
        if the caller knows it. Through DDP, copies to buckets are in the operators' backward times.
        """
        own = self._rank.device_class
        found = self.profiler.profile(own.name, machine(self._rank.device), own.emulated_share, drift)
        found = replace(
            found,
            optimizer_bytes=found.optimizer_bytes + self._bucket_bytes,
            bucket_s_per_byte=0.0 if self.in_ddp else found.bucket_s_per_byte,
            reduce_s_per_call=link.toll_s_per_call,
            reduce_s_per_byte=link.toll_s_per_byte,
            exchange_tolls=link.codec_tolls,
        )
        profiles: dict[str, Profile] = {}
        for entry in agree("gathering profiles", found.to_json):
            profile = Profile.from_json(entry)
            profiles.setdefault(profile.device_class, profile)  # the first rank's stands for its class
        return profiles

    def measured_steps(self) -> list[MeasuredStep]:
        """Return what the exchange took in every step so far; the same on every rank. None without DDP."""
        if not self.in_ddp:
            return []
        samples = zip(self.profiler.waits(), self.profiler.samples(), strict=True)
        own = [(self._order.index(k), work_s, *wait) for (k, wait), (_, work_s, _) in samples]
        everyone = agree("gathering steps", lambda: own)
        classes, plans, plain = self._round()
        measured = []
        for ranks in zip(*everyone, strict=True):
            turn = ranks[0][0]
            if not plain[turn]:
                continue  # it shows nothing new of the exchange, and `plans` do not state what saves less
            # Use the wait of the rank that works longest: all other ranks wait for it.
            longest = max(range(len(ranks)), key=lambda rank: ranks[rank][1])
            _, _, wait_s, exposed_s = ranks[longest]
            measured.append(MeasuredStep(plans[turn], classes[longest], wait_s, exposed_s))
        return measured

    def _round(self) -> tuple[list[str], list[dict[str, dict[str, Precision]]], list[bool]]:
        """Return each rank's class and, by step of a round, assignments and whether nothing saves less."""
        everyone: list[Any] = agree("gathering steps", lambda: [
            self._rank.device_class.name,
            [{op: str(p) for op, p in self.profiler.assignment(k).items()} for k in self._order],
            [self.profiler.saves_less(k) for k in self._order],
        ])  # fmt: skip
        turns = range(self.num_choices)
        plans: list[dict[str, dict[str, Precision]]] = [{} for _ in turns]
        for name, assignments, _ in everyone:
            for plan, assignment in zip(plans, assignments, strict=True):
                plan.setdefault(name, {op: Precision(p) for op, p in assignment.items()})
        plain = [not any(less[k] for _, _, less in everyone) for k in turns]
        return [name for name, _, _ in everyone], plans, plain


def fill_in_turns(profilers: Sequence[DdpProfiler], until_s: float) -> None:
    """Take rounds of all profilers in turns, as long as any wants more (`DdpProfiler.take_round`)."""
    while any([profiler.take_round(until_s) for profiler in profilers]):
        pass


def gathered_together(profilers: Sequence[DdpProfiler], link: LinkMeasurement) -> list[dict[str, Profile]]:
    """Return the profiles of all classes for each profiler, freed of one drift: that of all their samples."""
    samples = [(n, *sample) for n, profiler in enumerate(profilers) for sample in profiler.profiler.samples()]
    labels, seconds, at_s = zip(*(((n, label), s, at) for n, label, s, at in samples), strict=True)
    drift = drift_factors(labels, seconds, at_s)
    own = [
        [factor for (n, *_), factor in zip(samples, drift, strict=True) if n == k]
        for k in range(len(profilers))
    ]
    return [profiler.gathered(link, of_it) for profiler, of_it in zip(profilers, own, strict=True)]


def measured_together(
    profilers: Sequence[DdpProfiler], others: Sequence[dict[str, Profile]]
) -> list[MeasuredStep]:
    """Return what the exchange took in the steps of all profilers; `others` has the later ones' profiles."""
    steps = profilers[0].measured_steps()
    for profiler, profiles in zip(profilers[1:], others, strict=True):
        steps += [replace(one, profiles=profiles) for one in profiler.measured_steps()]
    return steps


def _bucket_bytes(parameters: Sequence[torch.nn.Parameter], ddp_options: Mapping[str, Any]) -> int:
    """Return the bytes that DDP's buckets take beside the gradients."""
    if job.world_size() == 1 or ddp_options.get("gradient_as_bucket_view", True):
        return 0
    return sum(parameter.nbytes for parameter in parameters)


def orders_of_classes(
    everyone: Sequence[tuple[str, Sequence[float], Sequence[bool]]],
) -> dict[str, list[int]]:
    """Return for each class the order of its steps in a round, so that as many as possible arrive together.

    `everyone` has each rank's class, the seconds of each step, and whether what is able saves less in it. The
    slowest class keeps its order. What saves less is paired with what saves less.

    >>> orders_of_classes([("train", [3.0, 1.0], [False, False]), ("infer", [6.0, 3.0], [False, False])])
    {'train': [1, 0], 'infer': [0, 1]}
    """
    from scipy.optimize import linear_sum_assignment  # half a second, which a cached start need not pay

    first = {name: (np.array(times), np.array(less)) for name, times, less in reversed(everyone)}
    slowest = max(first, key=lambda name: float(first[name][0].sum()))
    at_s, saves = first[slowest]
    orders = {}
    for name in dict.fromkeys(name for name, _, _ in everyone):
        times, less = first[name]
        if name == slowest:
            orders[name] = list(range(len(times)))
            continue
        # The root favours few steps that fit well over many that fit a little.
        apart = np.sqrt(np.abs(np.log(at_s[:, None] / times[None, :])))
        _, order = linear_sum_assignment(apart + _NEVER * (saves[:, None] != less[None, :]))
        orders[name] = order.tolist()
    return orders


def job_clock(device: torch.device, emulated_share: float | None = None) -> Clock:
    """Return the clock for a rank: on a CPU with one thread it counts only the rank's own CPU time."""
    if job.world_size() == 1 or device.type == "cuda" or torch.get_num_threads() > 1:
        return clock_for(device, emulated_share)
    return ShareClock(emulated_share or 1.0)


def _checked_loss(
    program: Program, loss: Callable[[], torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> Callable[[], torch.Tensor]:
    """Return the loss, checked to be one finite number; the error names the operator that met NaN or Inf."""

    def checked() -> torch.Tensor:
        with api.naming_operators(program, loss, parameters):
            found = loss()
            check_scalar(found)
            check_finite(found)
        return found

    return checked


def mean_sensitivity(entries: Sequence[Mapping[str, Any]]) -> Sensitivity:
    """Return the mean of the sensitivities that ranks gathered, each on its own batch (JSON)."""
    found = [Sensitivity.from_json(entry) for entry in entries]
    first = found[0]
    omega = {
        op: {mode: sum(entry.omega[op][mode] for entry in found) / len(found) for mode in modes}
        for op, modes in first.omega.items()
    }
    return replace(first, omega=omega, num_batches=sum(entry.num_batches for entry in found))
