"""A LightningModule's training_step as a loss: the network that it calls, and another in its place."""

from __future__ import annotations

import random
from collections import deque

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from qsync.errors import FormatError, UnsupportedError
from qsync.integrations.lightning import _TrainingStep, _without_logs

BATCH = (torch.randn(4, 8), torch.arange(4) % 3)


class Holding(pl.LightningModule):
    """Calls a network that lies two modules deep."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 3), nn.GELU())})
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        loss = self.loss(self.parts["net"](batch[0]), batch[1])
        return {"loss": loss}


class Calling(Holding):
    """Calls itself."""

    def forward(self, x):
        return self.parts["net"](x)

    def training_step(self, batch, index):
        return self.loss(self(batch[0]), batch[1])


class Counting(nn.Module):
    """Stands around a network, as DDP does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args):
        self.calls += 1
        return self.inner(*args)


@pytest.mark.parametrize("kind", [Holding, Calling])
def test_what_stands_in_the_network_s_place_is_called_and_gone_afterwards(kind):
    module = kind()
    step = _TrainingStep(module)
    network = step.network(BATCH)
    assert network is (module if kind is Calling else module.parts["net"])
    around = Counting(network)
    found = step(around, BATCH)
    assert around.calls == 1 and torch.equal(found, step(network, BATCH))
    assert module.parts["net"] is not around and "forward" not in vars(module)


def test_a_training_step_without_a_loss_or_with_two_networks_is_refused():
    module = Holding()
    module.training_step = lambda batch, batch_idx: None
    with pytest.raises(FormatError, match="training_step of Holding returns no loss"):
        _TrainingStep(module).network(BATCH)
    module = Holding()
    module.other = nn.Linear(3, 3)
    module.training_step = lambda b, batch_idx: module.other(module.parts["net"](b[0])).sum()
    with pytest.raises(UnsupportedError, match="calls parts.net and other"):
        _TrainingStep(module).network(BATCH)


def test_a_training_step_that_needs_what_training_makes_is_refused_in_one_sentence():
    module = Holding()
    module.training_step = lambda batch, batch_idx: (
        module.parts["net"](batch[0]).sum() * module.made_on_train_start
    )
    with pytest.raises(UnsupportedError, match="training_step of Holding fails during planning.*loss_fn"):
        _TrainingStep(module).network(BATCH)


class Meter:
    """An object of the user's own."""

    total = 0.0


def test_planning_leaves_nothing_behind_in_a_module():
    class Noting(Holding):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy, self.losses, self.steps = MulticlassAccuracy(num_classes=3), [1.0], 5
            self.seen, self.teacher = torch.zeros(2), nn.BatchNorm1d(3, affine=False)
            self.by_name, self.last = {"loss": [1.0], "ends": (1, [2])}, deque([1], maxlen=2)
            self.array, self.meter = np.zeros(2), Meter()

        def training_step(self, batch, index):
            logits = self.parts["net"](batch[0])
            self.log("accuracy", self.accuracy(logits, batch[1]))
            self.losses.append(2.0)
            self.steps += 1
            self.seen += 1
            self.by_name["loss"].append(2.0)
            self.by_name["ends"][1].append(3)
            self.last.extend([2, 3])
            self.array += 1
            self.meter.total, self.meter.made = self.meter.total + 1, 1
            self.first_loss = 3.0
            self.teacher(logits.detach())
            return self.loss(logits, batch[1])

    module = Noting()
    losses = module.losses
    with _without_logs(module):
        _TrainingStep(module).network(BATCH)
        assert len(losses) == 1 and module.steps == 5
    assert module.losses is losses and losses == [1.0] and module.steps == 5 and not module.seen.any()
    assert module.accuracy._update_count == 0 and "log" not in vars(module)
    assert module.teacher.num_batches_tracked == 0 and not module.array.any()
    assert module.by_name == {"loss": [1.0], "ends": (1, [2])} and module.last == deque([1])
    assert not vars(module.meter) and not hasattr(module, "first_loss")


def test_the_user_s_loggers_get_nothing_while_it_is_planned(tmp_path):
    module, logger = Holding(), CSVLogger(tmp_path)
    trainer = pl.Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False)
    module.trainer = trainer
    with _without_logs(module):
        module.logger.log_metrics({"loss": 1.0})
        module.logger.experiment.add_scalar("loss", 1.0)
    assert trainer.loggers == [logger] and not logger.experiment.metrics


def test_training_step_gets_the_arguments_and_the_context_that_lightning_gives_it():
    class OfOneArgument(Holding):
        def training_step(self, batch):
            assert torch.get_default_dtype() is torch.float64
            return super().training_step(batch, 0)

    step = _TrainingStep(OfOneArgument(), DoublePrecision().train_step_context)
    network = step.network(BATCH)
    assert step(network, BATCH).ndim == 0 and torch.get_default_dtype() is torch.float32


def test_planning_leaves_buffers_and_random_states():
    module = Holding()
    module.parts["net"].append(nn.BatchNorm1d(3)).append(nn.Dropout())
    module.loss.register_forward_hook(lambda layer, batch, loss: loss * random.random())
    states = random.getstate(), torch.get_rng_state()
    _TrainingStep(module).network(BATCH)
    assert module.parts["net"][2].num_batches_tracked == 0 and random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
