"""The memory model against what runs: small models, random plans, a tight budget, the stated error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from graphs import cluster_of, profile_of, sensitivity_of  # noqa: E402
from torch import nn  # noqa: E402

from qsync.allocator import allocate  # noqa: E402
from qsync.experiments.harness.ranks import process_group_of_one  # noqa: E402
from qsync.experiments.memory import memory_error, memory_runs  # noqa: E402
from qsync.experiments.workloads.gpt import Gpt  # noqa: E402
from qsync.lowering.incremental import lower  # noqa: E402
from qsync.operators.precision import Precision  # noqa: E402
from qsync.predictor.memory import peak  # noqa: E402
from qsync.predictor.memory.cuda_allocator import block_bytes  # noqa: E402


@pytest.fixture(autouse=True)
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with process_group_of_one():
        yield
    torch.set_num_threads(threads)


def gpt() -> memory_runs.Trained:
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    model = Gpt(num_layers=2, width=64, num_heads=2, context=64)
    return memory_runs.Trained(
        model, (tokens, tokens), lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )


def convolutional() -> memory_runs.Trained:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]

    model = nn.Sequential(
        *block(8, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), nn.Flatten(), nn.Linear(4096, 10)
    )
    images = torch.randn(16, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    return memory_runs.Trained(model, (images, torch.arange(16) % 10), nn.functional.cross_entropy)


class Dropping(nn.Module):
    """Attention that drops, between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.none = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(16, 64, 2, 16).transpose(1, 2) for part in self.qkv(x).split(32, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.out(self.none(y.transpose(1, 2).reshape(16, 64, 32))).mean(1)


def dropping() -> memory_runs.Trained:
    x = torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(0))
    return memory_runs.Trained(Dropping(), (x, torch.arange(16)), nn.functional.cross_entropy)


@pytest.mark.parametrize("build", [gpt, convolutional, dropping])
def test_random_plans_take_what_is_predicted(build, request):
    if build is convolutional:
        request.getfixturevalue("fast_products")  # without them torch convolves BF16 by other kernels
    trained = build()
    for number in range(4):
        found = trained.measure(memory_runs.drawn(trained.graph, number))
        assert found["predicted_saved_bytes"] == pytest.approx(found["saved_bytes"], rel=0.01)
        assert found["predicted_peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)


def test_dropout_that_drops_nothing_is_a_view():
    graph = dropping().graph
    kinds = {op.name: (op.kind, op.dropout) for op in graph.ops}
    assert kinds["none.view"] == ("view", 0.0)
    assert [dropout for kind, dropout in kinds.values() if kind == "attention"] == [0.2]


def test_a_plan_at_a_tight_budget_stays_within_it():
    trained = gpt()
    graph, optimizer = trained.graph, trained.optimizer_bytes
    full = peak.peak_memory(lower(graph, {}), optimizer_bytes=optimizer, num_ranks=2).peak_bytes
    lowest = {op.name: Precision.INT8 for op in graph.adjustable}
    least = peak.peak_memory(lower(graph, lowest), optimizer_bytes=optimizer, num_ranks=2).peak_bytes
    budget = (full + 3 * least) // 4
    profiles = {name: profile_of(graph, name, optimizer_bytes=optimizer) for name in ("train", "infer")}
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster_of(), budgets={"infer": budget})
    found = trained.measure(memory_runs.Choice(plan["infer"].assignment))
    assert 0.9 * budget < found["peak_bytes"] <= budget < full


