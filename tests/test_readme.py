"""What the README shows is run as it is written, so that it cannot rot."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import qsync
from qsync.commands import main
from qsync.experiments.workloads.gpt import Gpt

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in BLOCKS if found == language]


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    """The training script, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "train.py"
    path.write_text(next(body for body in blocks("python") if body.startswith("# train.py")))
    return path


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.dist
def test_the_training_script_runs_under_torchrun(script, tmp_path):
    command = torchrun("--standalone", "--nproc-per-node", "2", str(script))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").glob("qsync/*/plan.json"))


@pytest.mark.dist
def test_the_training_script_runs_across_two_agents(script, tmp_path):
    """Two torchrun agents on loopback stand for two hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    command = torchrun(*options, "--rdzv-endpoint", f"127.0.0.1:{port}", str(script))
    agents = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        errors = [agent.communicate(timeout=240)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(errors)


def test_the_script_is_short():
    script = next(body for body in blocks("python") if body.startswith("# train.py"))
    assert (
        sum(
            bool(line.strip()) and not line.startswith(("#", "import", "from"))
            for line in script.splitlines()
        )
        <= 10
    )


def test_the_cluster_file_is_read(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "cluster.toml").write_text(text)
    cluster = qsync.Cluster.load(tmp_path / "cluster.toml")
    assert cluster.num_ranks == 10
    read = tomllib.loads(text)
    fields = set(read["link"]).union(*read["classes"])
    known = {*qsync.Link.__dataclass_fields__, *qsync.DeviceClass.__dataclass_fields__} - {"emulated_share"}
    assert fields == known


def test_every_command_and_verb_exists():
    commands = set(re.findall(r"qsync (doctor|demo|plan|explain|replay|diff|\w+) (?:FOLDER|PLAN)", README))
    known = {command.callback.__name__ for command in main.app.registered_commands}
    assert commands <= known
    assert all(f"qsync {name}" in README for name in known)
    for verb in re.findall(r"qsync\.(\w+)\(", "".join(blocks("python"))):
        assert verb in qsync.__all__


def test_the_folders_are_those_of_the_tree():
    for folder in re.findall(r"^    (\w+)/ ", README, flags=re.MULTILINE):
        assert (Path(__file__).parent.parent / folder).is_dir()


def test_the_recipe_grows_a_model():
    (text,) = [block for block in blocks("python") if '"my GPT"' in block]
    names: dict[str, Any] = {"qsync": qsync, "MyGPT": lambda *sizes: Gpt(*sizes, context=8, vocab=11)}
    exec(text, names)
    assert len(text.splitlines()) <= 20
    model = Gpt(2, 16, 2, context=8, vocab=11).double()
    big = qsync.expand(model, names["recipe"].to(width=24, layers=3))
    assert qsync.verify_expansion(model, big, torch.arange(16).view(2, 8) % 11).passed


def test_the_derived_recipe_is_the_one_by_hand():
    (by_hand,) = [block for block in blocks("python") if '"my GPT"' in block]
    (text,) = [block for block in blocks("python") if "derive_recipe" in block]
    model, batch = Gpt(2, 16, 2, context=8, vocab=11, tied=True).double(), torch.arange(16).view(2, 8) % 11
    names: dict[str, Any] = {
        "qsync": qsync,
        "MyGPT": lambda *sizes: Gpt(*sizes, context=8, vocab=11, tied=True),
    }
    exec(by_hand, names)
    hand = names["recipe"]
    exec(text, names | {"model": model, "batch": batch}, derived := {})
    assert derived["recipe"].lines == hand.lines
    assert (derived["recipe"].sizes, derived["recipe"].follows) == (hand.sizes, hand.follows)
    assert derived["recipe"].read(model)["heads"] == hand.read(model)["heads"] == 2
    big = qsync.expand(model, derived["recipe"].to(width=24, layers=3))
    assert qsync.verify_expansion(model, big, batch).passed
