"""What no kernel serves: known from shapes, kept out of plans, said by explain, moved one precision up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from graphs import Builder, cluster_of, profile_of, sensitivity_of
from torch import nn

import qsync
from qsync import backend
from qsync.allocator import allocate, check_plan, unsupported_precisions
from qsync.backend import Operand, encode, select
from qsync.backend.cutlass.convolution import unsupported
from qsync.backend.selection.kernel_selection import Kernels
from qsync.commands import device_report, doctor_tables
from qsync.errors import UnsupportedError
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.kernel_support import supported_up, unsupported_by_shape
from qsync.records.plan_folder import Basis
from qsync.records.plans import ClassPlan, Plan
from qsync.records.profiles import Profile
from qsync.runtime import choosers, planned_forward
from qsync.runtime.choosers import uniform

FP32, BF16, FP16, INT8 = Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8
GPU = (FP32, FP16, INT8)  # a T4's


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(4, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.long = nn.Conv2d(8, 8, (1, 33), padding=(0, 16))
        self.signal = nn.Conv1d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.plain, self.depthwise, self.dilated, self.long):
            x = layer(x)
        return self.signal(x.flatten(2)).square().mean()


IMAGES = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
REASONS = {
    "depthwise": "CUTLASS has no grouped convolutions",
    "dilated": "CUTLASS has no input gradient of dilated convolutions",
    "long": "CUTLASS has no filters longer than 32",
    "signal": "there is no INT8 convolution of signals on GPUs",
}


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    with torch.device("meta"):
        model = Convolutions()
    return qsync.capture(model, IMAGES.to("meta"))


def gpu_cluster() -> Cluster:
    cluster = cluster_of({"train": 1, "infer": 1}, precisions=GPU)
    return replace(cluster, classes=tuple(replace(c, device="cuda") for c in cluster.classes))


def profiles_of(graph: OpGraph) -> dict[str, Profile]:
    return {
        name: profile_of(graph, name, GPU, slow=slow, latency_s=1e-8, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 40.0))
    }


GROUPED = torch.ones(2, 4, 5, 5), torch.ones(4, 2, 3, 3)

# --- The rule ---


def test_a_gpu_s_limits_are_known_without_one(graph):
    found = unsupported_by_shape(graph, "cuda")
    assert {name: why["int8"] for name, why in found.items() if "int8" in why} == REASONS
    images = {op.name for op in graph.adjustable if op.kind == "conv2d"}
    assert {name for name, why in found.items() if "forward only" in why.get("int8_all", "")} == images


def test_a_cpu_has_no_int8_gradients_of_groups(graph):
    ((name, why),) = unsupported_by_shape(graph, "cpu").items()
    assert name == "depthwise" and "grouped" in why["int8_all"] and set(why) == {"int8_all"}
    operands = [
        Operand(t, encode(t, f"int8_{of}")) for t, of in zip(GROUPED, ("image", "channel"), strict=True)
    ]
    with pytest.raises(UnsupportedError, match="one group: run it in int8"):
        select("cpu").kernel("conv2d", "int8_all")(torch.conv2d, "fp32", *operands, groups=2)


def test_a_file_keeps_what_the_rule_needs(graph):
    again = OpGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph and unsupported_by_shape(again, "cuda") == unsupported_by_shape(graph, "cuda")


def test_the_kernels_refuse_by_the_same_rule():
    assert unsupported((2, 8, 5, 5), (8, 1, 3, 3), groups=8) == REASONS["depthwise"]
    assert unsupported((2, 8, 5, 5), (8, 8, 3, 3), dilation=2) == REASONS["dilated"]
    assert unsupported((2, 8, 5, 5), (8, 8, 1, 33)) == REASONS["long"]
    assert unsupported((2, 8, 5, 5), (8, 8, 3, 3)) is None


@pytest.mark.parametrize(
    ("kind", "precision", "unsupported", "sixteen_bit", "expected"),
    [
        ("conv2d", INT8, [INT8], "bf16", BF16),
        ("conv2d", INT8, [INT8], None, FP16),
        ("conv2d", INT8, [INT8, BF16], "bf16", FP32),
        ("linear", Precision.INT8_ALL, [Precision.INT8_ALL], "bf16", INT8),
        ("linear", Precision.FP8, [Precision.FP8], "bf16", BF16),
        ("linear", BF16, [BF16], "bf16", FP32),
        ("attention", BF16, [BF16], "bf16", FP32),
        ("embedding", INT8, [INT8], None, FP32),
        ("conv2d", Precision.INT8_ALL, [Precision.INT8_ALL], "bf16", INT8),
        ("conv1d", Precision.INT8_ALL, [], "bf16", INT8),
        ("matmul", Precision.INT8_ALL, [INT8], "bf16", BF16),
        ("attention", Precision.FP8, [], "bf16", BF16),
        ("linear", INT8, [], "bf16", INT8),
    ],
)
def test_the_first_precision_up(kind, precision, unsupported, sixteen_bit, expected):
    assert supported_up(kind, precision, unsupported, sixteen_bit)[0] is expected


def test_the_precisions_up_end_in_fp32():
    up = supported_up("linear", Precision.INT8_ALL, [BF16], "bf16")
    assert up == [Precision.INT8_ALL, INT8, FP32]


# --- Planning ---


def test_plans_leave_out_what_is_not_served(graph):
    """Though the profile has a time for it: what a GPU without the kernel would run is another precision."""
    given = (graph, profiles_of(graph), sensitivity_of(graph))
    plan = allocate(*given, gpu_cluster())
    assert plan["infer"].assignment["plain"] == "int8"  # forty times as slow as the other: all that pays
    assert not [name for name in REASONS if plan["infer"].assignment[name] == "int8"]
    assert check_plan(graph, plan, *given[1:], gpu_cluster()).ok
    on_cpus = allocate(*given, cluster_of(precisions=GPU))
    assert [name for name in REASONS if on_cpus["infer"].assignment[name] == "int8"]


def test_a_pin_to_what_is_not_served_is_refused_with_the_reason(graph):
    with pytest.raises(
        UnsupportedError, match="depthwise is pinned to int8.*no grouped convolutions; pin it"
    ):
        allocate(graph, profiles_of(graph), sensitivity_of(graph), gpu_cluster(), pins={"depthwise": "int8"})


def test_a_plan_by_hand_is_not_certified(graph):
    names = [op.name for op in graph.adjustable]
    plan = Plan(graph.model, graph.hash, {
        "train": ClassPlan(dict.fromkeys(names, FP32)), "infer": ClassPlan(dict.fromkeys(names, INT8)),
    })  # fmt: skip
    found = check_plan(graph, plan, profiles_of(graph), sensitivity_of(graph), gpu_cluster())
    assert [text.split()[0] for text in found.violations] == list(REASONS)
    assert "which does not serve it: CUTLASS has no grouped convolutions" in found.violations[0]


# --- Explaining ---


def fp32_plan(graph: OpGraph) -> Plan:
    names = [op.name for op in graph.adjustable]
    return Plan(
        graph.model, graph.hash, {c: ClassPlan(dict.fromkeys(names, FP32)) for c in ("train", "infer")}
    )


def test_every_refusal_is_listed_with_what_runs_instead(graph):
    found = unsupported_precisions(graph, fp32_plan(graph), profiles_of(graph), gpu_cluster())
    assert [(r.op, r.precision, r.runs_in, r.why) for r in found if r.device_class == "infer"] == [
        (name, INT8, "fp32", reason) for name, reason in REASONS.items()
    ]
    assert not unsupported_precisions(graph, fp32_plan(graph), profiles_of(graph), cluster_of(precisions=GPU))


def test_what_the_profile_was_refused_is_listed(graph):
    profiles = profiles_of(graph)
    ops = {**profiles["infer"].ops, "plain": {"fp32": profiles["infer"].ops["plain"]["fp32"]}}
    lacking = replace(profiles["infer"], ops=ops, refused={"plain": {"int8": "nvcc is missing"}})
    found = unsupported_precisions(
        graph, fp32_plan(graph), {**profiles, "infer": lacking}, cluster_of(precisions=GPU)
    )
    assert [(r.op, r.precision, r.why) for r in found] == [
        ("plain", FP16, "the profile has no time of it; profile this class again"),
        ("plain", INT8, "nvcc is missing"),
    ]
    assert Profile.from_json(json.loads(json.dumps(lacking.to_json()))) == lacking
    assert "refused" not in profiles["infer"].to_json()


def test_kinds_without_a_precision_say_why():
    builder = Builder()
    x = builder.linear("fc", builder.enter("x", (4, 4)), 4)
    builder.op("conv", "conv1d", Role.ADJUSTABLE, [x, builder.enter("w", (4, 4, 1), "parameter")])
    graph = builder.build()
    precisions = (FP32, Precision.INT8_ALL)
    profiles = {name: profile_of(graph, name, precisions) for name in ("train", "infer")}
    (found, _) = unsupported_precisions(graph, fp32_plan(graph), profiles, cluster_of(precisions=precisions))
    assert found.op == "conv" and "conv1d in int8_all: not written" in found.why


def test_explain_says_it(graph, command, tmp_path, monkeypatch):
    basis = Basis(graph, gpu_cluster(), profiles_of(graph), sensitivity_of(graph))
    basis.save(tmp_path)
    fp32_plan(graph).save(tmp_path / "plan.json")
    for options in ([], ["--json"]):
        monkeypatch.setenv("COLUMNS", "200")
        code, out, _ = command("explain", tmp_path / "plan.json", *options)
        assert code == 0 and all(reason in out for reason in REASONS.values())
    assert [entry["op"] for entry in json.loads(out)["refused"]] == [*REASONS, *REASONS]


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads = model.fc(x).view(2, 1, 4, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=model.bias)


def alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, model.fc.weight.view(8, 8, 1))


def doubled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.fc.weight @ model.fc.weight


def in_double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.double(), model.fc.weight.double())


def scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(model.fc.bias, x, model.fc.weight, alpha=2)


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (masked, "attention", "its mask is data in floats"),
        (alone, "conv1d", "no batch dimension"),
        (doubled, "matmul", "reads one value in two places"),
        (in_double, "linear", "the model has it in fp64"),
        (scaled, "addmm", "scales its operands"),
    ],
)
def test_what_capture_keeps_in_fp32_says_why(body, kind, reason):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("bias", torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self, x).sum() + self.last(x.view(-1, 8)).sum()

    shape = (8, 4) if body is alone else (4, 8)
    found = qsync.capture(Model(), torch.randn(shape))
    op = next(op for op in found.ops if op.kind == kind and op.role is Role.FIXED)
    assert reason in op.fixed_because
    profiles = {name: profile_of(found, name) for name in ("train", "infer")}
    listed = unsupported_precisions(found, fp32_plan(found), profiles, cluster_of())
    assert [(r.device_class, r.precision, r.why) for r in listed if r.op == op.name] == [
        (None, None, op.fixed_because)
    ]


# --- Running ---


class Lacking(Kernels):
    """The CPU's kernels but for those of these kinds in INT8."""

    def __init__(self, kinds: tuple[str, ...], device: str = "cpu") -> None:
        super().__init__(torch.device("cpu"))
        self.kinds, self.device = kinds, torch.device(device)

    def why_unsupported(self, kind, precision):
        return "no compiler" if kind in self.kinds and precision == "int8" else None


