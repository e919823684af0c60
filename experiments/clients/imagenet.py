"""Train a small ResNet on images of digits, with a validation, checkpoints and `--resume`."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--resume", type=Path, help="a checkpoint to resume from")
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("-j", "--workers", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=1e-4)


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 32, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.layer3 = BasicBlock(2 * width, 4 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def make_model() -> nn.Module:
    return ResNet()


def validate(loader: DataLoader[Any], model: nn.Module) -> float:
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, target in loader:
            right += torch.tensor([(model(images).argmax(1) == target).sum(), len(target)])
    dist.all_reduce(right)
    model.train()
    return float(right[0] / right[1])


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    pixels, labels = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, size=32).repeat(1, 3, 1, 1)
    dataset = TensorDataset(images, torch.tensor(labels))
    train_set, val_set = (torch.utils.data.Subset(dataset, part) for part in (range(1600), range(1600, 1797)))

    model = DistributedDataParallel(make_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    step = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        step = checkpoint["step"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint (step {step})")

    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    val_loader = DataLoader(val_set, args.batch_size, sampler=DistributedSampler(val_set))
    epoch = 0
    while step < args.steps:
        epoch += 1
        sampler.set_epoch(1000 * step + epoch)
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item()!r}")
            step += 1
            if step == args.steps:
                break
        scheduler.step()

    print(f"accuracy {validate(val_loader, model)!r}")
    if rank == 0:
        state = {
            "step": step, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }  # fmt: skip
        torch.save(state, args.out / "checkpoint.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
