"""`qsync plan --cards`: a verdict on cards of data sheets and a model that a configuration describes."""

from __future__ import annotations

import json

import pytest
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from qsync.commands.main import app
from qsync.errors import FormatError, InfeasibleError, QSyncError
from qsync.what_if.card_verdicts import cards_of, graphs_of, judge, link_of

pytestmark = pytest.mark.slow

TINY = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 2048, "n_head": 4,
    "vocab_size": 1000, "n_positions": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return graphs_of(f"hf:{path}", 4, 32)


def printed(*options):
    found = CliRunner().invoke(app, ["plan", *map(str, options)], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_cards_are_judged_beside_the_strong_ones_alone(config):
    options = ("--model", f"hf:{config}", "--batch", 512, "--length", 64, "--base", "fp16")
    fast = json.loads(printed("--cards", "a100:1,T4:3", "--link", "800GB", *options, "--json"))
    assert fast["simulated"] and fast["classes"].keys() == {"A100", "T4"}
    samples = {name: entry["samples"] for name, entry in fast["classes"].items()}
    assert samples["A100"] + 3 * samples["T4"] == 512 and samples["A100"] > samples["T4"]
    names = [way["name"] for way in fast["verdict"]["ways"]]
    assert names[0] == "1 x A100 alone" and names[-1] == "this plan"
    assert not fast["verdict"]["leave_out"] and fast["verdict"]["times"]["T4"] > 1.0
    text = printed("--cards", "A100:1,T4:3", "--link", "10Mb", *options)
    assert "GPT2LMHeadModel, 512 samples a step over 10Mb, fp16" in text and "leave it out" in text
    assert "simulated from data sheets" in text and "A100: " in text


def test_one_kind_of_card_has_a_rate_and_no_shares(config):
    found = json.loads(
        printed("--cards", "H100:2", "--model", f"hf:{config}", "--batch", 16, "--length", 32, "--json")
    )
    assert found["verdict"] is None and found["classes"]["H100"]["samples"] == 8 and found["step_s"] > 0


def test_the_cpu_here_is_a_card_of_measured_rates(graphs):
    cards = cards_of("a100:1,cpu:2")
    one, sheet = cards["CPU"]
    assert (one.device, one.count, one.datasheet) == ("cpu", 2, None) and sheet.source.startswith("measured")
    assert sheet.flops_per_s["fp32"] < cards["A100"][1].flops_per_s["fp32"]
    basis, plan = judge(cards, link_of("25Gb"), graphs, "fp32")
    assert basis.profiles["CPU"].launches is None and basis.profiles["A100"].launches is not None
    assert plan.verdict.leave_out == ("CPU",)


def test_cards_of_a_kind_share_hosts_and_the_link_is_between_hosts(graphs):
    basis, _ = judge(cards_of("A100:12,T4:1"), link_of("8Gb"), graphs, "fp16")
    first, *_, last = basis.cluster.hosts
    assert len(basis.cluster.hosts) == 3 and first.leg(last.name)[1] == 1e9
    assert judge(cards_of("A100:8"), link_of("8Gb"), graphs, "fp16")[0].cluster.hosts == ()


def test_a_model_that_no_card_holds_is_one_sentence(config):
    large = config.with_name("large.json")
    large.write_text(json.dumps({**TINY, "vocab_size": 10**6}))
    with pytest.raises(InfeasibleError, match="does not fit on T4: .* take 3[34] GB of every card") as error:
        judge(cards_of("A100:1,T4:1"), link_of("8Gb"), graphs_of(f"hf:{large}", 2, 8), "fp16")
    assert "\n" not in str(error.value)


def test_a_loss_that_transformers_guesses_breaks_no_graph(config):
    before = sum(counters["graph_break"].values())
    first, second = graphs_of(f"hf:{config}", 2, 8)
    assert sum(counters["graph_break"].values()) == before
    assert [graph.batch_shapes[0][0] for graph in (first, second)] == [2, 4]  # one would be broadcast


@pytest.mark.parametrize(("text", "said"), [
    ("A101:4", "there is no data sheet 'A101' .nearest: 'A10'"), ("A100:0", "takes CARD:NUMBER"),
    ("A100:x", "takes CARD:NUMBER"), ("", "takes CARD:NUMBER"), ("A100:2,a100:3", "names A100 twice"),
    ("A100:-1", "takes CARD:NUMBER"),
])  # fmt: skip
def test_what_is_no_pile_of_cards_is_one_sentence(text, said):
    with pytest.raises(FormatError, match=said):
        cards_of(text)


@pytest.mark.parametrize("text", ["0Gb", "25", "-1Gb", "Gb", "25Tb", "1e3Gb", ""])
def test_what_is_no_link_is_one_sentence(text):
    with pytest.raises(FormatError, match="--link takes a bandwidth above zero, such as 25Gb"):
        link_of(text)


def test_bits_and_bytes_are_told_apart():
    assert link_of("8Gb").bytes_per_s == 1e9 == link_of("1GB").bytes_per_s == link_of("8 Gbps").bytes_per_s


@pytest.mark.parametrize(("options", "said"), [
    (("--model", "bert-base"), "--model takes hf:CONFIG.json"),
    (("--model", "hf:nowhere.json"), "'nowhere.json' does not exist; give the path of a config.json"),
    (("--model", "hf:{config}", "--batch", "3"), "--batch 3 is less than 2 samples for each of 2 cards"),
    (("--model", "hf:{config}", "--length", "65"), "--length must be from 1 to the 64 tokens"),
    (("--model", "hf:{other}"), 'GPT2Model returns no loss; set "architectures" to a class with a head'),
    (("--model", "hf:{broken}"), "is not the config.json of a model that transformers can build"),
    (("--model", "hf:{config}", "--link", "0Gb"), "--link takes a bandwidth above zero"),
    ((), "--cards needs --model and no folder"),
])  # fmt: skip
def test_what_cannot_be_judged_is_one_sentence(config, options, said):
    other, broken = config.with_name("other.json"), config.with_name("broken.json")
    other.write_text(json.dumps({**TINY, "architectures": ["GPT2Model"]}))
    broken.write_text(json.dumps({**TINY, "model_type": "none", "architectures": ["Nothing"]}))
    given = [option.format(config=config, other=other, broken=broken) for option in options]
    with pytest.raises(QSyncError, match=said) as error:
        CliRunner().invoke(app, ["plan", "--cards", "A100:1,T4:1", *given], catch_exceptions=False)
    assert "\n" not in str(error.value)
