"""What a job reaches is said once, whatever the loop accumulates and whatever else it steps."""

from __future__ import annotations

import re
import time

import pytest
import torch

from qsync.distributed.monitoring.reached_rate import ReachedRate


@pytest.mark.parametrize("accumulated", [1, 3])
def test_samples_count_by_calls_and_the_line_comes_once(capsys, accumulated):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ReachedRate(model, samples=10, predicted_s=0.01, num_calls=1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    for step in range(40):
        if step == 3:  # those before trace the model
            began = time.perf_counter()
        for _ in range(accumulated):
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))  # evaluation
        optimizers[1].step()
        optimizers[0].step()
        if step == 22:
            expected = 10 * 20 * accumulated / (time.perf_counter() - began)
    (found,) = re.findall(r"Linear: (\S+) samples per second in the first 20 steps", capsys.readouterr().err)
    assert float(found) == pytest.approx(expected, rel=0.2)
