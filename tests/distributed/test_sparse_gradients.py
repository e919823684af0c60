"""Sparse gradients of embeddings are weighed by samples and by tokens, as dense ones are."""

from __future__ import annotations

from two_ranks import launch, said

BODY = """
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ids, labels = torch.tensor([1, 2, 3, 1, 5, 6, 7, 7]), torch.arange(8) % 4

class Tagger(torch.nn.Module):
    def __init__(self, table_is_last):
        super().__init__()
        torch.manual_seed(0)
        parts = [("head", torch.nn.Linear(4, 4)), ("table", torch.nn.Embedding(10, 4, sparse=True))]
        for name, part in parts if table_is_last else parts[::-1]:  # whose bucket comes first
            self.add_module(name, part)

    def forward(self, x):
        return self.head(self.table(x))

class Table(torch.nn.Module):  # no dense gradient at all
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(10, 4, sparse=True)

    def forward(self, x):
        return self.table(x)

def mean_loss(model, low, high):
    return F.cross_entropy(model(ids[low:high]), labels[low:high])

def worst(model, alone):
    pairs = zip(model.parameters(), alone.parameters())
    return max(float((p.grad.to_dense() - q.grad.to_dense()).abs().max()) for p, q in pairs)

for name, make_model in {
    "last": lambda: Tagger(True), "first": lambda: Tagger(False), "only": Table,
}.items():
    alone = make_model().double()
    mean_loss(alone, 0, 8).backward()
    low, high = ((0, 3), (3, 8))[rank]
    shares = DDP(make_model().double())
    qsync.weigh_gradients(shares, high - low, total=8)
    errors = []
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        shares.zero_grad()
        mean_loss(shares, low, high).backward()
        errors.append(worst(shares, alone))
    stay = all(p.grad.is_sparse for key, p in shares.named_parameters() if "table" in key)
    say(f"{name} shares: {max(errors) < 1e-12} {stay}")

    tokens = DDP(make_model().double())
    for _ in range(2):
        tokens.zero_grad()
        with tokens.no_sync():
            qsync.token_mean(tokens, mean_loss(tokens, low, low + 1), 1).backward()
        qsync.token_mean(tokens, mean_loss(tokens, low + 1, high), high - low - 1).backward()
    say(f"{name} passes: {worst(tokens, alone) < 1e-12}")

    tokens.zero_grad()  # rank 1 has no token: the mean over none is NaN
    part = mean_loss(tokens, 0, 8) if rank == 0 else tokens(ids[:1]).sum() * float("nan")
    qsync.token_mean(tokens, part, 8 * (1 - rank)).backward()
    say(f"{name} none: {worst(tokens, alone) < 1e-12}")

mixed = Tagger(True)
chain = lambda parameters: [
    torch.optim.SparseAdam([p for p in parameters if p is mixed.table.weight]),
    torch.optim.AdamW([p for p in parameters if p is not mixed.table.weight]),
]
model = qsync.hybrid(
    mixed, ids, lambda model, batch: F.cross_entropy(model(batch), labels), make_optimizer=chain,
    cache_dir=cache, precisions=["fp32"],
)
optimizers = chain(list(model.parameters()))
for _ in range(3):
    model.zero_grad()
    qsync.token_mean(model, mean_loss(model, low, high), high - low).backward()
    for optimizer in optimizers:
        optimizer.step()
say(f"hybrid: {float(torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum())}")
"""


def test_they_are_weighed(tmp_path):
    found = launch(tmp_path, BODY)
    for name in ("last", "first", "only"):
        assert said(found, f"{name} shares") == ["True True"] * 2
        assert said(found, f"{name} passes") == ["True"] * 2
        assert said(found, f"{name} none") == ["True"] * 2
    assert len(set(said(found, "hybrid"))) == 1
