"""The grown model's learning rate: the from-scratch curve, as high, in less time."""

from __future__ import annotations

import pytest
import torch

import qsync
from qsync.errors import CalibrationError, FormatError


def optimizer(*maxima: float) -> torch.optim.Optimizer:
    """AdamW with a parameter group for each maximum."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in maxima or (1e-3,)]
    return torch.optim.AdamW(groups)


def rates(schedule: qsync.ExpandedSchedule, steps: int) -> list[float]:
    """The learning rate that each of `steps` steps has."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def test_the_default_is_130_of_300_epochs():
    schedule = qsync.ExpandedSchedule(optimizer(), 300_000)
    assert schedule.total_steps == 130_000
    assert 1 - schedule.total_steps / 300_000 == pytest.approx(0.567, abs=5e-4)


def test_the_maximum_is_that_from_scratch_and_is_left_sooner():
    scratch = rates(qsync.ExpandedSchedule(optimizer(), 100, warm_up=10, ratio=1.0), 101)
    grown = rates(qsync.ExpandedSchedule(optimizer(), 100, warm_up=10, ratio=0.5), 51)
    assert max(scratch) == max(grown) == 1e-3
    assert scratch.index(max(scratch)) == 10 and grown.index(max(grown)) == 5
    assert grown == pytest.approx(scratch[::2])


def test_the_curve_rises_straight_and_falls_as_half_a_cosine():
    found = rates(qsync.ExpandedSchedule(optimizer(2.0), 8, warm_up=4, ratio=1.0, floor=0.1), 11)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    middle = 0.1 + 0.9 / 2
    assert found[6] == pytest.approx(2.0 * middle)
    assert found[8:] == pytest.approx([0.2, 0.2, 0.2])


def test_every_group_keeps_its_own_maximum():
    schedule = qsync.ExpandedSchedule(optimizer(1.0, 0.1), 8, ratio=0.5)
    rates(schedule, 2)
    first, second = schedule.get_last_lr()
    assert 0.0 < first < 1.0 and second == pytest.approx(first / 10)


@pytest.mark.parametrize("ratio", [0.1, 1 / 3, 130 / 300, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_the_last_step_has_nothing_left(steps, ratio):
    schedule = qsync.ExpandedSchedule(optimizer(), steps, ratio=ratio)
    assert schedule.total_steps >= 1
    rates(schedule, schedule.total_steps)
    assert schedule.get_last_lr() == [0.0]


def test_a_saved_schedule_goes_on_where_it_stood(tmp_path):
    whole = qsync.ExpandedSchedule(optimizer(), 40, warm_up=4, ratio=0.5, floor=0.01)
    first = rates(whole, 7)
    torch.save([whole.state_dict(), whole.optimizer.state_dict()], tmp_path / "saved.pt")
    rest = rates(whole, 16)
    state, of_optimizer = torch.load(tmp_path / "saved.pt")
    again = qsync.ExpandedSchedule(optimizer(9.0), 3, ratio=1.0)
    again.optimizer.load_state_dict(of_optimizer)
    again.load_state_dict(state)
    assert rates(again, 16) == rest and rest[0] != first[0]
    assert again.total_steps == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, found 0"),
        ({"steps": 10.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"warm_up": -1}, "warm_up must be a whole number of at least 0, found -1"),
        ({"warm_up": 10}, "warm_up must be less than steps, found 10 of 10"),
        ({"ratio": 0.0}, r"ratio must be in \(0, 1\], found 0.0"),
        ({"ratio": 1.5}, "fraction of the from-scratch steps"),
        ({"ratio": float("nan")}, "ratio must be in"),
        ({"ratio": "half"}, "ratio must be in"),
        ({"floor": 1.0}, r"floor must be in \[0, 1\), found 1.0"),
        ({"floor": float("nan")}, "floor must be in"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused_and_nothing_is_changed(options, message):
    of = optimizer()
    with pytest.raises(CalibrationError, match=message):
        qsync.ExpandedSchedule(of, **{"steps": 10, **options})
    assert of.param_groups[0]["lr"] == 1e-3 and "initial_lr" not in of.param_groups[0]


def test_the_state_of_another_scheduler_is_refused():
    schedule = qsync.ExpandedSchedule(optimizer(), 10)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(), 10)
    with pytest.raises(
        FormatError, match="not the state of an ExpandedSchedule, because it lacks 'scratch_steps'"
    ):
        schedule.load_state_dict(other.state_dict())
    two = qsync.ExpandedSchedule(optimizer(1.0, 2.0), 10)
    with pytest.raises(FormatError, match="2 parameter groups, this optimizer 1"):
        schedule.load_state_dict(two.state_dict())
