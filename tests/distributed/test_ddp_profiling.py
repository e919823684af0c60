"""Profiles taken in steps of the job: ranks that differ keep step, and one that fails takes nobody along."""

from __future__ import annotations

import itertools
import statistics
from types import SimpleNamespace

import pytest
import torch
from two_ranks import launch, said

from qsync.distributed import ddp_profiling, job
from qsync.distributed.ddp_profiling import orders_of_classes
from qsync.distributed.job_options import HybridOptions
from qsync.predictor.profiling import profiler

pytestmark = pytest.mark.dist

PROFILED = """
from qsync.distributed import job
from qsync.distributed.job_options import HybridOptions

def profiled(model, device_class, precisions=None):
    job.join_job(torch.device("cpu"))
    own, step = job.detect_rank(model, name=device_class), job.TrainingStep(model, batch(seed=rank), loss_fn)
    options = ddp_profiling.ProfileOptions(HybridOptions(precisions=precisions))
    return ddp_profiling.form_basis(step, own, job.form_graph(step), job.form_cluster(own), options)[0]
"""


def test_ranks_with_other_precisions_keep_step_and_copies_count_once(tmp_path):
    body = """
from qsync.distributed import data_parallel
from qsync.predictor.profiling import profiler as profiling
from qsync.predictor.profiling.profiler import Profiler

init = Profiler.__init__

def slowly(self, *args, **options):
    init(self, *args, **options)
    profiling.SHORT_STEP_S = 0.0  # from here on only some steps are taken without the timer too
    if rank == 1:  # as where one rank's steps are long, and would be timed in another way
        self.set_typical_s([1.0] * self.num_choices, [True] * self.num_choices)

Profiler.__init__ = slowly
chosen = ["fp32", "bf16"] if rank else ["fp32"]
names = ["strong", "weak"]
calls = []
in_ddp = data_parallel.in_ddp

def counted(*args, **options):
    parallel = in_ddp(*args, **options)
    parallel.register_forward_pre_hook(lambda *_: calls.append(1))
    return parallel

data_parallel.in_ddp = counted
basis = profiled(make(), names[rank], chosen)
say(f"through DDP: {len(calls) > 20}")
say(f"timed: {[sorted({m.partition(' ')[0] for m in basis.profiles[n].ops['inner.0']}) for n in names]}")
say(f"steps: {[basis.profiles[n].num_steps for n in names]}")
say(f"copies: {[basis.profiles[n].bucket_s_per_byte for n in names]}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, PROFILED + body)
    assert said(output, "timed") == ["[['fp32'], ['bf16', 'fp32']]"] * 2
    first, second = said(output, "steps")
    assert first == second and len(set(first.strip("[]").split(", "))) == 1
    assert said(output, "copies") == ["[0.0, 0.0]"] * 2
    assert said(output, "through DDP") == ["True", "True"]


def test_where_clocks_do_not_tell_work_from_waiting_profiles_stay_out_of_ddp(tmp_path):
    """Else the wait for the slowest rank's gradients would be counted as an operator's."""
    body = """
torch.set_num_threads(2 if rank else 1)
basis = profiled(make(), ["strong", "weak"][rank])
say(f"copies: {[basis.profiles[n].bucket_s_per_byte > 0 for n in ('strong', 'weak')]}")
dist.destroy_process_group()
"""
    assert said(launch(tmp_path, PROFILED + body), "copies") == ["[True, True]"] * 2


@pytest.mark.parametrize("call", [6, 14])
def test_a_rank_that_fails_ends_the_profile_on_all(tmp_path, call):
    """At the 6th step the ranks are still on their own, at the 14th the other waits for its gradients."""
    body = """
from qsync.distributed import ddp_profiling

ddp_profiling.MIN_PATIENCE_S, ddp_profiling.PATIENCE_STEPS = 3.0, 0
if rank == 1:
    from qsync.predictor.profiling.profiler import Profiler
    step = Profiler._forward_and_backward

    def failing(self, timer):
        failing.calls += 1
        if failing.calls == CALL:
            raise qsync.errors.CalibrationError("the kernel broke")
        return step(self, timer)

    failing.calls = 0
    Profiler._forward_and_backward = failing
attempt("broken")
os._exit(0)
"""
    output = launch(tmp_path, body.replace("CALL", str(call)))  # which ends a job that hangs
    assert all("the kernel broke" in text and "rank 1" in text for text in said(output, "broken"))


def test_waits_are_told_apart_and_no_hook_stays(tmp_path):
    """Rank 1 comes late to its backward: rank 0 waits after its last gradient, rank 1 before."""
    body = """
import statistics

def late(model, batch):
    time.sleep(0.05 * rank)
    return loss_fn(model, batch)

