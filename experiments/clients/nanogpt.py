"""Train a byte-level GPT: gradient accumulation, warm-up and cosine, clipping, tied weights, dropout."""

import argparse
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--n-layer", type=int, default=2)
parser.add_argument("--n-embd", type=int, default=128)
parser.add_argument("--block-size", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning-rate", type=float, default=1e-3)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in parts)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return F.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)), rate, self.training)


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.block_size = args.block_size
        self.wte = nn.Embedding(256, args.n_embd)
        self.wpe = nn.Embedding(args.block_size, args.n_embd)
        self.h = nn.ModuleList(Block(args.n_embd, 4, args.dropout) for _ in range(args.n_layer))
        self.ln_f = nn.LayerNorm(args.n_embd, bias=False)
        self.lm_head = nn.Linear(args.n_embd, 256, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 256), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.block_size :])
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits[:, -1, :], dim=-1), 1)), dim=1)
        return idx


def make_model() -> nn.Module:
    return GPT(parser.parse_args([]))


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    master_process = rank == 0
    torch.manual_seed(1337)
    model: Any = GPT(args)
    torch.manual_seed(1337 + rank)
    text = bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes())
    data = torch.frombuffer(text, dtype=torch.uint8).long()

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - args.block_size, (args.batch_size,))
        x = torch.stack([data[i : i + args.block_size] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
        return x, y

    X, Y = get_batch()  # the very first batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    model = DDP(model)
    raw_model = model.module

    def get_lr(step: int) -> float:
        if step < 5:
            return float(args.learning_rate * (step + 1) / 5)
        return float(args.learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / 100)))

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        total = 0.0
        for micro_step in range(args.accumulation):
            model.require_backward_grad_sync = micro_step == args.accumulation - 1
            _, loss = model(X, Y)
            loss = loss / args.accumulation
            X, Y = get_batch()  # prefetch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {total!r}")

    if master_process:
        model.eval()
        print("sample:", bytes(raw_model.generate(data[None, :8], 4)[0].tolist()))
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": args.steps,
        }
        torch.save(checkpoint, args.out / "ckpt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