def test_one_precision_moves_up_where_it_is_not_served_and_says_so(graph):
    kernels = Lacking((), "cuda")
    kernels.precisions = lambda: (FP32, BF16, FP16, INT8)
    with pytest.warns(UserWarning) as said:
        chosen = uniform(INT8, kernels)(graph)
    assert chosen == {"plain": INT8, **dict.fromkeys(REASONS, BF16)}
    assert str(said[0].message) == (
        "Convolutions: conv2d in int8: CUTLASS has no grouped convolutions; depthwise runs in bf16"
    )
    assert uniform(INT8, kernels)(graph) == chosen  # said once: a second warning would be an error here
    assert uniform(INT8)(graph) == dict.fromkeys(chosen, INT8)


def test_one_precision_moves_up_where_its_kind_lacks_it(graph):
    with pytest.warns(UserWarning, match="conv2d in int8_all: .* grouped .*; depthwise runs in int8"):
        chosen = uniform(Precision.INT8_ALL, Lacking(()))(graph)
    everything = dict.fromkeys((op.name for op in graph.adjustable), Precision.INT8_ALL)
    assert chosen == {**everything, "depthwise": INT8, "signal": INT8}


def test_a_wrapped_model_runs_in_the_next_precision_up_where_a_kernel_is_missing(monkeypatch):
    monkeypatch.setattr(backend, "select", lambda *_: Lacking(("conv2d",)))
    model = qsync.wrap(Convolutions(), "int8", strict=True)
    with pytest.warns(
        UserWarning, match="conv2d in int8: no compiler; plain, depthwise, dilated and 1 more run"
    ):
        model(IMAGES)
    (lowered,) = planned_forward.program_of(model).lowered
    modes = {node.op: node.mode for node in lowered.nodes if getattr(node, "op", "") in {"plain", "signal"}}
    assert modes == {"plain": "bf16", "signal": "int8"}


