"""Shard a model with FSDP2, on two ranks of which one is weak and takes a smaller share of the batch.

`qsync.hybrid(..., ddp=False)` plans the model and does not wrap it. torch's `fully_shard` then shards each
block and the model. Run it with `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/fsdp2.py`.
"""

import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, LayerNorm, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qsync

EPOCHS, BATCH = 7, 256


class Block(Sequential):  # noqa: D101
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x + super().forward(x)


def main() -> None:
    """Train, and compare the sharded model on held-out digits with a plain one that has its weights."""
    dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    blocks = [Block(LayerNorm(256), Linear(256, 1024), GELU(), Linear(1024, 256)) for _ in range(2)]
    model = Sequential(Linear(64, 256), *blocks, Linear(256, 10))
    plain = copy.deepcopy(model)
    options = {"ddp": False, "emulated_share": 0.5 if dist.get_rank() == 1 else None}  # half a core
    data = TensorDataset(images[:1500], labels[:1500])
    loader = DataLoader(data, batch_sampler=qsync.ShareSampler(data, batch_size=BATCH))  # of all ranks
    loss_fn = lambda m, batch: cross_entropy(m(batch[0]), batch[1])  # noqa: E731
    model = qsync.hybrid(model, loader=loader, loss_fn=loss_fn, **options)
    for part in (model[1], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # its state is sharded, too
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()  # averaged over all ranks' samples
            optimizer.step()

    plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    with torch.no_grad():
        loss, plain_loss = (cross_entropy(m(images[1500:]), labels[1500:]) for m in (model, plain))
    if dist.get_rank() == 0:
        print(f"held-out loss {loss:.3f}, {plain_loss:.3f} in a plain model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