def test_other_seeds_draw_other_plans():
    graph = dropping().graph
    drawn = [memory_runs.drawn(graph, 3, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The experiment on one small model, and its files elsewhere."""
    for name, value in {"MODELS": ("small",), "PLANS": 2, "RANK_PLANS": 1}.items():
        monkeypatch.setattr(memory_error, name, value)
    monkeypatch.setattr(memory_error, "make", lambda name: dropping())
    monkeypatch.setattr(memory_error, "PREDICTED", tmp_path / "stated.json")
    monkeypatch.setattr(memory_error, "_PAGE", replace(memory_error._PAGE, path=tmp_path / "memory.md"))
    monkeypatch.setattr(memory_error, "run_ranks", lambda models, plans, seed: [
        *rows((1000, 1000), part="two ranks", seed=seed),
        *rows((1000, 990), part="accepted", seed=seed),
        {"part": "refused", "model": "small", "rank": 0},
    ])  # fmt: skip
    (tmp_path / "memory.md").write_text("a <!-- memory:begin -->stale<!-- memory:end --> b")
    return tmp_path


def test_the_experiment_writes_what_it_measured(small):
    memory_error.main(small, state=True)
    content = json.loads((small / "figures.json").read_text())
    assert content["measured"] is True and {"machine", "versions", "commits_of_pieces"} <= content.keys()
    parts = content["parts"]
    assert parts["margin"]["models"]["small"]["plans"] == 2 and parts["margin"]["seeds"] == [0]
    assert parts["two ranks"]["seeds"] == [1] and parts["accepted"]["refused"] == {"small": 1}
    stated = json.loads((small / "stated.json").read_text())
    assert stated["worst_underprediction"] == content["worst_underprediction"]
    page = (small / "memory.md").read_text()
    assert page.startswith("a <!--") and page.endswith("--> b") and "stale" not in page
    assert "| margin, small | 2 |" in page and "| two ranks, all | 1 |" in page
    assert abs(parts["margin"]["models"]["small"]["profiled"]["median"]) < 0.05


def test_without_state_neither_page_nor_margin_is_written(small):
    memory_error.main(small)
    assert not (small / "stated.json").exists() and "stale" in (small / "memory.md").read_text()


@pytest.mark.dist
@pytest.mark.deep
def test_two_real_ranks_take_what_is_predicted_and_no_more_than_they_may():
    found = memory_runs.run_ranks([memory_runs.TINY], 1, 1)
    assert [(row["part"], row["rank"]) for row in found if row["part"] == "two ranks"] == [
        ("two ranks", 0), ("two ranks", 1),
    ]  # fmt: skip
    accepted = [row for row in found if row["part"] == "accepted"]
    assert accepted and {row["rank"] for row in accepted} == {0, 1}
    for row in found:
        if row["part"] != "refused":
            assert row["predicted_saved_bytes"] == pytest.approx(row["saved_bytes"], rel=0.01)
            assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)
            assert row["buckets"] >= 1
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in accepted)


def rows(*pairs, part="margin", seed=0):
    return [
        {"model": "small", "part": part, "seed": seed, "rank": 0, "plan": 0, "saved_bytes": 100,
         "predicted_saved_bytes": 100, "peak_bytes": measured, "predicted_peak_bytes": predicted,
         "throughout_bytes": 500, "budget_bytes": predicted}
        for predicted, measured in pairs
    ]  # fmt: skip


def test_the_margin_is_made_from_the_worst_underprediction_of_what_comes_and_goes():
    assert memory_error.worst_underprediction(rows((1000, 1010), (1000, 900))) == 10 / 500
    assert memory_error.worst_underprediction(rows((1000, 900), (1000, 950))) == 0.0
    assert memory_error.worst_underprediction(rows((1000, 1010), part="two ranks")) == 0.0


def test_errors_hold_only_within_the_bars_and_the_budget():
    assert memory_error.holds(memory_error.errors(rows((1000, 1000), (1040, 1000))))
    assert not memory_error.holds(memory_error.errors(rows((1000, 1000), (1060, 1000))))
    over = memory_error.errors(rows((999, 1000)))
    assert not memory_error.holds(over) and over["over_budget"] == 1 and over["of_budget"] > 1


def test_the_margin_is_in_every_peak(monkeypatch):
    graph = gpt_graph()
    monkeypatch.setattr(peak, "stated_error", lambda device: 0.1)
    found = peak.peak_memory(lower(graph, {}), optimizer_bytes=1000)
    comes_and_goes = found.casts + found.saved + found.transient
    assert found.peak_bytes == found.estimate_bytes + -(-comes_and_goes // 10)


def test_a_gpu_s_blocks_are_rounded():
    assert [block_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert block_bytes(11 * 2**20) == 12 * 2**20
    graph = gpt_graph()
    on_cpu, on_gpu = (peak.peak_memory(lower(graph, {}), device=device) for device in ("cpu", "cuda"))
    assert on_gpu.peak_bytes >= on_gpu.estimate_bytes + peak.EMPTY_SEGMENT_BYTES > on_cpu.estimate_bytes


def gpt_graph():
    from graphs import encoder

    return encoder(1)
