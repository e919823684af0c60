"""The memory model against what runs: small models, random plans, a tight budget, the stated error."""

from __future__ import annotations

import contextlib
import json

import pytest

torch = pytest.importorskip("torch")

from graphs import cluster_of, profile_of, sensitivity_of  # noqa: E402
from torch import nn  # noqa: E402

from qsync.allocator import allocate  # noqa: E402
from qsync.experiments import memory_error  # noqa: E402
from qsync.experiments.gpt import Gpt  # noqa: E402
from qsync.lowering import lower  # noqa: E402
from qsync.precision import Precision  # noqa: E402
from qsync.predictor import memory  # noqa: E402
from qsync.predictor.blocks import block_bytes  # noqa: E402


@pytest.fixture(autouse=True)
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with memory_error._alone():
        yield
    torch.set_num_threads(threads)


def gpt() -> memory_error.Trained:
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    model = Gpt(num_layers=2, width=64, num_heads=2, context=64)
    return memory_error.Trained(
        model, (tokens, tokens), lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )


def convolutional() -> memory_error.Trained:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]

    model = nn.Sequential(
        *block(8, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), nn.Flatten(), nn.Linear(4096, 10)
    )
    images = torch.randn(16, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    return memory_error.Trained(model, (images, torch.arange(16) % 10), nn.functional.cross_entropy)


class Dropping(nn.Module):
    """Attention that drops, between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.none = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(16, 64, 2, 16).transpose(1, 2) for part in self.qkv(x).split(32, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.out(self.none(y.transpose(1, 2).reshape(16, 64, 32))).mean(1)


def dropping() -> memory_error.Trained:
    x = torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(0))
    return memory_error.Trained(Dropping(), (x, torch.arange(16)), nn.functional.cross_entropy)


@pytest.mark.parametrize("build", [gpt, convolutional, dropping])
def test_random_plans_take_what_is_predicted(build):
    trained = build()
    for number in range(4):
        found = trained.measure(memory_error.drawn(trained.graph, number))
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
    full = memory.peak_memory(lower(graph, {}), optimizer_bytes=optimizer, num_ranks=2).peak_bytes
    lowest = {op.name: Precision.INT8 for op in graph.adjustable}
    least = memory.peak_memory(lower(graph, lowest), optimizer_bytes=optimizer, num_ranks=2).peak_bytes
    budget = (full + 3 * least) // 4
    profiles = {name: profile_of(graph, name, optimizer_bytes=optimizer) for name in ("train", "infer")}
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster_of(), budgets={"infer": budget})
    found = trained.measure(memory_error.Choice(plan["infer"].assignment, ()))
    assert 0.9 * budget < found["peak_bytes"] <= budget < full


def test_the_experiment_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_error, "NAMES", ("small",))
    monkeypatch.setattr(memory_error, "DROPPING", "dropping")
    monkeypatch.setattr(memory_error, "make", lambda name: dropping())
    monkeypatch.setattr(memory_error, "_alone", contextlib.nullcontext)
    monkeypatch.setattr(memory_error, "PREDICTED", tmp_path / "stated.json")
    monkeypatch.setattr(memory_error, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("a <!-- memory:begin -->stale<!-- memory:end --> b")
    memory_error.main(tmp_path, plans=2, state=True)
    content = json.loads((tmp_path / "memory_error.json").read_text())
    assert content["measured"] is True and {"machine", "torch", "commit", "seed"} <= content.keys()
    assert len(content["plans"]) == 4 and content["models"]["small"]["plans"] == 2
    stated = json.loads((tmp_path / "stated.json").read_text())
    assert stated["worst_underprediction"] == content["worst_underprediction"]
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("a <!--") and readme.endswith("--> b") and "stale" not in readme
    assert "| small | 2 |" in readme
    assert (tmp_path / "memory_error.png").stat().st_size > 5000


def rows(*pairs):
    return [
        {"model": "m", "saved_bytes": 100, "predicted_saved_bytes": 100, "peak_bytes": measured,
         "predicted_peak_bytes": predicted, "throughout_bytes": 500, "budget_bytes": predicted}
        for predicted, measured in pairs
    ]  # fmt: skip


def test_the_margin_is_the_worst_underprediction_of_what_comes_and_goes():
    assert memory_error.worst_underprediction(rows((1000, 1010), (1000, 900))) == 10 / 500
    assert memory_error.worst_underprediction(rows((1000, 900), (1000, 950))) == 0.0


def test_a_model_holds_only_within_the_bars_and_the_budget():
    assert memory_error.holds(memory_error.summary(rows((1000, 1000), (1040, 1000)))["m"])
    assert not memory_error.holds(memory_error.summary(rows((1000, 1000), (1060, 1000)))["m"])
    assert not memory_error.holds(memory_error.summary(rows((999, 1000)))["m"])  # over its budget


def test_the_readme_shows_what_is_stated_beside_the_model():
    stated = json.loads(memory_error.PREDICTED.read_text())
    assert memory_error.markdown(stated) in memory_error.README.read_text(encoding="utf-8")


def test_the_margin_is_in_every_peak(monkeypatch):
    graph = gpt_graph()
    monkeypatch.setattr(memory, "stated_error", lambda device: 0.1)
    found = memory.peak_memory(lower(graph, {}), optimizer_bytes=1000)
    comes_and_goes = found.casts + found.saved + found.transient
    assert found.peak_bytes == found.estimate_bytes + -(-comes_and_goes // 10)


def test_a_gpu_s_blocks_are_rounded():
    assert [block_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert block_bytes(11 * 2**20) == 12 * 2**20
    graph = gpt_graph()
    on_cpu, on_gpu = (memory.peak_memory(lower(graph, {}), device=device) for device in ("cpu", "cuda"))
    assert on_gpu.peak_bytes >= on_gpu.estimate_bytes + memory.SEGMENTS > on_cpu.estimate_bytes


def gpt_graph():
    from graphs import encoder

    return encoder(1)
