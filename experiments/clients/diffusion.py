"""Train a U-Net to predict the noise in images of digits, with a moving average of its weights."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--timesteps", type=int, default=100)
parser.add_argument("--lr", type=float, default=2e-4)


def timestep_embedding(t: torch.Tensor, dim: int) -> torch.Tensor:
    frequencies = torch.exp(-torch.arange(dim // 2, device=t.device) * 9.2 / (dim // 2))
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, ch: int, out_ch: int, temb_ch: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, ch), nn.GroupNorm(8, out_ch)
        self.conv1 = nn.Conv2d(ch, out_ch, 3, padding=1)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.temb = nn.Linear(temb_ch, out_ch)
        self.skip = nn.Conv2d(ch, out_ch, 1) if ch != out_ch else nn.Identity()

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.temb(temb)[:, :, None, None]
        return self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training)) + self.skip(x)


class AttnBlock(nn.Module):
    def __init__(self, ch: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, ch)
        self.qkv, self.proj = nn.Conv2d(ch, 3 * ch, 1), nn.Conv2d(ch, ch, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).transpose(2, 3).unbind(1)
        weights = torch.softmax(q @ k.transpose(1, 2) * c**-0.5, dim=-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, ch: int = 32) -> None:
        super().__init__()
        self.ch, temb = ch, 4 * ch
        self.time = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb), nn.SiLU())
        self.head = nn.Conv2d(1, ch, 3, padding=1)
        self.down1, self.pool = ResBlock(ch, ch, temb), nn.Conv2d(ch, ch, 3, 2, 1)
        self.down2 = ResBlock(ch, 2 * ch, temb)
        self.mid1, self.attn = ResBlock(2 * ch, 2 * ch, temb), AttnBlock(2 * ch)
        self.up2, self.up1 = ResBlock(4 * ch, ch, temb), ResBlock(2 * ch, ch, temb)
        self.tail = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        temb = self.time(timestep_embedding(t, self.ch))
        h1 = self.down1(self.head(x), temb)
        h2 = self.down2(self.pool(h1), temb)
        h = self.attn(self.mid1(h2, temb))
        h = self.up2(torch.cat([h, h2], dim=1), temb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.tail(self.up1(torch.cat([h, h1], dim=1), temb))


def make_model() -> nn.Module:
    return UNet()


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().data).float().view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(digits, size=16)
    alphas_bar = torch.linspace(1e-4, 0.02 * 1000 / args.timesteps, args.timesteps).neg().add(1).cumprod(0)

    model = DDP(make_model())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(int(os.environ["RANK"]))

    for step in range(args.steps):
        x0 = images[torch.randint(len(images), (args.batch_size,))]
        t = torch.randint(args.timesteps, (args.batch_size,))
        noise = torch.randn_like(x0)
        a = alphas_bar[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model.module)
        print(f"step {step}: loss {loss.item()!r}")

    ema.eval()
    with torch.no_grad():  # one step of denoising, by the moving average
        print(f"denoised {ema(images[:4], torch.full((4,), 50)).abs().mean().item()!r}")
    if rank == 0:
        state = {"model": model.module.state_dict(), "ema": ema.module.state_dict()}
        torch.save({**state, "opt": optimizer.state_dict()}, args.out / "0000020.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
