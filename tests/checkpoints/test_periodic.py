"""Checkpoints every N steps: what is kept, and what kills and full disks leave."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from two_ranks import Program, environment

import qsync
from qsync.checkpoints import reader, writer
from qsync.errors import FormatError

SCRIPT = """
import logging, sys
import torch, qsync

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
torch.manual_seed(0)
model = torch.nn.Linear(400, 400)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def step():
    optimizer.zero_grad()
    model(torch.randn(2, 400)).square().mean().backward()
    optimizer.step()
"""
ENDLESS = """
checkpoints = qsync.Checkpoints(sys.argv[1], model, optimizer, every=1, keep=2)
checkpoints.resume()
while True:
    step()
    checkpoints.step()
"""
LIMITED = """
import resource
checkpoints = qsync.Checkpoints(sys.argv[1], model, optimizer, every=1, keep=1)
for number in range(6):
    step()
    if number == 1:  # as on a full disk, a file cannot grow any more
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    if number == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.step()
    checkpoints.finish()
    print("whole", *sorted(path.name for path in checkpoints.folder.iterdir()))
"""


def linear():
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def start(tmp_path, body, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT + body)
    return Program(tmp_path / "script.py", environment(tmp_path), *map(str, arguments))


def test_the_newest_are_kept(tmp_path):
    model, optimizer = linear()
    with qsync.Checkpoints(tmp_path / "run", model, optimizer, every=3, keep=2) as checkpoints:
        assert checkpoints.resume() == 0
        for _ in range(13):
            checkpoints.step()
            checkpoints.finish()
    assert names(tmp_path / "run") == ["step-00000009", "step-00000012"]
    again = qsync.Checkpoints(tmp_path / "run", model, optimizer, every=3, keep=2)
    assert again.resume() == 12


def test_a_step_that_was_saved_before_is_saved_beside(tmp_path):
    """After a resume from an older checkpoint, what is written last is the newest, whatever its step."""
    model, optimizer = linear()
    checkpoints = qsync.Checkpoints(tmp_path, model, optimizer, every=1, keep=2)
    for number in (5, 6, 5):
        model.weight.data.fill_(number)
        checkpoints.step(number)
        checkpoints.finish()
    assert names(tmp_path) == ["step-00000005-2", "step-00000006"]
    assert checkpoints.resume() == 5


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    model, optimizer = linear()
    with qsync.Checkpoints(tmp_path, model, optimizer, every=1) as checkpoints:
        for _ in range(2):
            checkpoints.step()
            checkpoints.finish()
    file = tmp_path / "step-00000002" / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert checkpoints.resume() == 1
    assert "SHA-256" in caplog.text and "loading" in caplog.text


def test_training_does_not_wait_and_what_is_saved_is_the_step(tmp_path, monkeypatch, caplog):
    """While the writer is held, steps go on, change the model, and leave one more checkpoint out."""
    go, save_file = threading.Event(), writer.save_file
    monkeypatch.setattr(writer, "save_file", lambda *arguments: (go.wait(60), save_file(*arguments)))
    model, optimizer = linear()
    model.weight.data.fill_(1)
    checkpoints = qsync.Checkpoints(tmp_path, model, optimizer, every=2)
    for _ in range(6):
        checkpoints.step()
        model.weight.data.add_(1)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == []
    go.set()
    checkpoints.finish()
    assert names(tmp_path) == ["step-00000002"]
    assert caplog.text.count("the one before is being written") == 1
    qsync.load(tmp_path, model, optimizer)
    assert model.weight.unique().tolist() == [2]


def test_one_process_may_write_for_others(tmp_path):
    """Without torch.distributed: as where membership changes, and one card writes."""
    model, optimizer = linear()
    checkpoints = qsync.Checkpoints(tmp_path, model, optimizer, every=10)
    for number in (9, 10, 20, 30):
        checkpoints.step(number, writes=number == 20)
    checkpoints.finish()
    assert names(tmp_path) == ["step-00000020"]


@pytest.mark.parametrize("options", ({"every": 0}, {"every": 1, "keep": 0}, {"every": 2.5}))
def test_numbers_are_checked(tmp_path, options):
    with pytest.raises(FormatError, match="must be a whole number from 1 on"):
        qsync.Checkpoints(tmp_path, *linear(), **options)


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.callback = print
    with pytest.raises(FormatError, match="scheduler/callback"):
        qsync.Checkpoints(tmp_path, model, optimizer, every=1, scheduler=scheduler)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    folder, newest = tmp_path / "run", 0
    for delay_s in (0.0, 0.003, 0.02):
        program = start(tmp_path, ENDLESS, folder)
        while qsync_names(folder)[-1:] <= [f"step-{newest:08d}"]:  # until one more checkpoint is whole
            assert program.process.is_alive()
            time.sleep(0.002)
        time.sleep(delay_s)
        program.kill()
        model = torch.nn.Linear(400, 400)
        found = qsync.load(folder, model, torch.optim.AdamW(model.parameters()))
        assert found.step > newest and found.path.name == qsync_names(folder)[-1]
        newest = found.step
    with qsync.Checkpoints(folder, model, every=1, keep=1) as checkpoints:
        checkpoints.step(newest + 1)
    assert names(folder) == [f"step-{newest + 1:08d}"]  # what was left half-written is gone


def qsync_names(folder):
    return [name for name in (names(folder) if folder.is_dir() else ()) if not name.startswith(".")]


@pytest.mark.slow
def test_training_goes_on_when_files_cannot_grow(tmp_path):
    code, output = start(tmp_path, LIMITED, tmp_path / "run").ended()
    lines = output.splitlines()
    assert code == 0
    assert [line for line in lines if line.startswith("whole")] == [
        *["whole step-00000001"] * 4, "whole step-00000005", "whole step-00000006"
    ]  # fmt: skip
    (warning,) = [line for line in lines if not line.startswith("whole")]
    assert "step-00000002 could not be written" in warning and "training goes on" in warning
    assert qsync.load(tmp_path / "run", torch.nn.Linear(400, 400)).step == 6


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint(small_disk: Path, caplog):
    model = torch.nn.Linear(400, 400)  # with its optimizer 2 MB: two do not fit
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 400)).sum().backward()
    optimizer.step()
    checkpoints = qsync.Checkpoints(small_disk, model, optimizer, every=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            checkpoints.step()
            checkpoints.finish()
    assert names(small_disk) == ["step-00000001", "step-00000002"]
    assert caplog.text.count("could not be written") == 1 and "No space left" in caplog.text
    assert checkpoints.resume() == 2
    with pytest.raises(qsync.QSyncError, match="No space left.*make space there"):
        qsync.save(small_disk / "more", model, optimizer)
    assert names(small_disk) == ["step-00000001", "step-00000002"]


def test_checkpoints_of_the_user_s_own_beside_them_stay(tmp_path):
    model, optimizer = linear()
    for name in ("best", "step-00000001-good"):
        qsync.save(tmp_path / name, model, optimizer)
    with qsync.Checkpoints(tmp_path, model, optimizer, every=1, keep=1) as checkpoints:
        for _ in range(3):
            checkpoints.step()
            checkpoints.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"best", "step-00000001-good", "step-00000003"}


def test_a_folder_that_is_a_checkpoint_or_a_file_is_refused(tmp_path):
    model, optimizer = linear()
    qsync.save(tmp_path / "last", model, optimizer, step=1000)
    (tmp_path / "file").write_text("")
    for name, what in (("last", "a checkpoint"), ("file", "a file")):
        with pytest.raises(FormatError, match=f"{name} is {what}; give a folder for the job's checkpoints"):
            qsync.Checkpoints(tmp_path / name, model, optimizer, every=1)


def test_a_clock_that_goes_back_loses_no_checkpoint(tmp_path, monkeypatch):
    model, optimizer = linear()

    def saved_at(hour, number):
        class Clock(writer.datetime):
            @classmethod
            def now(cls, zone=None):
                return super().now(zone).replace(hour=hour)

        monkeypatch.setattr(writer, "datetime", Clock)
        with qsync.Checkpoints(tmp_path, model, optimizer, every=1, keep=2) as checkpoints:
            checkpoints.step(number)

    for hour, number in ((20, 1), (20, 2), (3, 3), (3, 4), (3, 5)):
        saved_at(hour, number)
        assert qsync.Checkpoints(tmp_path, model, optimizer, every=1).resume() == number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_what_is_pruned_goes_though_the_clock_has_gone_back(tmp_path):
    model, optimizer = linear()
    with qsync.Checkpoints(tmp_path, model, optimizer, every=1, keep=2) as checkpoints:
        for _ in range(4):
            checkpoints.step()
            checkpoints.finish()
            for path in tmp_path.iterdir():  # as written by a clock that was an hour ahead
                os.utime(path, (path.stat().st_mtime + 3600,) * 2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("number", ["5", 2.0, -1, True, torch.tensor(3)], ids=str)
def test_what_is_no_number_of_steps(number, tmp_path):
    model, optimizer = linear()
    with pytest.raises(FormatError, match="step must be a whole number from 0 on"):
        qsync.Checkpoints(tmp_path, model, optimizer, every=1).step(number)
    with pytest.raises(FormatError, match="step must be a whole number from 0 on"):
        qsync.save(tmp_path / "new", model, optimizer, step=number)
    assert not any(tmp_path.iterdir())


def test_checkpoints_that_are_removed_while_they_are_read(tmp_path, monkeypatch):
    model, optimizer = linear()
    for number in (1, 2):
        qsync.save(tmp_path / f"step-{number}", model, optimizer, step=number)
    read, removed = reader.HuggingFaceStorageReader, []

    def removing(path):
        if path.endswith("step-2") and not removed:
            qsync.save(tmp_path / "step-3", model, optimizer, step=3)
            removed.append(Path(path).rename(tmp_path / ".gone"))
        return read(path)

    monkeypatch.setattr(reader, "HuggingFaceStorageReader", removing)
    assert qsync.load(tmp_path, model, optimizer).step == 3
    assert removed
