"""Train with cards that come and go. Start a lighthouse, then this on every card, at any time.

qsync lighthouse
QSYNC_LIGHTHOUSE=127.0.0.1:29510 python examples/elastic.py
QSYNC_LIGHTHOUSE=127.0.0.1:29510 python examples/elastic.py     # another card; stop either with Ctrl-C
"""

import logging

import torch
import torch.nn.functional as F

import qsync


class Digits(torch.utils.data.Dataset):
    """512 random rows, and which of their first ten numbers is the largest."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return row, row[:10].argmax()


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    rows, labels = batch
    return F.cross_entropy(model(rows), labels)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    job = qsync.elastic(model, optimizer, Digits(), batch_size=64, loss_fn=loss_fn)
    for step in job.steps(epochs=20):
        optimizer.zero_grad()
        for batch in step:
            loss = loss_fn(job.model, batch)
            loss.backward()
        if step.arrived():
            optimizer.step()
        if step.number % 40 == 0:
            print(f"step {step.number}: loss {loss.item():.3f} on {len(job.cards)} cards")
