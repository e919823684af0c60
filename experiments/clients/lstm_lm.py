"""Train an LSTM language model with detached state carried between batches, and manual updates."""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=32)
parser.add_argument("--emsize", type=int, default=192)
parser.add_argument("--nhid", type=int, default=192)
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--clip", type=float, default=0.25)

State = tuple[torch.Tensor, torch.Tensor]


class RNNModel(nn.Module):
    def __init__(self, ntoken: int, ninp: int, nhid: int, nlayers: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: torch.Tensor, hidden: State) -> tuple[torch.Tensor, State]:
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output))
        return torch.log_softmax(decoded.view(-1, decoded.size(-1)), dim=1), hidden

    def init_hidden(self, bsz: int) -> State:
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def make_model() -> nn.Module:
    args = parser.parse_args([])
    return RNNModel(256, args.emsize, args.nhid, 2)


def repackage_hidden(hidden: State) -> State:
    return hidden[0].detach(), hidden[1].detach()


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1111)
    text = bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes())
    data = torch.frombuffer(text, dtype=torch.uint8).long()
    columns = args.batch_size * world
    data = data[: len(data) // columns * columns].view(columns, -1).t().contiguous()
    data = data[:, rank * args.batch_size : (rank + 1) * args.batch_size]

    def get_batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return data[i : i + args.bptt], data[i + 1 : i + 1 + args.bptt].reshape(-1)

    model: Any = RNNModel(256, args.emsize, args.nhid, 2)
    criterion = nn.NLLLoss()
    hidden = model.init_hidden(args.batch_size)
    model = DDP(model)
    model.train()
    for step in range(args.steps):
        input, targets = get_batch(step * args.bptt)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(input, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-args.lr)
        print(f"step {step}: loss {loss.item()!r}")

    model.eval()
    with torch.no_grad():
        output, _ = model(get_batch(0)[0], model.module.init_hidden(args.batch_size))
        print(f"test loss {criterion(output, get_batch(0)[1]).item()!r}")
    if rank == 0:
        torch.save(model.module.state_dict(), args.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
