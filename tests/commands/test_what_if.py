"""What-if planning from the command line: devices of data sheets, simulated and labelled so everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.commands.loading import load_basis
from qsync.errors import FormatError
from qsync.operators.precision import Precision
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.op_calls import Argument, Call
from qsync.predictor.cost_model.samples import samples_of
from qsync.predictor.cost_model.shape_pool import pool
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.what_if import cost_learning
from qsync.what_if.cost_learning import can_measure

CLUSTER = """
[[classes]]
name = "train"
device = "cpu"
count = 1
memory_bytes = 1_000_000_000
precisions = ["fp32", "bf16", "int8"]

[[classes]]
name = "cards"
datasheet = "T4"
count = 2

[link]
latency_s = 1e-5
bytes_per_s = 1e10
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of two classes that were measured, and a cluster file with one that was not."""
    graph = encoder()
    profiles = {"train": profile_of(graph, "train"), "infer": profile_of(graph, "infer", emulated_share=0.5)}
    Basis(graph, cluster_of(), profiles, sensitivity_of(graph)).save(tmp_path / "basis")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


@pytest.fixture
def qsync(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda *arguments: command(*arguments)[1]


def test_a_device_that_is_not_here_is_planned_for_and_called_simulated(folder, qsync):
    assert "cards (simulated device)" in qsync("plan", "basis", "--cluster", "cluster.toml")
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["classes"]["cards"]["origin"] == "simulated" and "origin" not in plan["classes"]["train"]
    options = ("plan.json", "--basis", "basis", "--cluster", "cluster.toml")
    assert "cards (simulated device)" in qsync("replay", *options, "--trace", "trace.json")
    assert "cards (simulated device) x 2 (simulated)" in (folder / "trace.json").read_text()
    reasons = json.loads(qsync("explain", *options, "--json"))["reasons"]
    assert {reason["origin"] for reason in reasons if reason["device_class"] == "cards"} <= {"simulated"}


def test_images_and_their_gradients_are_measured_in_the_order_that_convolutions_hand_on():
    x, weight = Argument((2, 16, 4, 4)), Argument((32, 16, 3, 3), parameter=True)
    call = Call("conv2d", (x, weight), (2, 32, 4, 4), 2 * 2 * 32 * 16 * 16 * 9)
    norm = Call("batch_norm", (x,), x.shape, kept=((16,),) * 4)
    precisions = [Precision.FP32, Precision.BF16]
    graph, profile = cost_learning.profile_calls([call, norm], torch.device("cpu"), precisions, rounds=1)
    measured = [op for op in graph.ops if op.kind == "batch_norm" or op.shape == call.output]
    assert {"conv2d", "batch_norm"} <= {op.kind for op in measured}
    for op in measured:
        assert op.kind == "mul" or "bf16 channels_last" in profile.ops[op.name]
        assert any(reader.kind == "conv2d" and op.name in reader.inputs for reader in graph.ops)
    assert {s.call for s in samples_of(graph, profile)} >= {call}


def test_what_was_measured_on_a_real_device_is_preferred(folder):
    profile = load_basis(folder / "basis", folder / "cluster.toml").profiles["cards"]
    assert profile.machine["shares of"] == "train" and profile.origin == "simulated"
    assert load_basis(folder / "basis").profiles["train"].origin == "measured"


def test_costs_that_were_learned_beside_the_profiles_are_used(folder):
    before = load_basis(folder / "basis", folder / "cluster.toml").profiles["cards"]
    graph = encoder()
    slower = profile_of(graph, "train", precisions=[Precision.FP32])
    model = CostModel([replace(s, seconds=2 * s.seconds) for s in samples_of(graph, slower)])
    model.save(folder / "basis" / "costs.json")
    after = load_basis(folder / "basis", folder / "cluster.toml").profiles["cards"]
    assert after.ops["head"]["fp32"].total_s > 1.2 * before.ops["head"]["fp32"].total_s


def test_nothing_measured_is_one_sentence(folder):
    for path in (folder / "basis").glob("profile-*.json"):
        replace(Profile.load(path), origin="simulated").save(path)
    with pytest.raises(FormatError, match="has no measured profile, which simulating a device needs"):
        load_basis(folder / "basis", folder / "cluster.toml")


SMALL = [
    Call("linear", (Argument((8, 16)), Argument((12, 16), parameter=True)), (8, 12), 3072),
    Call("conv2d", (Argument((2, 8, 6, 6)), Argument((4, 8, 3, 3), parameter=True)), (2, 4, 3, 3), 10368),
    Call("matmul", (Argument((2, 4, 8)), Argument((2, 8, 4))), (2, 4, 4), 512),
    Call("layer_norm", (Argument((4, 8)),), (4, 8), kept=((8,), (8,))),
    Call("relu", (Argument((4, 8), gradient=False),), (4, 8)),
]  # fmt: skip


def test_operators_of_given_shapes_are_measured_with_the_real_kernels():
    graph, profile = cost_learning.profile_calls(
        SMALL, torch.device("cpu"), [Precision.FP32, Precision.INT8], 1
    )
    found = {(s.call.kind, s.call.output, s.mode, s.direction) for s in samples_of(graph, profile)}
    for call in SMALL:
        assert (call.kind, call.output, "fp32", "forward") in found
    assert ("conv2d", (2, 4, 3, 3), "int8", "backward") in found
    assert ("relu", (4, 8), "fp32", "backward") not in found
    assert not [kind for kind, shape, *_ in found if kind == "linear" and shape != (8, 12)]  # no thin ones


def test_every_kind_is_measured_at_sizes_that_have_kernels_of_their_own():
    """A kernel called inside the traced bench would break its graph; qsync puts its kernels in itself."""
    shape = (2, 16, 32, 32)
    calls = [Call(kind, (Argument(shape),), shape) for kind in cost_learning.UNARY if kind != "max_pool2d"]
    graph, profile = cost_learning.profile_calls(
        calls, torch.device("cpu"), [Precision.FP32, Precision.BF16], 1
    )
    assert {s.call.kind for s in samples_of(graph, profile)} >= {call.kind for call in calls}
    assert "other" not in {op.kind for op in graph.ops}


def test_what_a_device_reaches_is_measured():
    sheet = cost_learning.measure_sheet(torch.device("cpu"))
    assert {"fp32", "bf16", "int8"} <= set(sheet.flops_per_s) and sheet.bytes_per_s > 1e8
    assert sheet.launch_s > 0 and sheet.source.startswith("measured on")
    chosen = cost_learning.choose_calls(30, sheet, wanted=SMALL)
    assert SMALL[0] in chosen and len(chosen) >= 20


def test_only_what_can_stand_alone_is_measured():
    assert not can_measure(Call("embedding", (Argument((4, 8), parameter=True),), (2, 8)))
    assert not can_measure(Call("linear", (Argument((0, 8)), Argument((4, 8), parameter=True)), (0, 4)))
    assert all(can_measure(call) for call in pool(200))
