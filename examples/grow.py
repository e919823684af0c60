"""Train a tiny GPT, grow it without changing its function, and train the larger model on.

The task is counting: a row of tokens is 7, 10, 13 ... modulo 64, with its own start and step.
Run it with `python examples/grow.py`: a few seconds on one CPU thread, no download.
"""

import torch
from torch.nn.functional import cross_entropy

import qsync
from qsync.experiments.workloads.gpt import Gpt

torch.manual_seed(0)
VOCAB, LENGTH = 64, 16


def batch(rows: int = 32) -> torch.Tensor:
    """Return tokens (rows, LENGTH + 1): arithmetic progressions."""
    start, step = torch.randint(VOCAB, (rows, 1)), torch.randint(1, 8, (rows, 1))
    return (start + step * torch.arange(LENGTH + 1)) % VOCAB


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each next token."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take some optimizer steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        optimizer.step()


# 1. A small model, trained as usual.
test = batch(256)
small = Gpt(num_layers=2, width=32, num_heads=2, context=LENGTH, vocab=VOCAB)
optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
print(f"small model, untrained:       loss {loss_of(small, test):.3f}")
train(small, optimizer, 150)
print(f"small model, 150 steps:       loss {loss_of(small, test):.3f}")

# 2. The plan of its growth: 1.5 times the width, one more block. split="scalar" keeps Adam's state usable.
recipe = qsync.recipe_of(small).to(width=48, layers=3)
plan = qsync.plan_expansion(small, recipe, split="scalar")
print(f"\n{plan}\n")

# 3. The grown model computes the same function, and so has the same loss.
big = plan.expand(small)
print(qsync.verify_expansion(small, big, test[:, :-1]))
print(f"grown model, before training: loss {loss_of(big, test):.3f}")

# 4. It trains on, with the optimizer's moments grown as the weights were.
grown = torch.optim.AdamW(big.parameters(), lr=3e-3)
grown.load_state_dict(qsync.expand_optimizer(plan, optimizer, small, big).state_dict)
train(big, grown, 150)
print(f"grown model, 150 more steps:  loss {loss_of(big, test):.3f}")
