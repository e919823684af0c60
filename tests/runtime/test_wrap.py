"""wrap, profile and sensitivity: in place, through all of training, refused with a reason."""

from __future__ import annotations

import copy
import json
import pickle
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from graphs import cluster_of
from models import MLP, build, loss_of, step
from observing import decibels
from torch import nn
from traced_models import Applied, Broken, X

import qsync
from qsync.errors import CalibrationError, FormatError, MismatchError, QSyncError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime import planned_forward, weight_cache
from qsync.runtime.weight_cache import WeightCopy


def plan_for(model: nn.Module, batch, precision: str = "bf16", classes=("train", "infer")) -> Plan:
    """Everything in one precision on `infer`, FP32 on the others."""
    graph = qsync.capture(model, batch)
    full = dict.fromkeys((op.name for op in graph.adjustable), Precision.FP32)
    low = dict.fromkeys(full, Precision(precision))
    return Plan(
        graph.model, graph.hash, {name: ClassPlan(low if name == "infer" else full) for name in classes}
    )


def modes_of(model: nn.Module) -> dict[str, str]:
    """What the last call ran each product in."""
    lowered = planned_forward.program_of(model).lowered
    adjustable = {op.name for part in lowered for op in part.graph.adjustable}
    return {n.op: n.mode for part in lowered for n in part.nodes if getattr(n, "op", None) in adjustable}


@pytest.fixture
def casts(monkeypatch) -> list[str]:
    """The target of every weight that is cast, as it happens."""
    seen: list[str] = []
    call = WeightCopy.__call__

    def counted(self, weight):
        cast = self._cast

        def counting(tensor, target):
            seen.append(target)
            return cast(tensor, target)

        self._cast = counting
        try:
            return call(self, weight)
        finally:
            self._cast = cast

    monkeypatch.setattr(WeightCopy, "__call__", counted)
    return seen


# --- In place ---


def test_wrapping_is_in_place():
    model, batch = build("bert")
    kind, keys, modules = type(model), list(model.state_dict()), list(dict(model.named_modules()))
    assert qsync.wrap(model, "int8", strict=True) is model
    step(model, batch)
    assert type(model) is kind and list(model.state_dict()) == keys
    assert list(dict(model.named_modules())) == modules
    assert set(modes_of(model).values()) == {"int8"}


def test_a_plan_gives_each_class_its_own_precisions():
    model, batch = build("mlp")
    plan = plan_for(model, batch)
    for name, mode in (("infer", "bf16"), ("train", "fp32")):
        qsync.wrap(model, plan, device_class=name)
        step(model, batch)
        assert set(modes_of(model).values()) == {mode}


def test_wrapping_again_replaces_the_plan():
    model, batch = build("mlp")
    expected = step(model, batch)[0]
    for precision in ("int8", "bf16", "fp32"):
        qsync.wrap(model, precision, strict=True)
        loss, _ = step(model, batch)
        assert set(modes_of(model).values()) == {precision}
    assert torch.equal(loss, expected)


def test_a_plan_made_on_the_meta_device_runs_on_this_one():
    model, batch = build("mlp")
    with torch.device("meta"):
        abstract = MLP()
    plan = plan_for(abstract, {name: tensor.to("meta") for name, tensor in batch.items()})
    qsync.wrap(model, plan, device_class="infer")
    step(model, batch)
    assert set(modes_of(model).values()) == {"bf16"}


def test_copies_keep_their_precision_and_a_state_dict_is_plain():
    model, batch = build("mlp")
    plain, _ = step(model, batch)
    qsync.wrap(model, "int8", strict=True)
    expected, _ = step(model, batch)
    fresh = MLP()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(step(fresh, batch)[0], plain)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.fc1.weight.data.add_(0.0)
        assert torch.equal(step(other, batch)[0], expected) and set(modes_of(other).values()) == {"int8"}
        assert other.forward.module is other


