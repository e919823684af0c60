"""Drift: a job slower than predicted blames the rank and phase that make it so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of
from two_ranks import launch

from qsync.records.graph import Input
from qsync.replayer import replay
from qsync.replayer.explanation.phases import Phases, expected, find_drift, slowdown

PREDICTED = {"train": Phases(0.01, 0.20, 0.10, 0.02), "infer": Phases(0.01, 0.28, 0.02, 0.02)}


def ranks(**slower: Phases) -> list[tuple[str, Phases]]:
    return [(name, slower.get(name, PREDICTED[name])) for name in ("train", "infer")]


def test_a_job_as_predicted_is_nobody_s_fault():
    assert find_drift(PREDICTED, ranks()) is None
    assert find_drift(PREDICTED, ranks(infer=Phases(0.01, 0.30, 0.02, 0.02))) is None  # within a tenth


def test_a_loader_that_becomes_slow_is_blamed_and_not_the_host():
    predicted = {"train": Phases(0.01, 0.20, 0.10, 0.02, 0.02), "infer": PREDICTED["infer"]}
    measured = [("train", Phases(0.01, 0.20, 0.10, 0.02, 0.12)), ("infer", Phases(0.01, 0.28, 0.12, 0.02))]
    found = find_drift(predicted, measured)
    assert (found.rank, found.phase, found.phase_s) == (0, "data loading", 0.12)
    assert "data loading on rank 0 (train) takes 120 ms, predicted 20 ms" in str(found)
    # A loader that nobody sees is within the host's part, and was predicted to be there.
    measured[0] = ("train", Phases(0.13, 0.20, 0.10, 0.02))
    found = find_drift(predicted, measured)
    assert (found.rank, found.phase, found.predicted_phase_s) == (0, "host", pytest.approx(0.03))
    assert (
        find_drift(predicted, [("train", Phases(0.03, 0.20, 0.10, 0.02)), ("infer", PREDICTED["infer"])])
        is None
    )


@pytest.mark.parametrize(
    ("measured", "rank", "phase"),
    [
        ({"infer": Phases(0.01, 0.40, 0.02, 0.02), "train": Phases(0.01, 0.20, 0.22, 0.02)}, 1, "compute"),
        ({"infer": Phases(0.01, 0.28, 0.12, 0.02), "train": Phases(0.11, 0.20, 0.10, 0.02)}, 0, "host"),
        ({"infer": Phases(0.01, 0.28, 0.02, 0.12), "train": Phases(0.01, 0.20, 0.20, 0.02)}, 1, "optimizer"),
        (
            {"infer": Phases(0.01, 0.28, 0.12, 0.02), "train": Phases(0.01, 0.20, 0.19, 0.02)},
            0,
            "communication",
        ),
    ],
)
def test_the_rank_and_phase_that_grew_are_blamed_and_not_those_that_wait(measured, rank, phase):
    found = find_drift(PREDICTED, ranks(**measured))
    assert found is not None and (found.rank, found.phase) == (rank, phase)
    assert f"{phase} on rank {rank}" in str(found) and "longer than the predicted 330 ms" in str(found)


def test_what_is_expected_of_a_class_makes_up_its_step():
    statistics = Input("norm.running_mean", "buffer", "fp32", (1000,))
    buffered = replace(mlp(3), inputs=(*mlp(3).inputs, statistics))  # which DDP hands out
    for graph in (mlp(3), buffered):
        profiles = {
            name: profile_of(graph, name, slow=slow, loading_s=slow * 1e-4)
            for name, slow in (("train", 1.0), ("infer", 1.5))
        }
        timeline = replay(graph, {"train": {}, "infer": {}}, profiles, cluster_of())
        for name, phases in expected(timeline).items():
            own = [e for e in timeline.events if e.device_class == name]
            handed_out = sum(e.duration_s for e in own if e.name == "buffers handed out")
            assert phases.period_s == pytest.approx(timeline.step_s)
            assert phases.optimizer_s == pytest.approx(profiles[name].optimizer_s)
            assert phases.loading_s == pytest.approx(profiles[name].loading_s)
            assert phases.compute_s == pytest.approx(
                timeline[name].compute_s + timeline[name].slowed_s
                - phases.host_s - phases.optimizer_s - phases.loading_s
            )  # fmt: skip
            assert (handed_out > 0.0) == (statistics in graph.inputs)
            assert phases.blocked_s >= handed_out


def on_machines(*times: float, cpu: float | None = None, **others: float) -> list[tuple[str, Phases]]:
    """Return what two ranks measure on machines so many times slower, some phases as `others` say."""
    return [
        (
            name,
            replace(
                PREDICTED[name],
                compute_s=factor * PREDICTED[name].compute_s,
                optimizer_s=factor * 0.02,
                optimizer_cpu_s=(factor if cpu is None else cpu) * 0.02,
                **others,
            ),
        )
        for name, factor in zip(PREDICTED, times, strict=True)
    ]


def test_machines_that_are_slower_than_when_profiled_are_no_rank_s_fault():
    slower = on_machines(1.3, 1.3)
    assert slowdown(PREDICTED, slower) == pytest.approx(1.3) and find_drift(PREDICTED, slower) is None
    without = [(name, replace(phases, optimizer_cpu_s=0.0)) for name, phases in slower]  # as on GPUs
    assert slowdown(PREDICTED, without) == 1.0 and find_drift(PREDICTED, without).phase == "compute"
    # A core shared with another process: the optimizer takes no more CPU seconds.
    assert find_drift(PREDICTED, on_machines(1.3, 1.3, cpu=1.0)).phase == "compute"
    # One machine: its rank is to blame, by all that the other does not share.
    found = find_drift(PREDICTED, on_machines(1.0, 1.3))
    assert (found.rank, found.phase, found.slowdown) == (1, "compute", 1.0)
    found = find_drift(PREDICTED, on_machines(1.2, 1.6))
    assert (found.rank, found.slowdown) == (1, pytest.approx(1.2))
    assert found.predicted_phase_s == pytest.approx(1.2 * 0.28)
    assert "on machines 1.20 times slower than profiled; if it stays so, plan again" in str(found)


def test_a_slower_machine_hides_nothing_that_it_does_not_explain():
    longer = [("train", Phases(0.01, 0.40, 0.02, 0.02, optimizer_cpu_s=0.02)) for _ in range(2)]
    # longer sequences everywhere
    assert find_drift({"train": PREDICTED["train"]}, longer).phase == "compute"
    # An optimizer that was predicted too short makes nothing of compute that is as predicted on one rank.
    misjudged = on_machines(1.0, 1.3, cpu=1.5)
    assert slowdown(PREDICTED, misjudged) == pytest.approx(1.5)
    assert find_drift(PREDICTED, misjudged).rank == 1
    blocked = on_machines(1.3, 1.3, blocked_s=0.5)
    assert find_drift(PREDICTED, blocked).phase == "communication"


SCRIPT = """
import logging
from qsync.distributed.monitoring.drift_monitor import STEPS_PER_COMPARISON, monitors

