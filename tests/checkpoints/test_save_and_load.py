"""One process: what is saved is what is loaded, and bad input is one sentence."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys

import pytest
import torch
from graphs import profile_of
from safetensors.torch import load_file

import qsync
from qsync.checkpoints.writer import PARTIAL
from qsync.errors import FormatError, MismatchError, QSyncError
from qsync.experiments.workloads.gpt import Gpt
from qsync.records.graph import digest
from qsync.records.plans import ClassPlan


class Sampler:
    """A sampler of the user's, with state of several types."""

    def __init__(self) -> None:
        self.state = {
            "epoch": 1,
            "order": torch.randperm(6).view(2, 3).T,
            "by_rank": {0: (1, 2)},
            "name": None,
            "best": 1e-300,
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trained(steps=3, kind=torch.optim.AdamW):
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 2)
    )
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[2:]}, {"params": parameters[:2], "lr": 1e-3}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    train(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def numbers(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def test_training_goes_on_bitwise(tmp_path):
    model, optimizer, scheduler = trained()
    sampler, other = Sampler(), Sampler()
    other.state = {"epoch": 0}
    qsync.save(tmp_path / "a", model, optimizer, step=3, scheduler=scheduler, sampler=sampler)
    train(model, optimizer, scheduler, 3)
    again = trained(steps=0)
    found = qsync.load(tmp_path / "a", *again[:2], scheduler=again[2], sampler=other)
    train(*again, 3)
    assert found.step == 3
    assert torch.equal(numbers(model), numbers(again[0]))
    assert scheduler.state_dict() == again[2].state_dict()
    assert torch.equal(other.state.pop("order"), sampler.state.pop("order")) and other.state == sampler.state


@pytest.mark.parametrize("steps", (0, 2))
def test_saving_changes_nothing(tmp_path, steps):
    """Also before the first step: an optimizer without state stays without."""
    torch.manual_seed(0)
    model, optimizer, scheduler = trained(steps)
    before = torch.get_rng_state()
    qsync.save(tmp_path / "a", model, optimizer)
    assert torch.equal(torch.get_rng_state(), before) and bool(optimizer.state) == bool(steps)
    train(model, optimizer, scheduler, 2)
    torch.manual_seed(0)
    assert torch.equal(numbers(model), numbers(trained(steps + 2)[0]))


def test_plain_pytorch_reads_it(tmp_path):
    model, optimizer, _ = trained()
    expected = model.state_dict()
    compiled = torch.nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    qsync.save(tmp_path / "a", torch.compile(compiled, backend="eager"), optimizer)
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    qsync.load(tmp_path / "a", trained(0)[0])
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert modes == {(tmp_path / "a").stat().st_mode & 0o666}  # who may look into the folder may read it


def test_parameters_may_have_another_order(tmp_path):
    model = trained(0)[0]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    qsync.save(tmp_path / "a", model, optimizer)
    other = torch.optim.Adam(reversed(list(model.parameters())))
    qsync.load(tmp_path / "a", model, other)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(other.state[parameter][slot], value) for slot, value in state.items())


def test_tied_weights_and_the_plan_are_saved(tmp_path):
    model, tokens = Gpt(2, 16, 2, context=8, vocab=11, tied=True), torch.arange(16).view(2, 8) % 11
    graph = qsync.capture(model, tokens)
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
    plan = qsync.Plan("Gpt", graph.hash, {
        "infer": ClassPlan({op.name: qsync.Precision.FP32 for op in graph.adjustable})
    })  # fmt: skip
    qsync.wrap(model, plan)
    qsync.save(tmp_path / "a", model, profiles=profiles)
    again = Gpt(2, 16, 2, context=8, vocab=11, tied=True)
    found = qsync.load(tmp_path / "a", again)
    assert found.plan == plan and found.profiles["infer"].hash == profiles["infer"].hash
    assert torch.equal(numbers(again), numbers(model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "a"
    model, optimizer, scheduler = trained()
    return qsync.save(folder, model, optimizer, step=3, scheduler=scheduler)


def cut_short(path):
    file = path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def flip_a_bit(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def change(path, **changes):
    value = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**value, **changes}))


DAMAGES = {
    "model.safetensors is not what was written": lambda path: (path / "model.safetensors").write_bytes(b""),
    "optimizer.safetensors is not what": cut_short,
    "SHA-256": flip_a_bit,
    "model.safetensors is missing": lambda path: (path / "model.safetensors").unlink(),
    "more.safetensors is not what": lambda path: shutil.copy(
        path / "model.safetensors", path / "more.safetensors"
    ),
    "has version 2": lambda path: change(path, version=2),
    "was modified": lambda path: change(path, step=4),
    "not valid JSON": lambda path: (path / "checkpoint.json").write_text('{"kind": "check'),
    "expected a checkpoint file": lambda path: change(path, kind="plan"),
    "holds no checkpoint": lambda path: (path / "checkpoint.json").unlink(),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused(saved, what, tmp_path, command):
    path = tmp_path / "a"
    shutil.copytree(saved, path)
    DAMAGES[what](path)
    model, optimizer, _ = trained()
    before = numbers(model)
    with pytest.raises(FormatError, match=what) as error:
        qsync.load(path, model, optimizer)
    assert torch.equal(numbers(model), before)
    code, out, err = command("checkpoint", path)
    assert (code, out) == (2, "") and err.strip().splitlines()[-1] == f"qsync: {error.value}"


def others():
    """Models, optimizers and objects that are not the saved ones, by what is said of them."""
    model, optimizer, _ = trained(0)
    narrow = torch.nn.Sequential(torch.nn.Linear(3, 6), *list(model)[1:])
    one_group = torch.optim.AdamW(model.parameters())
    with torch.device("meta"):
        meta = trained(0)[0]
    yield "0.weight' is torch.float32 .6, 6. there and torch.float32 .6, 3.", (narrow,), {}
    yield "torch.float64", (trained(0)[0].double(),), {}
    yield "meta device", (meta,), {}
    yield "3.weight' is torch.float32 .2, 6. there and missing", (model[:2],), {}
    yield "missing there", (torch.nn.Sequential(*model, torch.nn.Linear(2, 2)),), {}
    yield (
        "AdamW with 2 groups of parameters, the optimizer is SGD with 2",
        trained(0, torch.optim.SGD)[:2],
        {},
    )
    yield "2 groups of parameters, the optimizer is AdamW with 1;", (model, one_group), {}
    yield (
        "has no sampler, only model, optimizer, scheduler; leave out sampler",
        (model, optimizer),
        {"sampler": Sampler()},
    )
    yield "scheduler= must have state_dict", (model, optimizer), {"scheduler": 3}
    yield "parameters that the model lacks", (model, torch.optim.AdamW(narrow.parameters())), {}


@pytest.mark.parametrize("number", range(len(list(others()))))
def test_another_model_is_refused(saved, number):
    what, arguments, objects = list(others())[number]
    before = numbers(arguments[0]).clone()
    with pytest.raises(QSyncError, match=what):
        qsync.load(saved, *arguments, **objects)
    assert arguments[0][0].weight.is_meta or torch.equal(numbers(arguments[0]), before)


def test_what_other_saves_have_begun_stays(tmp_path):
    """Also where the name of the folder reads as a pattern of theirs, or begins it."""
    left = {name: tmp_path / f".{name}.{'0' * 32}{PARTIAL}" for name in ("run[1]", "run1", "run[1].more")}
    for path in left.values():
        path.mkdir()
    qsync.save(tmp_path / "run[1]", trained(0)[0])
    assert [name for name, path in left.items() if path.exists()] == ["run1", "run[1].more"]


def test_what_cannot_be_saved_is_refused(tmp_path):
    model, optimizer, _ = trained(0)
    sampler = Sampler()
    sampler.state["order"] = {3, 4}
    with pytest.raises(FormatError, match="sampler/order is a set"):
        qsync.save(tmp_path / "a", model, optimizer, sampler=sampler)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FormatError, match="already exists and is never overwritten"):
        qsync.save(tmp_path / "full", model)
    (tmp_path / "file").touch()
    with pytest.raises(QSyncError, match="could not be written"):
        qsync.save(tmp_path / "file" / "a", model)
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file"}


@pytest.mark.parametrize("is_there", [True, False], ids=["an empty folder", "nothing yet"])
def test_a_link_is_followed(is_there, tmp_path):
    if is_there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "loop").symlink_to("loop")
    model = trained(0)[0]
    assert qsync.save(tmp_path / "link", model, step=3) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and qsync.load(tmp_path / "disk", model).step == 3
    for name in ("link", "loop"):
        with pytest.raises(FormatError, match="already exists and is never overwritten"):
            qsync.save(tmp_path / name, model)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link", "loop"}