def test_unwrapping_gives_the_plain_model_back():
    model, batch = build("mlp")
    plain, _ = step(model, batch)
    assert qsync.unwrap(qsync.wrap(model, "int8", strict=True)) is model
    assert torch.equal(step(model, batch)[0], plain) and "forward" not in vars(model)
    with pytest.raises(MismatchError, match="not wrapped"):
        qsync.unwrap(model)


def test_a_copy_that_was_never_called_is_unwrapped_alone():
    model, batch = build("mlp")
    plain, _ = step(model, batch)
    low, _ = step(qsync.wrap(model, "int8", strict=True), batch)
    copied = qsync.unwrap(copy.deepcopy(model))
    assert torch.equal(step(copied, batch)[0], plain) and "forward" not in vars(copied)
    assert torch.equal(step(model, batch)[0], low) and not torch.equal(low, plain)


# --- Training ---


def test_batches_may_change_their_size():
    """An epoch with a partial last batch, one of two samples, which batch norm needs, and back."""
    plain, _ = build("resnet")
    model, batch = build("resnet")
    qsync.wrap(model, plan_for(model, batch, "fp32"), device_class="train")
    for size in (4, 4, 3, 2, 7, 4):
        _, batch = build("resnet", batch_size=size)
        assert torch.equal(step(model, batch)[0], step(plain, batch)[0]), size
    low, _ = build("resnet")
    qsync.wrap(low, "bf16", strict=True)
    for size in (4, 3, 2, 4):
        _, batch = build("resnet", batch_size=size)
        loss, gradients = step(low, batch)
        assert loss.isfinite() and all(g.isfinite().all() for g in gradients.values())
        assert set(modes_of(low).values()) == {"bf16"}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_weights_are_cast_once_per_optimizer_step(casts, precision):
    model, _ = build("mlp")
    qsync.wrap(model, precision, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    per_step = []
    for _ in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            _, batch = build("mlp", batch_size=8)
            loss_of(model, batch, micro).backward()
        optimizer.step()
        per_step.append(casts.copy())
        casts.clear()
    num_parameters_cast = {"bf16": 4, "int8": 2}[precision]  # INT8 adds its bias in FP32
    assert [len(seen) for seen in per_step] == [num_parameters_cast] * 3


def test_micro_batches_add_up_to_what_they_give_alone():
    model, batch = build("mlp")
    qsync.wrap(model, "int8", strict=True)
    halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    alone = [step(model, half, seed)[1] for seed, half in enumerate(halves)]
    model.zero_grad()
    for seed, half in enumerate(halves):
        loss_of(model, half, seed).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, alone[0][name] + alone[1][name])


class Tied(nn.Module):
    """A head whose weight is that of the embedding, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.embedding(tokens)), tokens.roll(1))


def test_a_weight_shared_by_two_operators_gets_both_gradients():
    tied, tokens = Tied(), torch.arange(12)
    tied(tokens).backward()
    expected = {"embedding.weight": tied.embedding.weight.grad.clone()}
    tied.zero_grad()
    qsync.wrap(tied, "bf16", strict=True)(tokens).backward()
    assert decibels({name: p.grad for name, p in tied.named_parameters()}, expected) > 30
    shared = Applied(lambda m, x: m.fc1(x))
    shared(X).backward()
    expected = {name: p.grad.clone() for name, p in shared.named_parameters()}
    shared.zero_grad()
    qsync.wrap(shared, "bf16", strict=True)(X).backward()
    assert decibels({name: p.grad for name, p in shared.named_parameters()}, expected) > 30


def test_frozen_parameters_get_no_gradient():
    model, batch = build("mlp")
    model.fc1.requires_grad_(False)
    _, expected = step(model, batch)
    qsync.wrap(model, "int8", strict=True)
    _, gradients = step(model, batch)
    assert gradients.keys() == expected.keys() and "fc1.weight" not in gradients
    model.fc1.requires_grad_(True)
    assert "fc1.weight" in step(model, batch)[1]


# --- Weights that change ---


def by_optimizer(model: MLP) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def by_loading(model: MLP) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def by_hand(model: MLP) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1


def behind_autograds_back(model: MLP) -> None:
    """As exponential moving averages are swapped in: autograd's version of the weight stays as it was."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data + 1)


