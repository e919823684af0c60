"""Cases of Lightning's Trainer on planned models."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from qsync.experiments.integrations.cases import (
    OTHER_PLAN,
    Arm,
    Net,
    Outcome,
    batch,
    case,
    cases,
    facts,
    loss_of,
    net,
    norm,
    rows,
    same_state,
)
from qsync.integrations.lightning import QSyncStrategy

_GROUP = "Lightning"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    """A LightningModule with a forward of its own."""

    def __init__(self, kind: type[Net] = Net) -> None:
        super().__init__()
        self.net, self.loss = kind(), nn.CrossEntropyLoss()
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        """Return logits."""
        return self.net(x)

    def training_step(self, one: Any, index: int) -> Any:
        """Return the loss of a batch."""
        loss = self.loss(self(one[0]), one[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, one: Any, index: int) -> None:
        """Log the loss of a batch."""
        self.log("validation", self.loss(self(one[0]), one[1]), sync_dist=True)

    def test_step(self, one: Any, index: int) -> None:
        """Log the loss of a batch."""
        self.log("test", self.loss(self(one[0]), one[1]), sync_dist=True)

    def predict_step(self, one: Any, index: int) -> Any:
        """Return logits of a batch."""
        return self(one[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Record the gradient norm."""
        self.norms.append(norm(self))


class Submodule(Classifier):
    """A LightningModule that calls its network, not itself."""

    def training_step(self, one: Any, index: int) -> Any:
        """Return the loss of a batch."""
        return {"loss": self.loss(self.net(one[0]), one[1])}


class TwoNetworks(Classifier):
    """A LightningModule that calls two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def training_step(self, one: Any, index: int) -> Any:
        """Return the loss of a batch."""
        return self.loss(self.other(self.net(one[0])), one[1])


class Resting(Classifier):
    """A LightningModule with a part that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32).eval()

    def forward(self, x: torch.Tensor) -> Any:
        """Return logits."""
        return self.net(self.norm(2 * x + 1))


class Manual(Classifier):
    """A LightningModule that steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, one: Any, index: int) -> None:
        """Run a training step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self(one[0]), one[1]))
        optimizer.step()


def trainer(arm: Arm, options: Any = None, ddp: Any = None, **given: Any) -> pl.Trainer:
    """Return a Trainer with Lightning's DDP, or qsync's strategy."""
    strategy: DDPStrategy = DDPStrategy(gradient_as_bucket_view=True, **(ddp or {}))
    if not arm.is_plain:
        strategy = QSyncStrategy(hybrid_options={**arm.options, **(options or {})}, **(ddp or {}))
    settings = {"max_steps": 3, "logger": False, "enable_checkpointing": False, **given}
    return pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def _outcome(arm: Arm, kind: Any = Classifier, **given: Any) -> Outcome:
    module = net(kind)
    trainer(arm, **given).fit(module, DataLoader(rows(), 4))
    return Outcome(module.norms, module)


cases(_GROUP, _outcome, {
    "`self.net(x)` in training_step": {"kind": Submodule, "accumulate_grad_batches": 2, "tested": True},
    "a part in evaluation mode": {"kind": Resting},
    "manual optimization without it": {
        "kind": Manual, "refused": "manual optimization returns no loss for profiling",
    },
    "two networks in training_step": {
        "kind": TwoNetworks, "refused": "calls net and other; call one network",
    },
})  # fmt: skip


@case(_GROUP, "validation before and during training, `test`, `predict`")
def _(arm: Arm) -> Outcome:
    module, loader = net(Classifier), DataLoader(rows(), 4)
    made = trainer(arm, val_check_interval=2)
    made.fit(module, loader, DataLoader(rows(), 4))
    validation = float(made.callback_metrics["validation"])
    test = made.test(module, DataLoader(rows(), 4), verbose=False)[0]["test"]
    predicted = made.predict(module, DataLoader(rows(), 4))
    return Outcome(module.norms, module, [validation, test, *facts(all=len(predicted or ()) == 8)])


def _resumed(
    arm: Arm, then: Arm, first: Any, more: Any, options: Any = None
) -> tuple[Classifier, Classifier]:
    """Train in one arm, save, and continue in another; return both modules."""
    loader, (module, again) = DataLoader(rows(), 4), (net(Classifier), net(Classifier))
    path = arm.folder / "made.ckpt"
    made = trainer(arm, **first)
    made.fit(module, loader)
    made.save_checkpoint(path)
    trainer(then, options, **more).fit(again, loader, ckpt_path=str(path))
    return module, again


@case(_GROUP, "saved and resumed: bitwise the uninterrupted run")
def _(arm: Arm) -> Outcome:
    settings = {"max_steps": -1, "limit_train_batches": 2}
    whole = net(Classifier)
    trainer(arm, max_epochs=2, **settings).fit(whole, DataLoader(rows(), 4))
    part, again = _resumed(arm, arm, {"max_epochs": 1, **settings}, {"max_epochs": 2, **settings})
    same = same_state(whole.state_dict(), again.state_dict())
    return Outcome([*part.norms, *again.norms], again, facts(same=same))


@case(_GROUP, "resumed under another plan", logs="the checkpoint has another plan")
def _(arm: Arm) -> Outcome:
    module, again = _resumed(arm, arm, {"max_steps": 2}, {"max_steps": 4}, OTHER_PLAN)
    return Outcome(module.norms, again)


@case(
    _GROUP,
    "DDPStrategy around a LightningModule that holds a hybrid",
    refused="by the world size again",
)
def _(arm: Arm) -> Outcome:
    module = net(Classifier)
    if not arm.is_plain:
        module.net = arm.hybrid(module.net, batch(), loss_of)
    trainer(Arm(None, arm.folder)).fit(module, DataLoader(rows(), 4))
    return Outcome(module.norms, module)


@case(
    _GROUP,
    "other accumulation on the ranks",
    refused="accumulate_grad_batches differs between ranks",
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, accumulate_grad_batches=1 if arm.is_plain else 1 + dist.get_rank())


@case(
    _GROUP,
    "a misspelt DDP option of the strategy",
    refused="did you mean find_unused_parameters?",
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, ddp={} if arm.is_plain else {"find_unused_parameter": True})
