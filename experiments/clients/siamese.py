"""Train a Siamese network: it embeds both images of a pair, in two calls, before one backward."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--margin", type=float, default=1.0)
parser.add_argument("--lr", type=float, default=1e-3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(2304, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.normalize(self.fc2(self.dropout2(x)))


def make_model() -> nn.Module:
    return Net()


def contrastive_loss(a: torch.Tensor, b: torch.Tensor, same: torch.Tensor, margin: float) -> torch.Tensor:
    distance = F.pairwise_distance(a, b)
    return (same * distance**2 + (1 - same) * F.relu(margin - distance) ** 2).mean()


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.data).float().view(-1, 1, 8, 8) / 16, size=16)
    labels = torch.tensor(digits.target)

    def pairs(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return images[first], images[second], (labels[first] == labels[second]).float()

    def pair_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        left, right, same = batch
        return contrastive_loss(model(left), model(right), same, args.margin)

    model = DDP(make_model())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    torch.manual_seed(dist.get_rank())
    model.train()
    for step in range(args.steps):
        left, right, same = pairs(*torch.randint(len(images), (2, args.batch_size)))
        optimizer.zero_grad()
        loss = contrastive_loss(model(left), model(right), same, args.margin)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item()!r}")

    model.eval()
    with torch.no_grad():
        print(f"test loss {pair_loss(model, pairs(*torch.arange(200).view(2, 100))).item()!r}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out / "siamese_network.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
