"""Train a LightningModule with Lightning's Trainer, on two ranks of which one is weak.

`QSyncStrategy` stands where "ddp" stood. Ranks take shares of a batch. Checkpoints fit the plain module. Run
`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lightning_fit.py`.
"""

import os
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qsync
from qsync.integrations.lightning import QSyncStrategy


class Classifier(pl.LightningModule):  # noqa: D101
    def __init__(self) -> None:
        super().__init__()
        self.net = Sequential(Linear(64, 2048), GELU(), Linear(2048, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:  # noqa: D102
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, save, and print the plan and the held-out accuracy of what was saved."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float(), torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    loader = DataLoader(data, batch_sampler=qsync.ShareSampler(data, batch_size=128))  # of both ranks
    torch.manual_seed(0)
    share = 0.5 if os.environ.get("RANK") == "1" else None  # rank 1 emulates a weak device: half a core
    strategy = QSyncStrategy(hybrid_options={"emulated_share": share})
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, **quiet)
    trainer.fit(Classifier(), loader)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/digits.ckpt", weights_only=False)  # rank 0 writes
        saved = torch.load(f"{folder}/digits.ckpt") if trainer.is_global_zero else None
    if saved is not None:
        plan = qsync.Plan.from_json(saved["qsync_plan"])
        print("operators lowered:", {name: len(part.lowered) for name, part in plan.classes.items()})
        plain = Classifier()
        plain.load_state_dict(saved["state_dict"])
        right = plain.net(images[1500:]).argmax(1) == labels[1500:]
        print(f"held-out accuracy of the checkpoint in a plain module: {right.float().mean():.1%}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch renames what Lightning asks for
    main()
