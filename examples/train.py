"""Train a classifier of scikit-learn's digits on every rank of a job, under a plan that qsync makes.

torchrun --nproc-per-node 2 examples/train.py     two ranks
python examples/train.py                          one rank, without a job
"""

from __future__ import annotations

import os

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qsync

EPOCHS, BATCH = 15, 128  # samples of a step, on all ranks together


def loss_of(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over a batch of images and labels."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def main() -> None:
    """Train, and print the loss and the accuracy on digits that were held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float(), torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = qsync.ShareSampler(data, batch_size=BATCH)
    loader = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    model = qsync.hybrid(model, loader=loader, loss_fn=loss_of)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            for part in qsync.micro_batches(model, batch):
                loss_of(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        scores = model(images[1500:])
    right = (scores.argmax(1) == labels[1500:]).float().mean()
    if os.environ.get("RANK", "0") == "0":
        print(f"held-out loss {cross_entropy(scores, labels[1500:]):.3f}, accuracy {right:.1%}")


if __name__ == "__main__":
    main()
