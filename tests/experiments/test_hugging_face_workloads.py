"""Hugging Face configurations as workloads: they train, and what cannot be trained is one sentence."""

from __future__ import annotations

import json

import pytest
import torch

import qsync
from qsync.errors import QSyncError
from qsync.experiments.workloads.subjects import demo_workload

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 16},
    "bert": {**SMALL, "vocab_size": 300, "architectures": ["BertForMaskedLM"], "max_position_embeddings": 16},
    "vit": {**SMALL, "image_size": 16, "patch_size": 8},
    "resnet": {"depths": [1], "hidden_sizes": [16], "embedding_size": 8, "layer_type": "basic"},
}


def config_file(folder, model_type: str, **changes) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **CONFIGS.get(model_type, {}), **changes}))
    return f"hf:{path}"


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_configuration_trains_and_has_something_to_lower(tmp_path, model_type):
    workload = demo_workload(config_file(tmp_path, model_type))
    model, batch = workload.make_model(0), workload.batch(0, 0, 0)
    assert qsync.capture(model, batch[0]).adjustable
    workload.loss(model, batch).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    again = workload.make_model(0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    assert model_type in workload.description and len(workload.heldout(2)) == 2


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("t5", {}, "name its class in architectures"),
        ("t5", {"architectures": ["T5ForConditionalGeneration"]}, "cannot train T5ForConditionalGeneration"),
        ("gpt2", {"vocab_size": 100}, "give it 256 or more"),
        ("no such model", {}, "is not the config.json of a model"),
    ],
)
def test_a_bad_configuration_is_one_sentence(tmp_path, model_type, changes, sentence):
    with pytest.raises(QSyncError, match=sentence) as error:
        demo_workload(config_file(tmp_path, model_type, **changes))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_text_for_images_are_one_sentence(tmp_path):
    with pytest.raises(QSyncError, match="give the path of a config.json"):
        demo_workload(f"hf:{tmp_path}/none.json")
    with pytest.raises(QSyncError, match="leave out --data"):
        demo_workload(config_file(tmp_path, "vit"), tmp_path)