def test_the_command_shows_and_verifies(saved, tmp_path, command):
    for name in ("one", "two"):
        shutil.copytree(saved, tmp_path / name)
    cut_short(tmp_path / "two")
    code, out, _ = command("checkpoint", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and found["verified"] and found["step"] == 3 and found["optimizer"] == "AdamW"
    assert found["path"] == str(tmp_path / "one") and found["objects"] == ["scheduler"]
    assert set(found["files"]) == {"model.safetensors", "optimizer.safetensors"}
    assert "SHA-256" in found["checkpoints"][str(tmp_path / "two")]
    code, out, _ = command("checkpoint", tmp_path)
    assert code == 0 and "AdamW" in out and "SHA-256" in out


def test_the_command_imports_no_torch(saved):
    code = "import sys; sys.argv[1:] = ['checkpoint', sys.argv[1]]; from qsync.commands import main\n"
    code += "try: main.main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n") and "AdamW" in done.stdout


def test_an_object_that_refuses_its_state_leaves_the_rest_unchanged(tmp_path):
    model, optimizer, _ = trained()
    qsync.save(tmp_path / "one", model, optimizer, ema=torch.nn.Linear(4, 4))
    other, its, _ = trained(steps=0)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(MismatchError, match="ema cannot load its saved state"):
        qsync.load(tmp_path / "one", other, its, ema=torch.nn.Linear(5, 4))
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    assert not its.state_dict()["state"]


