"""A rank that lives but does not move is named, and a loop that takes its time alarms nobody."""

from __future__ import annotations

import re

import pytest
import torch
from two_ranks import launch

from qsync.distributed.monitoring.positions import (
    AFTER_BACKWARD,
    BACKWARD,
    BEFORE_FORWARD,
    FORWARD,
    Position,
    Stall,
)
from qsync.distributed.monitoring.step_phases import PhaseTimer

WAITING = Position(7, BACKWARD, 30, False)


def named(*positions: Position, seconds: float = 11.0) -> list[int]:
    stall = Stall(patience_s=10.0)
    assert stall.hear(0.0, dict(enumerate(positions))) == []
    return stall.hear(seconds, dict(enumerate(positions)))


@pytest.mark.parametrize(
    ("stuck", "where"),
    [
        (Position(7, BEFORE_FORWARD, 0, False), "before forward of step 7"),
        (Position(7, BEFORE_FORWARD, 0, True), "in data loading of step 7"),
        (Position(7, FORWARD, 0, False), "in forward of step 7"),
        (Position(7, BACKWARD, 12, False), "in backward of step 7"),
        (Position(6, AFTER_BACKWARD, 30, False), "after backward of step 6"),
    ],
)
def test_the_rank_that_all_wait_for_is_named(stuck, where):
    assert named(WAITING, stuck, WAITING) == [1]
    assert str(stuck) == where
    assert named(WAITING, stuck, stuck) == [1, 2]


def test_if_all_wait_in_one_place_it_is_the_network():
    assert named(WAITING, WAITING) == [0, 1]


def test_a_rank_may_wait_in_forward_for_buffers():
    assert named(Position(7, BEFORE_FORWARD, 0, False), Position(7, FORWARD, 0, False)) == [0]


@pytest.mark.parametrize("phase", [BEFORE_FORWARD, FORWARD, AFTER_BACKWARD])
def test_loops_that_take_their_time_together_alarm_nobody(phase):
    assert named(Position(7, phase, 0, False), Position(7, phase, 0, False)) == []


def test_a_stall_is_named_once_and_any_move_ends_it():
    stall, stuck = Stall(10.0), Position(7, FORWARD, 0, False)
    assert stall.hear(0.0, {0: WAITING, 1: stuck}) == []
    assert stall.hear(9.0, {0: WAITING, 1: stuck}) == []
    assert stall.hear(11.0, {0: WAITING, 1: stuck}) == [1]
    assert stall.hear(30.0, {0: WAITING, 1: stuck}) == []
    moved = Position(7, BACKWARD, 1, False)
    assert stall.hear(31.0, {0: WAITING, 1: moved}) == []
    assert stall.hear(42.0, {0: WAITING, 1: moved}) == [1]


def test_a_timer_says_where_the_loop_stands():
    model = torch.nn.Linear(4, 1)
    timer, optimizer = PhaseTimer(model, model), torch.optim.SGD(model.parameters(), lr=0.1)
    assert timer.position() == Position(0, BEFORE_FORWARD, 0, False)
    loss = model(torch.ones(2, 4)).sum()
    assert timer.position() == Position(0, FORWARD, 0, False)
    seen = []
    model.bias.register_post_accumulate_grad_hook(lambda _: seen.append(timer.position()))
    loss.backward()
    assert seen[0].phase == BACKWARD and seen[0].num_gradients in (1, 2)
    assert timer.position() == Position(0, AFTER_BACKWARD, 2, False)
    optimizer.step()
    assert timer.position() == Position(1, BEFORE_FORWARD, 0, False)


STUCK = """
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache, timeout_s=2)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(4):
    if number == 2 and rank == 1:
        time.sleep(8)
    loss_fn(model, batch(seed=number)).backward()
    optimizer.step()
say("ended: well")
"""


@pytest.mark.dist
def test_a_rank_that_lives_but_does_not_move_is_named_by_one_that_waits(tmp_path):
    output = launch(tmp_path, "os.dup2(1, 2)\n" + STUCK)
    assert output.count("all others wait for that") == 1
    (line,) = [line for line in output.splitlines() if "all others wait for that" in line]
    assert line.startswith("rank 1 (") and re.search(r"has been before forward of step 2 for \d s", line)
    assert output.count("ended: well") == 2