def by_other_storage(model: MLP) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


@pytest.mark.parametrize(
    "change", [by_optimizer, by_loading, by_hand, behind_autograds_back, by_other_storage]
)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_changed_weights_are_used(change, mode):
    model, batch = build("mlp")
    qsync.wrap(model, "int8", strict=True)
    model.train(mode == "train")

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.set_grad_enabled(mode != "no_grad"):
            found = loss_of(model, batch)
        if mode != "no_grad":
            found.backward()
        return found.detach()

    before = loss(model)
    if mode == "train":  # a step begins with fresh gradients; in evaluation they may be left over
        model.zero_grad()
    change(model)
    fresh = MLP().train(mode == "train")
    fresh.load_state_dict(model.state_dict())
    expected = loss(qsync.wrap(fresh, "int8", strict=True))
    if mode == "train":
        model.zero_grad()
    assert torch.equal(loss(model), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("shape", [(64, 512), (48, 96), (7, 5)])
def test_a_step_by_hand_is_seen_where_an_input_feature_is_always_zero(shape):
    """The gradient of its column is zero, as of a pixel at the edge of every image."""
    features, width = shape
    model, x = nn.Sequential(nn.Linear(features, width, bias=False)), torch.randn(8, features)
    x[:, 0] = 0.0
    fresh = copy.deepcopy(model)
    qsync.wrap(model, "bf16", strict=True)(x).square().mean().backward()
    weight = model[0].weight
    weight.data -= 10 * weight.grad
    weight.grad.zero_()  # kept, as if micro-batches went on
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), qsync.wrap(fresh, "bf16", strict=True)(x))


def test_a_model_compares_its_own_weights_alone(monkeypatch):
    compared: list[int] = []
    samples = weight_cache._samples
    monkeypatch.setattr(weight_cache, "_samples", lambda casts: compared.append(len(casts)) or samples(casts))
    models = {p: qsync.wrap(build("mlp")[0], p, strict=True) for p in ("bf16", "fp32")}
    batch = build("mlp")[1]
    for precision, num_seen in (("bf16", 1), ("fp32", 0), ("bf16", 2)):  # sampled; nothing; compared, sampled
        compared.clear()
        step(models[precision], batch)
        assert len(compared) == num_seen