@pytest.mark.parametrize("becomes", ["a folder", "a link to nothing"])
def test_a_checkpoint_with_a_file_that_cannot_be_read_is_passed_over(tmp_path, becomes):
    model, optimizer, _ = trained()
    for step in (1, 2):
        qsync.save(tmp_path / f"step-{step}", model, optimizer, step=step)
    (file,) = (tmp_path / "step-2").glob("model*.safetensors")
    file.unlink()
    file.mkdir() if becomes == "a folder" else file.symlink_to("nowhere")
    assert qsync.load(tmp_path, model, optimizer).step == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"plan": "plan.json"}, "plan is a str, 'plan.json'"),
        ({"profiles": ["a"]}, "profiles is a list"),
        ({"profiles": {"train": "a"}}, r"profiles\['train'\] is a str"),
        (
            {"optimizer": "adam"},
            "optimizer must have step, state_dict, load_state_dict, or be a list of such, found",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, arguments, words):
    with pytest.raises(FormatError, match=words):
        qsync.Checkpoints(tmp_path, torch.nn.Linear(4, 4), every=1, **arguments)
    with pytest.raises(FormatError, match=words):
        qsync.save(tmp_path / "one", torch.nn.Linear(4, 4), **arguments)
    assert not list(tmp_path.iterdir())


def test_a_model_in_the_place_of_the_folder_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"save takes a folder, then the model, found Linear\("):
        qsync.save(torch.nn.Linear(4, 4), tmp_path / "one")


@pytest.mark.parametrize("name", ["../esc", "a/b", "model-rank0", "", "x y"])
def test_names_that_would_leave_the_folder(name, tmp_path):
    model, optimizer, scheduler = trained()
    with pytest.raises(FormatError, match="cannot name an object and its file"):
        qsync.save(tmp_path / "new", model, optimizer, **{name: scheduler})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "on the meta device"),
        (torch.ones(3, dtype=torch.complex128), "torch.complex128"),
    ],
    ids=["sparse", "meta", "complex128"],
)
def test_tensors_that_cannot_be_saved(tensor, what, tmp_path):
    model, optimizer, _ = trained()
    sampler = Sampler()
    sampler.state = {"kept": [tensor]}
    with pytest.raises(FormatError, match=f"the tensor sampler/kept/0 is {what}"):
        qsync.save(tmp_path / "new", model, optimizer, sampler=sampler)
    with pytest.raises(FormatError, match=f"the tensor sampler/kept/0 is {what}"):
        qsync.Checkpoints(tmp_path, model, optimizer, every=1, sampler=sampler)


class Counting(torch.optim.SGD):
    """An optimizer with state beside that of its parameters."""

    counted = 0

    def state_dict(self):
        return {**super().state_dict(), "counted": self.counted}

    def load_state_dict(self, state):
        self.counted = state["counted"]
        super().load_state_dict({key: value for key, value in state.items() if key != "counted"})


def test_what_an_optimizer_adds_to_its_state_is_kept(tmp_path):
    model, optimizer, _ = trained(kind=Counting)
    optimizer.counted = 5
    qsync.save(tmp_path / "new", model, optimizer)
    other, loaded, _ = trained(kind=Counting)
    qsync.load(tmp_path / "new", other, loaded)
    assert loaded.counted == 5


FORGERIES = {
    "no step": lambda index: index.pop("step"),
    "no files": lambda index: index.pop("files"),
    "no profiles": lambda index: index.pop("profiles"),
    "step": lambda index: index.update(step="x"),
    "saved": lambda index: index.update(saved=7),
    "profiles": lambda index: index.update(profiles=[1]),
    "files": lambda index: index.update(files=3),
    "state": lambda index: index.update(state=[]),
    "a tensor": lambda index: index["state"]["model"].update({"0.weight": {"@tensor": "other"}}),
    "no state of the model": lambda index: index["state"].update(model=3),
    "a parameter": lambda index: index["state"]["optimizer"]["state"].update({"9.weight": {}}),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_index_is_one_sentence_and_changes_nothing(forge, tmp_path):
    model, optimizer, _ = trained()
    qsync.save(tmp_path / "new", model, optimizer, step=3)
    index = json.loads((tmp_path / "new" / "checkpoint.json").read_text())
    index.pop("digest")
    forge(index)
    index["digest"] = digest(index)
    (tmp_path / "new" / "checkpoint.json").write_text(json.dumps(index))
    other, into, _ = trained()
    before = numbers(other).clone()
    with pytest.raises(QSyncError, match="new") as error:
        qsync.load(tmp_path / "new", other, into)
    assert "\n" not in str(error.value)
    assert torch.equal(numbers(other), before)
