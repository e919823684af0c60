"""The suite of unseen models: each builds, and trains in BF16 from few graphs, each traced once."""

from __future__ import annotations

import copy

import pytest
import torch

import qsync
import qsync.distributed.data_parallel  # what a job brings along must not change what is traced
from qsync.errors import QSyncError
from qsync.experiments.workloads.families import FAMILIES, HELD_OUT, SEEN, Family, family_named
from qsync.runtime.planned_forward import program_of

# Hugging Face's losses and routers break the graph once or twice, and Wav2Vec2's droppable layers each.
MOST_GRAPHS, OF_FAMILY = 3, {"wav2vec2": 7}
# Kinds that runtime/test_rewriting.py and runtime/test_recurrences.py have not; the others are deep.
QUICK = ("qwen2_moe", "t5", "clip", "unet", "mamba2")


def step(model: torch.nn.Module, batch: dict[str, object]) -> float:
    loss = model(**batch).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name
    return float(loss.detach())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of Wav2Vec2's
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name not in QUICK)) for name in SEEN]
)
def test_a_family_trains_in_bf16_from_few_graphs(name):
    model, batches = FAMILIES[name].make(tiny=True)
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    plain = step(eager, batches[0])
    torch.manual_seed(1)
    lowered = step(qsync.wrap(model, "bf16", strict=True), batches[0])
    assert lowered == pytest.approx(plain, rel=0.05)
    program = program_of(model)
    assert program.graph.num_segments <= OF_FAMILY.get(name, MOST_GRAPHS)
    modes = {node.mode for part in program.lowered for node in part.nodes if hasattr(node, "mode")}
    assert "bf16" in modes
    step(model, batches[0])  # a model may have changed itself in its first call
    num_traced = len(program._entries)
    for _ in range(2):
        step(eager, batches[0])
        step(model, batches[0])
    assert len(program._entries) == num_traced


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_family_that_is_held_out_builds(name):
    """Nothing of qsync runs on it here: nobody is to develop by what it does."""
    model, batches = FAMILIES[name].make(tiny=True)
    assert step(model, batches[0]) > 0 and FAMILIES[name].held_out


def test_the_suite_is_broad_and_the_held_out_ones_stay():
    assert len(FAMILIES) >= 18
    assert HELD_OUT == ("opt", "qwen3")  # of those that joined last; "mistral" and "distilbert" before
    assert set(SEEN) == set(FAMILIES) - set(HELD_OUT)
    assert {len(FAMILIES[name].make(tiny=True)[1]) for name in ("gpt2", "roberta")} == {1, 3}


def test_a_family_is_the_same_every_time():
    one, two = (FAMILIES["lstm"].make(tiny=True) for _ in range(2))
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))
    assert torch.equal(one[1][0]["input_ids"], two[1][0]["input_ids"])


def test_convolutions_run_channels_last():
    model, (batch,) = FAMILIES["unet"].make(tiny=True)
    assert batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    assert model.down[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_an_unknown_family_is_one_sentence():
    with pytest.raises(QSyncError, match="unknown family 'bert'; choose from distilbert"):
        family_named("bert")
    assert isinstance(family_named("vit"), Family)