# --- Evaluation ---


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_weights_of_inference_mode_run_outside_it(precision):
    """Such weights have no version, by which a copy would know them."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).requires_grad_(False)
    x, expected = torch.randn(8, 16), copy.deepcopy(model)
    qsync.wrap(model, precision, strict=True)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected(x), rtol=0.05, atol=0.05)
    with torch.inference_mode():
        model[0].weight.mul_(2), expected[0].weight.mul_(2)
    torch.testing.assert_close(model(x), expected(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", ["resnet", "mlp"])
def test_evaluation_and_training_alternate(family):
    plain, batch = build(family)
    model, _ = build(family)
    qsync.wrap(model, plan_for(model, batch, "fp32"), device_class="train")
    for _ in range(2):
        assert torch.equal(step(model, batch)[0], step(plain, batch)[0])
        with torch.no_grad():
            one, two = model.eval()(**batch), plain.eval()(**batch)
        assert torch.equal(one["logits"], two["logits"])
        assert one["logits"].requires_grad is False
        model.train(), plain.train()


def test_running_statistics_move_in_training_only():
    model, batch = build("resnet")
    qsync.wrap(model, "bf16", strict=True)
    step(model, batch)
    norm = model.layer1.bn1
    moved = norm.running_mean.clone()
    assert norm.num_batches_tracked == 1 and moved.any() and moved.dtype is torch.float32
    with torch.no_grad():
        model.eval()(**batch)
    assert norm.num_batches_tracked == 1 and torch.equal(norm.running_mean, moved)


# --- Refused ---


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_plan_of_another_model_is_refused_at_every_call_and_changes_nothing():
    model, batch = build("resnet")
    other, other_batch = build("mlp")
    qsync.wrap(model, plan_for(other, other_batch), device_class="infer")
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"fc1.*ResNet") as error:
            model(**batch)
        assert "\n" not in str(error.value)
    assert_untouched(model, before)


def test_a_plan_of_other_widths_is_refused_with_both_hashes():
    model, batch = build("mlp")
    wider = MLP(width=8)
    plan = plan_for(wider, {"x": torch.randn(2, 8)})
    qsync.wrap(model, plan, device_class="infer")
    with pytest.raises(MismatchError) as error:
        model(**batch)
    assert plan.graph_hash in str(error.value) and qsync.capture(model, batch).hash in str(error.value)


def test_an_unknown_device_class_is_named_with_the_known_ones():
    model, batch = build("mlp")
    with pytest.raises(MismatchError, match=r"'t4'.*train, infer"):
        qsync.wrap(model, plan_for(model, batch), device_class="t4")
    with pytest.raises(UnsupportedError, match="device_class= one of train, infer"):
        qsync.wrap(model, plan_for(model, batch))
    assert "forward" not in vars(model)


def test_a_precision_this_device_lacks_is_refused():
    model, batch = build("mlp")
    with pytest.raises(UnsupportedError, match=r"cpu does not support tf32.*bf16"):
        qsync.wrap(model, "tf32")
    plan = plan_for(model, batch).pin("fc1", "tf32")
    with pytest.raises(UnsupportedError, match=r"fc1 in tf32 on infer"):
        qsync.wrap(model, plan, device_class="infer")
    assert "forward" not in vars(model)


ATTENTION = "bert.encoder.layer.0.attention.self.attention"


@pytest.mark.parametrize(
    ("family", "change", "error", "said"),
    [
        ("mlp", lambda plan: plan.update(fc3="bf16"), MismatchError, r"'fc3'.*nearest: 'fc"),
        ("mlp", lambda plan: plan.pop("fc2"), MismatchError, "lacks 'fc2'"),
        ("bert", lambda plan: plan.update({ATTENTION: "int8_all"}), FormatError, f"{ATTENTION}.*int8_all"),
    ],
    ids=["an unknown operator", "an operator left out", "a precision without a kernel"],
)
def test_a_plan_whose_file_was_edited_wrongly_is_refused(family, change, error, said, tmp_path):
    model, batch = build(family)
    path = plan_for(model, batch).save(tmp_path / "plan.json")
    content = json.loads(path.read_text())
    change(content["classes"]["infer"]["assignment"])
    path.write_text(json.dumps(content))
    qsync.wrap(model, Plan.load(path), device_class="infer")
    with pytest.raises(error, match=said):
        model(**batch)


def test_a_pinned_plan_runs_and_a_pattern_without_match_is_refused():
    model, batch = build("mlp")
    plan = plan_for(model, batch)
    qsync.wrap(model, plan.pin("fc1", "int8"), device_class="infer")
    step(model, batch)
    assert modes_of(model) == {"fc1": "int8", "fc2": "bf16"}
    with pytest.raises(MismatchError, match="encoder"):
        plan.pin("encoder.*", "fp32")


# --- Measuring ---


def test_profile_and_sensitivity_leave_the_model_as_it_was():
    for family in ("mlp", "resnet"):
        model, batch = build(family)
        _, gradients = step(model, batch)
        before = copy.deepcopy(model.state_dict())
        random_state = torch.get_rng_state()
        profile = qsync.profile(model, batch, rounds=1, precisions=["fp32", "int8"])
        sensitivity = qsync.sensitivity(model, [batch])
        assert torch.equal(torch.get_rng_state(), random_state)
        assert_untouched(model, before)
        assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
        assert "forward" not in vars(model) and model.training
        graph = qsync.capture(model, batch)
        profile.check_graph(graph)
        assert sensitivity.graph_hash == graph.hash


def test_measuring_a_wrapped_model_leaves_it_wrapped():
    model, batch = build("mlp")
    qsync.wrap(model, "int8", strict=True)
    loss, _ = step(model, batch)
    qsync.sensitivity(model, [batch], precisions=["bf16"])
    qsync.profile(model, batch, rounds=1, precisions=["fp32"])
    assert torch.equal(step(model, batch)[0], loss)
    assert set(modes_of(model).values()) == {"int8"}


def test_a_measured_model_can_be_planned_and_replayed_also_across_graph_breaks():
    model, loss_fn = Broken(), lambda model, batch: model(batch)
    graph = qsync.capture(model, X)
    assert graph.num_segments > 1
    profile = qsync.profile(model, X, loss_fn, rounds=1, precisions=["fp32", "bf16", "int8"])
    sensitivity = qsync.sensitivity(model, [X], loss_fn)
    cluster = cluster_of({"only": 1})
    plan = qsync.plan(graph, {"only": profile}, sensitivity, cluster)
    timeline = qsync.replay(graph, plan, {"only": profile}, cluster)
    assert timeline.step_s > 0 and timeline.sequence("only")
    assert qsync.wrap(model, plan)(X).isfinite()


def test_the_loss_function_sees_the_users_batch():
    model = nn.Sequential(nn.Linear(16, 4))
    batch = {"pixels": torch.randn(8, 16), "target": torch.arange(8) % 4}
    seen = SimpleQueue()  # a list would be put back

    def loss_fn(model, batch):
        seen.put(batch)
        return F.cross_entropy(model(batch["pixels"]), batch["target"])

    assert set(qsync.sensitivity(model, [batch, batch], loss_fn).omega) == {"0"}
    assert seen.qsize() and all(seen.get() is batch for _ in range(seen.qsize()))


BROKEN_BATCHES = [
    (None, "the example batch is missing"),
    ({}, "no tensor"),
    ({"x": torch.randn(0, 16), "labels": torch.arange(0)}, "not empty"),
]


@pytest.mark.parametrize(("batch", "words"), BROKEN_BATCHES)
def test_batches_that_cannot_be_used_are_refused(batch, words):
    for call in (lambda: qsync.profile(MLP(), batch), lambda: qsync.sensitivity(MLP(), [batch])):
        with pytest.raises(CalibrationError, match=words):
            call()
    with pytest.raises(CalibrationError, match="no calibration batch"):
        qsync.sensitivity(MLP(), [])
    for one in (torch.randn(2, 16), {"x": torch.randn(2, 16)}):
        with pytest.raises(CalibrationError, match=r"found one batch; pass \[batch\]"):
            qsync.sensitivity(MLP(), one)
    with pytest.raises(CalibrationError, match="rounds must be at least 1, found 0"):
        qsync.profile(MLP(), torch.randn(2, 16), rounds=0)


@pytest.mark.parametrize("where", ["batch", "weights"])
def test_numbers_that_are_not_finite_are_found_with_the_operator_that_met_them(where):
    model, batch = build("mlp")
    broken = {**batch, "x": batch["x"].clone()}
    if where == "batch":
        broken["x"][3, 3] = float("nan")
        first = "fc1"
    else:
        model.fc2.weight.data[0, 0] = float("inf")
        first = "fc2"
    for call in (lambda: qsync.sensitivity(model, [broken]), lambda: qsync.profile(model, broken)):
        with pytest.raises(CalibrationError, match=f"{first}.*NaN or Inf") as error:
            call()
        assert "\n" not in str(error.value)
    assert "forward" not in vars(model)


def test_a_loss_that_is_no_single_number_is_refused():
    model, batch = build("mlp")

    def per_sample(model, batch):
        return F.cross_entropy(model(batch["x"])["logits"], batch["labels"], reduction="none")

    for call in (
        lambda: qsync.profile(model, batch, per_sample),
        lambda: qsync.sensitivity(model, [batch], per_sample),
    ):
        with pytest.raises(CalibrationError, match=r"shape \(8,\)"):
            call()


def test_a_model_without_a_loss_asks_for_loss_fn():
    model = nn.Linear(16, 4)
    for call in (
        lambda: qsync.profile(model, X.repeat(1, 2)),
        lambda: qsync.sensitivity(model, [X.repeat(1, 2)]),
    ):
        with pytest.raises(QSyncError, match="loss_fn"):
            call()


@pytest.mark.parametrize(
    "loss_fn", [3, lambda output: output.sum(), nn.functional.cross_entropy, nn.CrossEntropyLoss()]
)
def test_a_loss_that_takes_no_model_is_refused(loss_fn):
    for call in (
        lambda: qsync.profile(nn.Linear(16, 4), X.repeat(1, 2), loss_fn),
        lambda: qsync.sensitivity(nn.Linear(16, 4), [X.repeat(1, 2)], loss_fn),
    ):
        with pytest.raises(FormatError, match="loss_fn must take a model and a batch, found"):
            call()


def test_a_model_that_trains_nothing_is_refused():
    model, batch = build("mlp")
    with pytest.raises(CalibrationError, match="no parameter of MLP"):
        qsync.profile(model.requires_grad_(False), batch)


def test_precisions_that_cannot_be_profiled_are_refused():
    model, batch = build("mlp")
    with pytest.raises(UnsupportedError, match="tf32"):
        qsync.profile(model, batch, precisions=["tf32"])
    with pytest.raises(FormatError, match="int7"):
        qsync.profile(model, batch, precisions=["int7"])


# --- Saving less for backward ---


def forms_of(model: nn.Module) -> dict[str, str]:
    """How the operators of the last call run that run otherwise than as torch does."""
    lowered = planned_forward.program_of(model).lowered
    return {n.op: n.form for part in lowered for n in part.nodes if getattr(n, "form", "plain") != "plain"}


def test_a_plan_says_which_operators_save_less():
    model, batch = build("bert")
    graph = qsync.capture(model, batch)
    int8 = {op.name: Precision.INT8 if op.kind == "linear" else Precision.FP32 for op in graph.adjustable}
    plain = Plan(graph.model, graph.hash, {"train": ClassPlan(int8), "infer": ClassPlan(int8)})
    plan = plain.save_less("*.layer.0.*", device_class="infer")
    other = copy.deepcopy(model)
    expected, _ = step(qsync.wrap(other, plan, device_class="train"), batch)
    loss, gradients = step(qsync.wrap(model, plan, device_class="infer"), batch)
    # Codes of gelu beside a product, not in its epilogue: the same but for the last digits of layer 0's.
    assert (loss - expected).abs() < 1e-3 * expected.abs()
    assert set(forms_of(other).values()) == {"gelu", "fused"}
    forms = forms_of(model)
    less = {name: form for name, form in forms.items() if form not in ("gelu", "fused")}
    assert {name.split(".")[3] for name in less} == {"0"}
    assert sorted(less.values()) == ["bits", "bits", "codes", "codes", "codes"]
    assert {name.split(".")[3] for name in forms.keys() - less.keys()} == {"1"}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("family", "kinds"), [("bert", {"gelu", "layer_norm", "dropout"}), ("resnet", {"relu", "batch_norm"})]
)
def test_wrap_can_let_every_operator_save_less(family, kinds):
    model, batch = build(family)
    qsync.wrap(model, "int8", save_less=True, strict=True)
    for _ in range(2):
        loss, _ = step(model, batch)
    assert torch.isfinite(loss)
    assert {name.rpartition(".")[2].partition("#")[0] for name in forms_of(model)} >= kinds


def test_a_pattern_that_no_operator_matches_is_refused_at_the_first_call():
    model, batch = build("mlp")
    qsync.wrap(model, plan_for(model, batch).save_less("nobody"), device_class="infer")
    with pytest.raises(MismatchError, match="makes 'nobody' save less"):
        model(**batch)
