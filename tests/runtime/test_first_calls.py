"""Models that their first call sets up: what runs in later calls is planned, and training begins anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.hybrid_training import job_plan


class Codebook(nn.Module):
    """A codebook that begins with the first batch, then an average; `flag` tells which call is first."""

    def __init__(self, flag):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("codes", torch.zeros(8, 32))
        self.register_buffer("is_set", torch.tensor(False))
        self.flag, self.was_called = flag, False

    def forward(self, x):
        z = self.enter(x)
        with torch.no_grad():
            if not (self.is_set.item() if self.flag == "buffer" else self.was_called):
                self.codes.copy_(z[torch.randperm(len(z))[:8]])
                self.is_set.fill_(True)
                self.was_called = True
            nearest = torch.cdist(z, self.codes).argmin(1)
            ones = F.one_hot(nearest, 8).float()
            self.codes.lerp_(ones.t() @ z / ones.sum(0)[:, None].clamp_min(1), 0.01)
        return self.leave(z + (F.embedding(nearest, self.codes) - z).detach())


class Normalized(nn.Module):
    """ActNorm: weights that the first batch gives."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 16)
        self.place, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x):
        y = self.enter(x)
        if self.is_set.item() == 0:
            self.place.data.copy_(-y.detach().mean(0))
            self.scale.data.copy_(1 / y.detach().std(0))
            self.is_set.fill_(1)
        return self.leave((y + self.place) * self.scale)


class Masked(nn.Module):
    """Attention whose mask is built at the first call."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.mask = nn.Linear(16, 16), nn.Linear(16, 16), None

    def forward(self, x):
        x = x.view(4, -1, 16)
        if self.mask is None:
            self.mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
        return (self.query(x) @ self.key(x).transpose(1, 2) + self.mask).softmax(-1) @ x


def losses(model, x):
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


MAKES = {
    "a buffer's flag": lambda: Codebook("buffer"), "an attribute's flag": lambda: Codebook("attribute"),
    "weights": Normalized, "a mask": Masked,
}  # fmt: skip


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_model_that_the_first_batch_sets_up_trains_as_without_a_plan(make, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.1")
    monkeypatch.setattr(job_plan, "cache_folder", lambda chosen: tmp_path)
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model, x = make(), torch.randn(32, 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = qsync.hybrid(
        model, x, lambda model, x: model(x).square().mean(), base="fp32", precisions=["fp32"]
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert losses(model, x) == losses(plain, x)
    assert "never profiled" not in capsys.readouterr().err
