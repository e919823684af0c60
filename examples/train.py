"""Train a classifier of scikit-learn's digits on every rank of a job, under a plan that qsync makes.

torchrun --nproc-per-node 2 examples/train.py     two ranks
python examples/train.py                          one rank, without a job
"""

from __future__ import annotations

import os

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import qsync

STEPS, BATCH = 200, 64


def main() -> None:
    """Train, and print the loss and the accuracy on digits that were held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float(), torch.tensor(digits.target)
    training, held_out = slice(0, 1500), slice(1500, None)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    example = (images[:BATCH], labels[:BATCH])
    model = qsync.hybrid(model, example, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))

    torch.manual_seed(int(os.environ.get("RANK", "0")))  # every rank draws batches of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for chosen in torch.randint(len(images[training]), (STEPS, BATCH)):
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()

    with torch.no_grad():
        scores = model(images[held_out])
    right = (scores.argmax(1) == labels[held_out]).float().mean()
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out loss {cross_entropy(scores, labels[held_out]):.3f}, accuracy {right:.1%}")


if __name__ == "__main__":
    main()
