"""Training in locales that are not UTF-8: those of cron, containers and Slurm's prologs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Neither its source nor a parameter's name is ASCII.
TRAINS = """
import sys
import torch, qsync

class Größe(torch.nn.Module):  # “quoted” – and more
    def __init__(self):
        super().__init__()
        self.weiß = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.weiß(x)).sum()  # Σ

model = qsync.wrap(Größe(), "bf16")
model(torch.ones(8, 16)).backward()
qsync.save(sys.argv[-1] + "/saved", model)
print("trained", model.weiß.weight.grad is not None)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # else Python takes the locale C for UTF-8


POSIX = pytest.param({"LC_ALL": "POSIX"}, id="POSIX", marks=pytest.mark.deep)  # Python makes it UTF-8


@pytest.mark.parametrize("variables", [pytest.param(ASCII, id="ASCII"), POSIX])
def test_a_model_trains(variables, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS, encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], env=clean | variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "trained True\n"), done.stderr
