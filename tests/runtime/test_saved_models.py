"""Wrapped models that were saved whole: read as data, with the safe globals that the plain model needs."""

from __future__ import annotations

import copy
import functools
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import qsync
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.errors import FormatError
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan
from qsync.runtime.planned_forward import program_of
from qsync.runtime.saved_models import restored

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU()), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


SAFE = [Net, nn.Sequential, nn.Linear, nn.GELU]


def planned(levers: Levers | None = None) -> nn.Module:
    graph = qsync.capture(Net(), X)
    assignment = dict(
        zip((op.name for op in graph.adjustable), (qsync.Precision.INT8, qsync.Precision.FP32), strict=True)
    )
    return qsync.wrap(Net(), qsync.Plan("Net", graph.hash, {"here": ClassPlan(assignment)}, levers=levers))


def timed() -> nn.Module:
    model = qsync.wrap(Net(), "int8", strict=True)
    model.timer = [PhaseTimer(model, model)]  # which hooks on it
    del model.timer
    return model


MODELS = {
    "precision": lambda: qsync.wrap(Net(), "int8", strict=True),
    "base": lambda: qsync.wrap(Net(), base="bf16"),
    "plan": planned,
    "recomputed": lambda: planned(Levers({"here": ClassLevers(8, recomputed=("body",))})),
    "timed": timed,
    "called": lambda: (model := qsync.wrap(Net(), "int8", strict=True), model(X).sum().backward())[0],
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_read_as_data_and_runs_as_before(name):
    model, file = MODELS[name](), io.BytesIO()
    torch.save(model, file)
    with safe_globals(SAFE):
        assert get_unsafe_globals_in_checkpoint(io.BytesIO(file.getvalue())) == []
        found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for other in (found, copy.deepcopy(model)):
        assert type(other) is Net and other.state_dict().keys() == Net().state_dict().keys()
        losses = [each(X).square().sum() for each in (model, other)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert program_of(other).assignment() == program_of(model).assignment()
        model.zero_grad()
    assert type(qsync.unwrap(found)) is Net and "forward" not in found.__dict__


SCRIPT = """
import sys
{imports}
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return self.head(self.body(x))

with torch.serialization.safe_globals([(Net, "{module}.Net"), nn.Sequential, nn.Linear, nn.GELU]):
    try:
        print(type(torch.load(sys.argv[1], weights_only=True)(torch.ones(1, 16))).__name__)
    except Exception as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("imports", "words"),
    [
        pytest.param("import torch, qsync", "Tensor\n", marks=pytest.mark.deep),  # as this file does
        ("import qsync, torch", "Tensor\n"),
        ("import torch", "Unsupported global: GLOBAL qsync._import_qsync_first was not an allowed global"),
    ],
)
def test_other_processes_need_to_import_qsync_alone(imports, words, tmp_path):
    torch.save(MODELS["plan"](), tmp_path / "model.pt")
    command = [
        sys.executable,
        "-c",
        SCRIPT.format(imports=imports, module=Net.__module__),
        str(tmp_path / "model.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert words in done.stdout, done.stderr


@pytest.mark.parametrize("forged", [("os.system", "true"), ("wrapping", {"plan": 3}), ("wrapping",)])
def test_a_file_makes_nothing_else(forged):
    with pytest.raises(FormatError, match="the model was saved by another version of qsync"):
        restored(*forged)


def test_a_forged_forward_holds_no_more_than_its_own():
    forward = restored("forward")
    own = dict.fromkeys(("module", "own", "instead", "make"))
    forward.__setstate__({**own, "program": functools.partial})
    assert "program" not in vars(forward)
