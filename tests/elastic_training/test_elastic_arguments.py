"""Arguments of qsync.elastic that cannot be used, and positions of other jobs: one sentence each."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lighthouses import lighthouse

import qsync
from qsync import api
from qsync.backend.devices.device_detection import detect_class
from qsync.distributed import job
from qsync.distributed.job_options import JobOptions
from qsync.elastic_training.elastic_job import ElasticJob
from qsync.elastic_training.options import ElasticOptions
from qsync.elastic_training.plan_book import class_costs
from qsync.elastic_training.training_state import TrainingState
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.predictor.profiling.made_optimizer import maker_of
from qsync.tracing.forward_writes import BuffersBefore

DATASET = [torch.ones(4)] * 32


def started(**changes):
    model = torch.nn.Linear(4, 4)
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dataset": DATASET,
                 "batch_size": 4, "plan": False, **changes}  # fmt: skip
    return qsync.elastic(
        arguments.pop("model"), arguments.pop("optimizer"), arguments.pop("dataset"), **arguments
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": "plan.json"}, "plan must be a Plan, False or None, found 'plan.json'"),
        ({"plan": True}, "plan must be a Plan, False or None, found True"),
        ({"plan": 0}, "plan must be a Plan, False or None, found 0"),
        ({"share": "x"}, "share must be True or False, found 'x'"),
        ({"divide_state": True}, "an elastic job does not divide the optimizer's state"),
        ({"compression": "int9"}, "compression 'int9' does not exist"),
        ({"compression": "auto"}, 'an elastic job cannot use compression=\'auto\': .* give "int8" or "bf16"'),
        ({"compression": "powersgd:4"}, "an elastic job cannot use compression='powersgd:4'"),
        ({"share": True}, "share=True needs predicted seconds, which this plan lacks"),
        ({"emulated_share": 2}, r"emulated_share must be in \(0, 1\], found 2"),
        ({"states": [1]}, "states must be a dict of name -> object"),
        ({"states": {1: torch.nn.Linear(1, 1)}}, r"states\[1\] must be an object with state_dict"),
        ({"collate_fn": 5}, "collate_fn must be a function, found 5"),
        ({"optimizer": "sgd"}, "optimizer must be an optimizer of torch's, found 'sgd'"),
        ({"model": "model"}, "model must be a torch.nn.Module"),
        (
            {"optimizer": torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1)},
            "the optimizer has parameters that the model lacks",
        ),
    ],
    ids=str,
)
def test_what_is_no_such_argument(changes, words):
    with pytest.raises(FormatError, match=words):
        started(**changes)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("LOCAL_WORLD_SIZE", "x", "LOCAL_WORLD_SIZE must be a number of ranks, found 'x'"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE must be a number of ranks, found '0'"),
        ("QSYNC_BACKEND", "foo", "QSYNC_BACKEND is 'foo', which this torch does not have"),
        ("QSYNC_BACKEND", "cpu:gloo,cuda:foo", "QSYNC_BACKEND is 'cpu:gloo,cuda:foo', which this torch"),
    ],
)
def test_variables_that_say_nothing(variable, text, words, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(FormatError, match=words):
        job.ranks_on_host(), job.backend_for(torch.device("cpu"))
    monkeypatch.delenv(variable)
    assert job.ranks_on_host() == 1 and job.backend_for(torch.device("cpu")) == "gloo"


def test_a_step_that_is_dropped_leaves_no_gradient_that_the_next_would_add_to():
    """A loop may clear its gradients after each of its steps, and a dropped step is none."""
    one = ElasticJob.__new__(ElasticJob)
    one.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    one._buffers, before = BuffersBefore(one.model), one.model[1].running_mean
    one.model(torch.ones(2, 4)).sum().backward()
    one.model[1].running_mean = 2 * before + 1  # as forward may put another tensor in a buffer's place
    one._exchange, one._pending = SimpleNamespace(failure=RuntimeError("a peer is gone")), None
    one._go_alone = lambda: None
    assert not one._finish(SimpleNamespace(is_behind=False))
    assert all(parameter.grad is None for parameter in one.model.parameters())
    assert one.model[1].num_batches_tracked == 0
    assert one.model[1].running_mean is before and not before.any()


def test_exchanges_that_always_fail_are_said_once(caplog):
    one = ElasticJob.__new__(ElasticJob)
    cards = [SimpleNamespace(name=name, store=f"{name}.net:5") for name in ("a", "b")]
    one._meeting, one._failing, one._failures_in_a_row = SimpleNamespace(cards=cards), (), 0
    one._exchange = SimpleNamespace(failure=RuntimeError("Invalid scalar type"))
    for _ in range(3):
        one._warn_of_failures()
    assert not caplog.text
    one._meeting = SimpleNamespace(cards=cards[:1])  # without a card it begins anew
    one._warn_of_failures()
    one._meeting = SimpleNamespace(cards=cards)
    for _ in range(6):
        one._warn_of_failures()
    assert caplog.text.count("4 exchanges failed in a row (Invalid scalar type)") == 1
    assert "a at a.net:5, b at b.net:5" in caplog.text


@pytest.mark.parametrize("rate", [0.1, 0.01])
def test_a_card_that_heals_keeps_the_rate_that_its_loop_has_set(rate):
    """Also where that is the rate that it began with, and the others had another one before this step."""
    others, own = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.5, 0.1))
    model = torch.nn.Linear(1, 1)
    source, healed = (TrainingState({"model": model, "optimizer": each}) for each in (others, own))
    state, before = source.whole(), healed.marked()
    own.param_groups[0]["lr"] = rate
    healed.heal(state, before)
    assert own.param_groups[0]["lr"] == rate
    state, before = source.whole(), healed.marked()
    healed.heal(state, before)
    assert own.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["seed", "batch_size", "num_samples"])
def test_a_position_in_another_order_of_samples(name):
    one = ElasticJob.__new__(ElasticJob)
    one._options, one._num_samples = ElasticOptions(batch_size=4), 32
    order = {"seed": 0, "batch_size": 4, "num_samples": 32}
    with pytest.raises(MismatchError, match=f"has {name} {order[name] + 1}, but this job has"):
        one.load_state_dict({"step": 4, "history": "", **order, name: order[name] + 1})


def test_the_cache_of_a_class_knows_what_was_asked_for_and_what_is_trained(tmp_path, monkeypatch):
    """A job that was restricted to FP32, or trains without momentum, must not decide for the next one."""
    monkeypatch.setattr(api, "profile", lambda *_, precisions, **__: measured.append(precisions) or profile)
    monkeypatch.setattr("qsync.elastic_training.plan_book.write_json", lambda *_: None)
    measured, profile = [], None
    model, batch = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4)
    own = detect_class(torch.device("cpu"))
    keys = []
    monkeypatch.setattr(
        "qsync.elastic_training.plan_book.read_json", lambda path: keys.append(path.name) or {}
    )
    monkeypatch.setattr("qsync.elastic_training.plan_book.CardCosts.to_json", lambda self: {})

    def loss_fn(model, batch):
        return model(batch).sum()

    def costs(maker=torch.optim.AdamW, loss_fn=loss_fn, own=own, **options):
        class_costs(model, batch, JobOptions(loss_fn=loss_fn, cache_dir=tmp_path, **options), own, maker)

    for precisions in (["fp32"], None, ["fp32"]):
        costs(precisions=precisions)
    assert keys[0] == keys[2] != keys[1]
    for loss in (loss_fn, lambda model, batch: model(batch).square().sum()):
        for momentum in (0.0, 0.9):
            costs(maker_of(torch.optim.SGD(model.parameters(), momentum=momentum)), loss)
    model[0].bias.requires_grad_(False)
    costs()
    assert len(set(keys)) == 7
    assert list(measured[0]) == ["fp32"] and len(measured[1]) > 1
    with pytest.raises(FormatError, match="zz"):
        costs(precisions=["zz"])
    lacking = replace(own, precisions=(qsync.Precision.FP32,))
    with pytest.raises(UnsupportedError, match="does not support int8"):
        costs(own=lacking, precisions=["int8"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_class_is_profiled_with_the_optimizer_s_own_defaults(kind):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = kind(parameters, lr=0.25, weight_decay=0.5)
    made = maker_of(optimizer)([torch.nn.Parameter(torch.ones(3))])
    assert type(made) is kind and made.defaults == optimizer.defaults


CARD = """
import sys, time, torch, qsync
torch.set_num_threads(1)
class Slow:  # a thread that comes back from torchft while Python ends would abort the process
    def __del__(self, sleep=time.sleep):
        sleep(2)
slow = Slow()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = qsync.elastic(model, optimizer, [torch.ones(4)] * 32, batch_size=4, plan=False, lighthouse=sys.argv[1],
                    timeout_s=2, start_with=1)
for step in job.steps():
    optimizer.zero_grad()
    for batch in step:
        job.model(batch).square().mean().backward()
    if step.arrived():
        optimizer.step()
        print(job.step, flush=True)
"""


@pytest.mark.dist
def test_an_interrupted_card_ends_while_no_lighthouse_answers():
    pytest.importorskip("torchft")
    with lighthouse() as address:
        card = subprocess.Popen(
            [sys.executable, "-c", CARD, address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        assert card.stdout.readline() == "1\n"
    try:
        said = card.stderr.readline()
        while "waiting for one" not in said:
            assert said, card.poll()
            said = card.stderr.readline()
        card.send_signal(signal.SIGINT)
        _, errors = card.communicate(timeout=60)
    finally:
        card.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt") and card.returncode == -signal.SIGINT
