"""What planning runs leaves no trace in the objects that a training loop keeps its numbers in."""

from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from qsync.integrations.remembered_state import unchanged


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0


class Rows(Dataset):
    def __init__(self):
        self.rows = [0]


class Owner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.norm = torch.nn.BatchNorm1d(2)
        self.steps, self.nested, self.best = 5, {"train": [1.0], "ends": (1, [2])}, (0, 1)
        self.by_name, self.last, self.words = defaultdict(list), deque([1], maxlen=2), Counter(a=2)
        self.array, self.average, self.meter, self.rows = np.zeros(2), torch.zeros(2), Meter(), Rows()
        self.itself = [1]
        self.itself.append(self.itself)

    def step(self):
        self.center += 1
        self.norm(torch.ones(4, 2))
        self.nested["train"].append(2.0)
        self.nested["ends"][1].append(3)
        self.by_name["loss"].append(1.0)
        self.last.extend([2, 3])
        self.words["b"] += 1
        self.array += 1
        self.average.add_(1)
        self.meter.total, self.meter.count = self.meter.total + 1, 1
        self.meter.made = 1
        self.best, self.steps, self.first_loss = (1, 2), self.steps + 1, 3.0
        self.rows.rows.append(1)
        self.itself[0] = 2


def test_all_that_a_step_may_change_is_as_before_and_keeps_its_identity():
    owner = Owner()
    held = [owner.nested["train"], owner.last, owner.array, owner.average, owner.center, owner.meter]
    with unchanged(owner.modules()):
        owner.step()
        owner.center = torch.ones(2)
        assert owner.steps == 6 and owner.nested["train"] == [1.0, 2.0]
    assert owner.nested == {"train": [1.0], "ends": (1, [2])} and owner.best == (0, 1) and owner.steps == 5
    assert owner.by_name == {} and owner.last == deque([1]) and owner.last.maxlen == 2
    assert owner.words == {"a": 2} and not owner.array.any() and not owner.average.any()
    assert (
        not owner.center.any() and owner.norm.num_batches_tracked == 0 and not owner.norm.running_mean.any()
    )
    assert vars(owner.meter) == {"total": 0.0, "count": 0} and not hasattr(owner, "first_loss")
    assert owner.itself[0] == 1 and owner.itself[1] is owner.itself
    now = [owner.nested["train"], owner.last, owner.array, owner.average, owner.center, owner.meter]
    assert all(before is after for before, after in zip(held, now, strict=True))
    assert owner.rows.rows == [0, 1]  # a data set is not looked at


def test_it_is_as_before_after_an_error_too():
    owner = Owner()
    with pytest.raises(ValueError, match="inside"), unchanged([owner]):
        owner.step()
        raise ValueError("inside")
    assert owner.steps == 5 and not owner.center.any()


def test_what_nothing_can_write_to_stays_as_it_is():
    owner = torch.nn.Module()
    owner.mask, owner.table = torch.ones(1).expand(4), np.broadcast_to(np.zeros(1), 4)
    owner.register_buffer("positions", torch.zeros(1).expand(3, 2))
    held = [owner.mask, owner.table, owner.positions]
    with unchanged([owner]):
        owner.mask = None
    assert all(before is after for before, after in zip(
        held, [owner.mask, owner.table, owner.positions], strict=True
    ))  # fmt: skip


def test_what_is_left_out_stays_as_it_is():
    owner = Owner()
    with unchanged([owner], leave_out=("nested",)):
        owner.step()
    assert owner.nested["train"] == [1.0, 2.0] and owner.steps == 5
