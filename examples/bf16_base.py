"""Train in BF16 as torch.autocast does, with weak ranks lowered further to INT8 where they would be late.

torchrun --nproc-per-node 2 examples/bf16_base.py     two ranks
python examples/bf16_base.py                          one rank, without a job
"""

from __future__ import annotations

import os

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import qsync

STEPS, BATCH = 100, 64


def main() -> None:
    """Train inside torch.autocast, and print the accuracy on digits that were held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float(), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    example = (images[:BATCH], labels[:BATCH])

    # Inside a torch.autocast its type is the base; outside, base="bf16" says the same.
    with torch.autocast("cpu", torch.bfloat16):
        model = qsync.hybrid(model, example, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))

    torch.manual_seed(int(os.environ.get("RANK", "0")))  # every rank draws batches of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for chosen in torch.randint(1500, (STEPS, BATCH)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):  # a loop may keep its autocast, or drop it
            loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out accuracy in BF16: {right:.1%}")


if __name__ == "__main__":
    main()
