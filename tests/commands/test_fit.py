"""`qsync fit`: in words, as JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of
from typer.testing import CliRunner

from qsync.commands.main import app
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis

GRAPH, OTHER = encoder(4, rows=256), encoder(4, rows=128)
TINY = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 1024, "n_head": 4,
    "vocab_size": 1000, "n_positions": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    profiles = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
    Basis(GRAPH, cluster_of(), profiles, sensitivity_of(GRAPH)).save(tmp_path)
    OTHER.save(tmp_path / "other" / "graph.json")
    return tmp_path


def printed(*options) -> str:
    found = CliRunner().invoke(app, ["fit", *map(str, options)], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_a_folder_s_classes_are_told_what_fits(folder):
    text = printed(folder)
    assert "train (1.1e+03 GB), 256 samples: fits" in text and "infer" in text
    assert "at the fullest: " in text and "the largest batch of one pass that fits: " in text
    found = json.loads(printed(folder, "--json"))
    needed = found["classes"]["infer"]["base"]["peak_bytes"]
    text = printed(folder, "--memory", f"infer={int(0.5 * needed)}")
    assert "infer (" in text and "does not fit, by " in text
    assert "4 passes of 64" in text and "blocks recomputed" in text
    found = json.loads(printed(folder, "--memory", "infer=1000", "--json"))["classes"]
    assert found["train"]["fits"] and not found["infer"]["fits"]
    text = printed(folder, "--memory", "infer=1000")
    assert "nothing that was tried fits; least takes" in text


@pytest.mark.slow
def test_cards_of_data_sheets_are_told_what_fits(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    options = (
        "--cards",
        "T4:2,A100:1",
        "--model",
        f"hf:{config}",
        "--batch",
        512,
        "--length",
        64,
        "--base",
        "fp16",
    )
    text = printed(*options, "--memory", "T4=4G")
    assert (
        "A100 (" in text and "512 samples: fits" in text and "T4 (4.29 GB), 512 samples: does not fit" in text
    )
    assert "passes of" in text and "simulated from data sheets" in text
    found = json.loads(printed(*options, "--json"))["classes"]
    assert found["T4"]["largest"] < found["A100"]["largest"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give a FOLDER of qsync.hybrid or qsync demo, or --cards with --model"),
        (("{folder}", "--cards", "T4"), "give a FOLDER"),
        (("--cards", "T4"), "give a FOLDER"),
        (("{folder}", "--model", "hf:x.json"), "give a FOLDER"),
        (("{folder}", "--memory", "nobody=1G"), "no device class 'nobody'"),
        (("{folder}", "--memory", "infer=-1"), "--memory must be positive"),
        (("{folder}", "--base", "int8"), "int8 is not a base precision"),
    ],
)
def test_bad_input_is_one_sentence(folder, options, said):
    arguments = [text.format(folder=folder) for text in options]
    with pytest.raises(QSyncError, match=said) as error:
        CliRunner().invoke(app, ["fit", *arguments], catch_exceptions=False)
    assert "\n" not in str(error.value)