def test_a_profile_measures_the_rest_and_keeps_the_reason(monkeypatch):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(4, 4, 3), nn.Linear(9, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv(x).flatten(2)).square().mean()

    monkeypatch.setattr(backend, "select", lambda *_: Lacking(("conv2d",)))
    model = Two()
    profile = qsync.profile(model, IMAGES, lambda m, b: m(b), precisions=["fp32", "int8"], rounds=1)
    assert set(profile.ops["conv"]) == {"fp32"} and set(profile.ops["fc"]) == {"fp32", "int8"}
    assert profile.refused == {"conv": {"int8": "no compiler"}}


def test_unsupported_asks_kernels_only_for_what_needs_one(graph):
    asked = []

    class Asked(Lacking):
        def why_unsupported(self, kind, precision):
            asked.append((kind, str(precision)))

    for precision in (FP32, BF16, INT8):
        choosers.unsupported(graph, precision, Asked(()))
    assert set(asked) == {(kind, p) for kind in ("conv1d", "conv2d") for p in ("bf16", "int8")}


# --- doctor ---


def test_doctor_lists_what_gpus_do_not_serve():
    device = {"device": "cuda:0", "kernels": [], "limits": device_report.limits("cuda")}
    rows = list(zip(*(column.cells for column in doctor_tables.reasons_table(device).columns), strict=True))
    assert (
        "int8",
        "conv2d",
        f"not all of them: {REASONS['depthwise']}; those stay in the next precision up",
    ) in rows
