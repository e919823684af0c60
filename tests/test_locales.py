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

model = qsync.wrap(Größe(), "bf16", compile=sys.argv[1:] == ["compile"])
model(torch.ones(8, 16)).backward()
qsync.save(sys.argv[-1] + "/saved", model)
print("trained", model.weiß.weight.grad is not None)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # else Python takes the locale C for UTF-8


def train(script, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script.write_text(TRAINS, encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("variables", [{"LC_ALL": "POSIX"}, ASCII], ids=["POSIX", "ASCII"])
def test_a_model_trains(variables, tmp_path):
    done = train(tmp_path / "train.py", str(tmp_path), **variables)
    assert (done.returncode, done.stdout) == (0, "trained True\n"), done.stderr


def test_where_torch_cannot_read_its_own_files_a_sentence_says_what_to_set(tmp_path):
    done = train(tmp_path / "train.py", "compile", **ASCII)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and said.startswith(
        "qsync.errors.UnsupportedError: compile=True needs Inductor"
    )
    assert "PYTHONUTF8=1" in said
