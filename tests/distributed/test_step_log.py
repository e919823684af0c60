"""The log of steps: what real ranks write, and what the command line says of it."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from two_ranks import launch, said

from qsync.distributed.monitoring.step_log import StepLog, new_log
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.replayer.explanation.measured_steps import MeasuredSteps, log_file


def test_a_process_alone_logs_its_steps_and_starts_its_files_anew(tmp_path):
    log_file(tmp_path, 0).write_text("of a job before")
    log_file(tmp_path, 1).write_text("of a job with more ranks")
    path = new_log(tmp_path)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    StepLog(path, PhaseTimer(model, model, 8), model, "train")
    for _ in range(8 + 5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    written = MeasuredSteps.load(tmp_path)
    assert (written.classes, written.calls) == (("train",), (1,))
    assert list(written.steps) == list(range(1, 8 + 1))
    del model, optimizer
    gc.collect()  # the end of the process does the same
    assert list(MeasuredSteps.load(tmp_path).steps)[-1] == 8 + 4
    assert new_log(None) is None


def test_a_full_disk_ends_the_log_with_one_warning_and_training_goes_on(tmp_path, caplog):
    log_file(tmp_path, 0).symlink_to("/dev/full")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    StepLog(new_log(tmp_path), PhaseTimer(model, model, 4), model, "train")
    for _ in range(3 * 4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        f"qsync: steps are no longer logged: {log_file(tmp_path, 0)} cannot be written "
        "(No space left on device)"
    ]


SCRIPT = """
from pathlib import Path
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache, log_steps=Path(cache) / "steps")
optimizer = torch.optim.AdamW(model.parameters())
for number in range(60):
    if rank == 1:
        time.sleep(0.02)
    loss_fn(model, batch(seed=number)).backward()
    optimizer.step()
say(f"hooks: {max(len(p._post_accumulate_grad_hooks) for p in model.parameters())}")
attempt("file", log_steps=__file__)
"""


@pytest.mark.dist
def test_every_rank_logs_its_steps_and_the_slow_one_is_named(command, tmp_path):
    output = launch(tmp_path, SCRIPT)
    refusals = [line for line in output.splitlines() if "] file: FormatError" in line]
    assert len(refusals) == 2 and all("cannot be written (" in line for line in refusals)
    assert said(output, "hooks") == ["1", "1"]  # the log and the watch over the job share a timer
    found = MeasuredSteps.load(tmp_path / "cache" / "steps")
    assert len(found.classes) == 2 and len(set(found.calls)) == 1
    # The first step has no beginning, and the one after a write is not logged.
    assert sorted(found.steps) == [n for n in range(1, 60) if n != 51]
    for ranks in found.steps.values():
        assert all(0.0 < phases.forward_s < phases.compute_s for phases in ranks)
        assert ranks[1].host_s >= 0.02
    (plan,) = (tmp_path / "cache").glob("*/plan.json")
    steps = tmp_path / "cache" / "steps"
    measured = json.loads(command("explain", plan, "--measured", steps, "--json")[1])["measured"]
    assert [rank["rank"] for rank in measured["ranks"]] == [0, 1]
    assert measured["slower"] and "host on rank 1" in measured["slower"][0]
    assert measured["ranks"][0]["measured"]["wait"] >= 0.01
    _, text, _ = command("explain", plan, "--measured", steps)
    assert "measured (predicted)" in text and "host on rank 1" in text
