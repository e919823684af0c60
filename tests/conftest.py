"""One thread for every test, as a rank under torchrun has: the same sums on every machine.

More would only get in each other's way here: operators are tiny, and two threads that wait for each other on
a busy machine have hung for minutes in oneDNN's conv1d (torch 2.13).
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)

# Fixtures: both, cuda_on_cpu.
pytest_plugins = ["compiled_and_plain"]
