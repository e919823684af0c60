"""The batch that a Trainer is planned on: as training gets it, and what was drawn for it is put back."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from qsync.integrations.lightning import QSyncStrategy
from qsync.integrations.transformers import QSyncTrainer

# Lightning 2.6 asks torch's trees for their leaves as torch no longer does.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")


class Augmented(Dataset):
    """Rows that are drawn from all random states."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "x": torch.randn(8) + random.random() + float(np.random.rand()),
            "labels": torch.tensor(index),
        }


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, x, labels):
        return {"loss": self.net(x).square().mean()}


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def lightning_s_batch(loader, module=None, **options):
    module, strategy = module or Network(), QSyncStrategy()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False, **options
    )
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    strategy.connect(module)
    before = states()
    return strategy._example_batch(module, strategy._loaders(module)), before


def trainer_s_batch(folder):
    options = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 4}
    arguments = transformers.TrainingArguments(folder, **options)
    trainer = QSyncTrainer(model=Network(), args=arguments, train_dataset=Augmented())
    trainer._loader = trainer.get_train_dataloader()
    before = states()
    return trainer._example_batch(), before


def test_random_states_are_as_before(tmp_path):
    batch, before = lightning_s_batch(DataLoader(Augmented(), batch_size=4, shuffle=True))
    assert batch["x"].shape == (4, 8) and states() == before
    batch, before = trainer_s_batch(tmp_path)
    assert batch["x"].shape == (4, 8) and states() == before


@pytest.mark.parametrize("is_inside", [False, True], ids=["the loader's", "a batch sampler's"])
def test_a_loader_s_own_generator_is_as_before(is_inside):
    generator = torch.Generator().manual_seed(3)
    before, rows = generator.get_state(), Augmented()
    if is_inside:
        batches = BatchSampler(RandomSampler(rows, generator=generator), 4, False)
        loader = DataLoader(rows, batch_sampler=batches)
    else:
        loader = DataLoader(rows, batch_size=4, shuffle=True, generator=generator)
    lightning_s_batch([loader])
    assert torch.equal(generator.get_state(), before)


def test_a_batch_comes_in_the_type_and_form_that_training_gets():
    class Halving(Network):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {**batch, "x": batch["x"][:2]}

    batch, _ = lightning_s_batch(DataLoader(Augmented(), batch_size=4), Halving(), precision="bf16-true")
    assert batch["x"].shape == (2, 8) and batch["x"].dtype is torch.bfloat16
    assert batch["labels"].dtype is torch.int64