class Rows(torch.utils.data.Dataset):
    delay_s = 0.0
    def __len__(self): return 10 * STEPS_PER_COMPARISON
    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return torch.randn(64, 64)

logging.basicConfig(format="%(message)s", stream=sys.stdout)
torch.manual_seed(0)
model = torch.nn.Sequential(  # DDP hands out the norm's statistics: there all ranks wait for the last
    torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
)
loss = lambda model, batch: model(batch).square().mean()
rows = Rows()
batches = torch.utils.data.DataLoader(rows, batch_size=None)
model = qsync.hybrid(model, torch.randn(64, 64), loss, cache_dir=cache, timeout_s=60, loader=batches)
monitors[model].lasting_s = 0.0
slow = rank == 1
optimizer = torch.optim.AdamW(model.parameters())
batches = iter(batches)
for host_s, rows.delay_s in ((0.02, 0.0), (0.0, 0.02)) if slow else ((0.0, 0.0), (0.0, 0.0)):
    for step in range(2 * STEPS_PER_COMPARISON + 6):
        optimizer.zero_grad()
        time.sleep(host_s)
        loss(model, next(batches)).backward()
        optimizer.step()
    if not slow:
        print("seen", monitors[model].drift.rank, monitors[model].drift.phase, flush=True)
"""


@pytest.mark.dist
def test_a_rank_that_dawdles_is_named_while_the_job_runs(tmp_path):
    output = launch(tmp_path, SCRIPT)
    assert "seen 1 host" in output and "seen 1 data loading" in output
    assert "host on rank 1" in output and "data loading on rank 1" in output
