"""What cannot be written: a full disk, a folder that cannot be made, a log cut short."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from graphs import cluster_of, mlp, profile_of, sensitivity_of
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.errors import FormatError, QSyncError
from qsync.figures.page import Measured
from qsync.records.plan_folder import Basis, save_plan

GRAPH, CLUSTER = mlp(3, width=32, rows=16), cluster_of()
PROFILES = {name: profile_of(GRAPH, name, slow=s) for name, s in (("train", 1.0), ("infer", 1.4))}
PARTS = (GRAPH, PROFILES, sensitivity_of(GRAPH), CLUSTER)


@pytest.fixture
def folder(tmp_path):
    save_plan(tmp_path / "kept", qsync.plan(*PARTS, slack=0.2), Basis(GRAPH, CLUSTER, PROFILES, PARTS[2]))
    return tmp_path / "kept"


def test_a_file_that_finds_no_room_is_named_in_one_sentence(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "qsync.commands.main", "plan", str(folder), "--slack", "0.2", "--out",
         str(tmp_path / "new.json")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "new.json: File too large" in done.stderr
    assert not list(tmp_path.glob("*new.json*"))


def test_a_plan_s_folder_is_made_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    model, batch = nn.Linear(8, 4), (torch.randn(2, 8), torch.randn(2, 4))
    with pytest.raises(FormatError, match="the plan cannot be saved in .*cache_dir"):
        qsync.hybrid(
            model, batch, lambda run, pair: F.mse_loss(run(pair[0]), pair[1]), cache_dir=tmp_path / "file"
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slak": 1}, "did you mean slack"),
        ({"slack": "0.1"}, "another type"),
        ({"least_samples": 3}, "levers"),
    ],
)
def test_a_plan_s_wrong_options_are_refused_in_a_sentence(options, says):
    with pytest.raises(FormatError, match=says):
        qsync.plan(*PARTS, **options)


def test_a_report_of_another_shape_and_an_unknown_device_are_refused():
    for content in ({"runs": 3}, {"runs": [{}]}, {"runs": {"a": 1}}):
        with pytest.raises(FormatError, match="is not an output of qsync demo"):
            Measured.of_demo(content)
    from qsync.what_if import cost_learning

    with pytest.raises(QSyncError, match="cpu or cuda only, found 'cpux'"):
        cost_learning.learn(device="cpux")
