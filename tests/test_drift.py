"""Drift: a job slower than predicted blames the rank and phase that make it so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from graphs import cluster_of, mlp, profile_of

from qsync.drift import expected, judge
from qsync.phases import Phases
from qsync.replayer import replay

PREDICTED = {"train": Phases(0.01, 0.20, 0.10, 0.02), "infer": Phases(0.01, 0.28, 0.02, 0.02)}


def ranks(**slower: Phases) -> list[tuple[str, Phases]]:
    return [(name, slower.get(name, PREDICTED[name])) for name in ("train", "infer")]


def test_a_job_as_predicted_is_nobody_s_fault():
    assert judge(PREDICTED, ranks()) is None
    assert judge(PREDICTED, ranks(infer=Phases(0.01, 0.30, 0.02, 0.02))) is None  # within a tenth


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
    found = judge(PREDICTED, ranks(**measured))
    assert found is not None and (found.rank, found.phase) == (rank, phase)
    assert f"{phase} on rank {rank}" in str(found) and "longer than the predicted 330 ms" in str(found)


def test_what_is_expected_of_a_class_makes_up_its_step():
    graph = mlp(3)
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 1.5))}
    timeline = replay(graph, {"train": {}, "infer": {}}, profiles, cluster_of())
    for name, phases in expected(timeline).items():
        assert phases.period_s == pytest.approx(timeline.step_s)
        assert phases.optimizer_s == pytest.approx(profiles[name].optimizer_s)


SCRIPT = """
import logging, time
import torch, qsync
from qsync import hybrids
from qsync.drift import EVERY

logging.basicConfig(format="%(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
loss = lambda model, batch: model(batch).square().mean()
batch = torch.randn(64, 64)
model = qsync.hybrid(model, batch, loss, cache_dir={cache!r}, timeout_s=60)
slow = torch.distributed.get_rank() == 1
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2 * EVERY + 6):
    optimizer.zero_grad()
    if slow:
        time.sleep(0.03)
    loss(model, batch).backward()
    optimizer.step()
if not slow:
    print("seen", hybrids.monitors[model].drift.rank, hybrids.monitors[model].drift.phase, flush=True)
"""


@pytest.mark.dist
def test_a_rank_that_dawdles_is_named_while_the_job_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(cache=str(tmp_path / "cache"))))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "seen 1 host" in done.stdout
    assert "host on rank 1" in done.stderr
