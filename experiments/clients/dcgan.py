"""Train a DCGAN on images of digits: two networks, two optimizers, three passes of the discriminator."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--nz", type=int, default=32)
parser.add_argument("--ngf", type=int, default=32)
parser.add_argument("--ndf", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-4)


def weights_init(module: nn.Module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)  # type: ignore[arg-type]
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]


class Generator(nn.Module):
    def __init__(self, nz: int, ngf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 4), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.main(input).view(-1)


def make_model() -> nn.Module:
    args = parser.parse_args([])
    return nn.ModuleDict({"G": Generator(args.nz, args.ngf), "D": Discriminator(args.ndf)})


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(999)
    digits = torch.tensor(load_digits().data).float().view(-1, 1, 8, 8) / 8 - 1
    images = nn.functional.interpolate(digits, size=32)
    netG: Any = Generator(args.nz, args.ngf)
    netG.apply(weights_init)
    netD: Any = Discriminator(args.ndf)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(args.batch_size, args.nz, 1, 1)
    real_labels, fake_labels = torch.ones(args.batch_size), torch.zeros(args.batch_size)

    netG, netD = DDP(netG), DDP(netD)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    torch.manual_seed(rank)

    for step in range(args.steps):
        # D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = images[torch.randint(len(images), (args.batch_size,))]
        errD_real = criterion(netD(real), real_labels)
        errD_real.backward()
        noise = torch.randn(args.batch_size, args.nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), fake_labels)
        errD_fake.backward()
        optimizerD.step()
        # G: maximize log(D(G(z)))
        netG.zero_grad()
        errG = criterion(netD(fake), real_labels)
        errG.backward()
        optimizerG.step()
        print(f"step {step}: loss {errD_real.item() + errD_fake.item()!r} {errG.item()!r}")

    with torch.no_grad():
        print(f"pixel {netG(fixed_noise).mean().item()!r}")
    if rank == 0:
        states = {"G": netG.module.state_dict(), "D": netD.module.state_dict()}
        torch.save(
            {f"{net}.{key}": v for net, s in states.items() for key, v in s.items()}, args.out / "net.pth"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
