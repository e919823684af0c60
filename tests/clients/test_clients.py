"""Training scripts as people write them: with qsync the same numbers, an end, checkpoints for plain torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from qsync.backend import kernel_cache
from qsync.errors import QSyncError
from qsync.experiments.clients.conversions import CLIENTS, MOST_LINES, Client
from qsync.experiments.clients.start import NUM_RANKS, run_client

# All in FP32, and so the base, which frameworks state themselves; by torch's own kernels.
ALL_FP32 = {"precisions": ["fp32"], "bitwise": True}
# Where a saved file holds the state of the model.
STATE = {
    "nanogpt": "model", "imagenet": "state_dict", "diffusion": "model", "lightning_fit": "state_dict",
}  # fmt: skip


def runs(client: Client, folder: Path, steps: int, *arguments: str, kinds=("plain", "qsync"), name: str = ""):
    """What the ranks did, plain and converted: two jobs, one after the other."""
    environment = {
        "XDG_CACHE_HOME": str(folder / "plans"), "QSYNC_CACHE_DIR": str(kernel_cache.folder().parent),
        "QSYNC_PROFILE_S": "2",
    }  # fmt: skip
    return [
        run_client(
            client, folder / (name + kind), qsync=kind == "qsync", steps=steps, options=ALL_FP32,
            arguments=arguments, environment=environment,
        )
        for kind in kinds
    ]  # fmt: skip


def printed(ranks):
    """What each rank printed, but for lines of the Trainer, which state seconds."""
    return [[text for _, text in rank.lines if not text.startswith("{")] for rank in ranks]


def saved(client: Client, folder: Path) -> dict[str, torch.Tensor]:
    """The state of the model in a checkpoint, as plain torch reads it."""
    path = folder / client.checkpoint
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    state = found[STATE[client.name]] if client.name in STATE else found
    consume_prefix_in_state_dict_if_present(state, "module.")  # of DDP, whose state some scripts save
    return state


def check_like_plain(client: Client, folder: Path, steps: int) -> None:
    plain, planned = runs(client, folder, steps)
    assert [len(rank.losses()) for rank in planned] == [steps] * NUM_RANKS
    assert printed(planned) == printed(plain)
    assert list((folder / "plans").rglob("plan.json")), "qsync has planned"
    expected, found = (saved(client, folder / kind) for kind in ("plain", "qsync"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_a_conversion_changes_few_lines(client):
    assert client.plain() != client.converted(ALL_FP32)
    assert client.lines_changed() <= MOST_LINES


def test_a_change_that_does_not_apply_is_an_error():
    client = Client("nanogpt", "ckpt.pt", (("no such line", ""),))
    with pytest.raises(QSyncError, match=r"nanogpt.py contains 'no such line' 0 times"):
        client.converted()


# Quick: the loops of test_frameworks.py, whose gradient norms are those of plain DDP, and README's script.
@pytest.mark.dist
@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_script_trains_as_without_qsync(name, tmp_path):
    client = CLIENTS[name]
    check_like_plain(client, tmp_path, 20)
    model = import_module(f"qsync.experiments.clients.{name}").make_model()
    model.load_state_dict(saved(client, tmp_path / "qsync"), strict=True)


@pytest.mark.dist
@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_scripts_resume_each_others_checkpoints(tmp_path):
    client = CLIENTS["imagenet"]
    runs(client, tmp_path, 3, kinds=("qsync",), name="first-")
    checkpoint = str(tmp_path / "first-qsync" / client.checkpoint)
    plain, planned = runs(client, tmp_path, 8, "--resume", checkpoint)
    assert len(planned[0].losses()) == 5
    assert printed(planned) == printed(plain)
