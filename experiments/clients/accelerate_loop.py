"""Train a classifier of lines in an Accelerate loop, with accumulation, clipping and a scheduler."""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)


class Classifier(nn.Module):
    def __init__(self, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids) + self.position).mean(1))


def make_model() -> nn.Module:
    return Classifier()


def rows(length: int = 64) -> TensorDataset:
    folder, names = Path(sysconfig.get_path("stdlib")), ("typing.py", "argparse.py", "difflib.py")
    files = [torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8) for name in names]
    parts = [file[: len(file) // length * length].view(-1, length).long() for file in files]
    labels = [torch.full((len(part),), label) for label, part in enumerate(parts)]
    return TensorDataset(torch.cat(parts), torch.cat(labels))


def main() -> None:
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    dataset = rows()
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=args.batch_size, drop_last=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    step, total = 0, 0.0
    while step < args.steps:
        model.train()
        for ids, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(ids), labels)
                total += loss.detach().item() / 2
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                print(f"step {step}: loss {total!r}")
                step, total = step + 1, 0.0
            if step == args.steps:
                break

    model.eval()
    with torch.no_grad():
        predictions = model(dataset.tensors[0][:64]).argmax(dim=-1)
    print(f"of three: {accelerator.gather_for_metrics(predictions).float().mean().item()!r}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.out / "model.bin")
    accelerator.end_training()


if __name__ == "__main__":
    main()