measured_steps = ddp_profiling.DdpProfiler.measured_steps

def observed(self):
    waits = [wait for _, wait in self.profiler.waits()]
    exposed_s, hidden_s = (statistics.median(values) for values in zip(
        *((wait.exposed_s, wait.wait_s - wait.exposed_s) for wait in waits)))
    say(f"late: {exposed_s > 0.045 if rank == 0 else hidden_s > 0.045}")
    say(f"hooks: {sum(len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters())}")
    return measured_steps(self)

ddp_profiling.DdpProfiler.measured_steps = observed
attempt("planned", loss_fn=late, device_class=["strong", "weak"][rank])
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "late") == ["True", "True"]
    assert said(output, "hooks") == ["0", "0"]
    assert said(output, "planned") == ["went through"] * 2


def test_classes_take_steps_in_orders_in_which_most_arrive_together():
    plain = [False] * 4
    weak, another = ("weak", [8.0, 4.0, 2.0, 6.0], plain), ("weak", [9.0] * 4, plain)
    orders = orders_of_classes([("strong", [4.0, 1.0, 2.0, 3.0], plain), weak, another])
    assert orders["weak"] == [0, 1, 2, 3]
    assert orders["strong"][1] == 0 and orders["strong"][2] == 2  # 4 s beside 4 s, 2 s beside 2 s
    assert sorted(orders["strong"]) == [0, 1, 2, 3]
    assert orders_of_classes([("same", [3.0, 1.0, 2.0], plain[:3])] * 2) == {"same": [0, 1, 2]}


def test_steps_that_save_less_are_taken_beside_steps_that_save_less():
    saves = [False, False, True, True]
    orders = orders_of_classes(
        [("strong", [4.0, 1.0, 4.1, 1.1], saves), ("weak", [8.0, 4.1, 8.0, 4.0], saves)]
    )
    assert orders["strong"] == [1, 0, 3, 2]


@pytest.fixture
def two_sizes(monkeypatch):
    """A linear model measured on four samples and on two in turns, and the sizes in the order of steps."""
    model, rows = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    taken, bases = [], []
    step = job.TrainingStep(model, rows, lambda model, rows: model(rows).sum())
    options = ddp_profiling.ProfileOptions(HybridOptions(precisions=["fp32", "bf16"]))
    rank = job.detect_rank(model)
    measure = profiler.Profiler.measure

    def noting(self, k):
        measure(self, k)
        taken.append(self.graph.batch_shapes[0][0])

    def second(basis):
        bases.append(basis)
        return rows[:2]

    monkeypatch.setattr(profiler, "GOOD_ENOUGH", 0.0)  # as many rounds as there may be
    monkeypatch.setattr(profiler.Profiler, "measure", noting)
    formed = job.form_graph(step), job.form_cluster(rank)
    first, other = ddp_profiling.form_basis(step, rank, *formed, options, second)
    return bases[0], first, other, taken


def test_a_second_profile_takes_uniform_steps_alone(two_sizes):
    """Memory and mixed precisions are in the first profile."""
    early, first, other, _ = two_sizes
    (soon,), (before,), (after,) = (basis.profiles.values() for basis in (early, first, other))
    assert set(after.step_s) == {"fp32", "bf16"} < set(before.step_s) == set(soon.step_s)
    assert not after.memory_residuals.ops and other.graph.batch_shapes == ((2, 8),)
    assert soon.num_steps < before.num_steps and first.graph.batch_shapes == ((4, 8),)


def test_rounds_of_two_numbers_of_samples_take_turns(two_sizes):
    taken = two_sizes[3]
    turns = [size for size, _ in itertools.groupby(taken)]
    assert turns == [4, 2] * (profiler.MAX_ROUNDS - 1), turns  # the second size is known after a round
    assert taken.count(2) == 2 * profiler.MAX_ROUNDS


def test_a_drift_of_the_machine_falls_on_both_numbers_of_samples():
    """The machine becomes twice as slow; the second profile begins late."""
    slow = [1.0 + k / 23 for k in range(24)]
    late = range(9, 24, 2)
    first, other = (
        [("fp32", seconds * slow[at], float(at)) for at in times]
        for seconds, times in ((4.0, [at for at in range(24) if at not in late]), (2.0, late))
    )
    profilers = [
        SimpleNamespace(
            profiler=SimpleNamespace(samples=lambda of_it=of_it: of_it),
            gathered=lambda link, drift, of_it=of_it: statistics.fmean(
                seconds / factor for (_, seconds, _), factor in zip(of_it, drift, strict=True)
            ),
        )
        for of_it in (first, other)
    ]
    four, two = ddp_profiling.gathered_together(profilers, None)
    assert four / two == pytest.approx(2.0, rel=0.03)
