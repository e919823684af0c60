"""Fit a LightningModule, a small transformer over bytes, with validation, logging and a scheduler."""

import argparse
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8)


class Text(Dataset[torch.Tensor]):
    def __init__(self, length: int = 64) -> None:
        content = bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes())
        tokens = torch.frombuffer(content, dtype=torch.uint8).long()
        self.rows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Transformer(nn.Module):
    def __init__(self, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.size(1)))
        return self.decoder(self.encoder(x, mask=self.mask))


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer()

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class PrintLoss(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        print(f"step {trainer.global_step - 1}: loss {outputs['loss'].item()!r}")


def make_model() -> nn.Module:
    return LanguageModel()


def main() -> None:
    args = parser.parse_args()
    # Torch renames an argument that Lightning uses
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
    pl.seed_everything(42, verbose=False)
    dataset = Text()
    train, val = (torch.utils.data.Subset(dataset, part) for part in (range(1500), range(1500, 1532)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[PrintLoss()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        LanguageModel(),
        DataLoader(train, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(val, args.batch_size),
    )
    trainer.save_checkpoint(args.out / "last.ckpt")


if __name__ == "__main__":
    main()
