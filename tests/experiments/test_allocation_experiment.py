"""compare_methods.py on tiny graphs: every method keeps its word, none that lowers beats qsync."""

from __future__ import annotations

import random

import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

from qsync.records.cluster import Link
from qsync.records.plan_folder import Basis

LINK = Link(1e-6, 1e10)


def basis_of(graph, slow=1.8, cast_s=2e-9, infer=1, **changes):
    """Two classes; sensitivities that differ by a hundred times."""
    profiles = {
        name: profile_of(graph, name, slow=s, latency_s=1e-7, cast_s=cast_s, **changes)
        for name, s in (("train", 1.0), ("infer", slow))
    }
    draw = random.Random(3)
    weights = {op.name: 10 ** draw.uniform(-1, 1) for op in graph.adjustable}
    cluster = cluster_of({"train": 1, "infer": infer}, link=LINK)
    return Basis(graph, cluster, profiles, sensitivity_of(graph, weights))


@pytest.mark.parametrize(("cast_s", "misses"), [(0.0, False), (5e-9, True)])
def test_a_plan_that_leaves_casts_out_misses_the_target_where_they_take_time(cast_s, misses):
    basis = basis_of(mlp(6, width=64, rows=64), cast_s=cast_s)
    (_, target), *_ = targets(basis, (0.3,))
    assert casts_left_out(basis, target)["reaches"] is not misses


torch = pytest.importorskip("torch")

from qsync.experiments.allocation import bases, compare_methods, methods  # noqa: E402
from qsync.experiments.allocation.methods import (  # noqa: E402
    MILP,
    NO_CASTS,
    TWO_STAGES,
    casts_left_out,
    compare,
    targets,
)
from qsync.experiments.allocation.methods_report import BEST_UNIFORM, summary, tables  # noqa: E402
from qsync.experiments.harness.emulated_profiles import HALF, HERE  # noqa: E402
from qsync.experiments.harness.tables import as_markdown  # noqa: E402
from qsync.experiments.workloads.workload import Workload, seeded  # noqa: E402


def test_every_method_at_one_target_and_none_that_lowers_adds_less_than_the_exact_solver():
    basis = basis_of(encoder(1, width=256, rows=128))
    found = targets(basis, (0.2, 0.6))
    assert found[0][1] < found[1][1]
    rows = compare(basis, found[0][1])
    by_name = {row["method"]: row for row in rows}
    assert len(by_name) == len(rows) and {MILP, TWO_STAGES, "uniform bf16", "uniform int8"} <= set(by_name)
    exact = by_name[MILP]
    assert exact["violations"] == [] and exact["reaches"] and exact["bound"] <= exact["added_variance"]
    assert not by_name["uniform fp32"]["reaches"] and by_name["uniform int8"]["lowered"]["infer"] > 0
    for name, row in by_name.items():
        assert row["reaches"] is (row["step_s"] <= found[0][1] * (1 + 1e-6))
        if row["reaches"]:
            assert row["added_variance"] >= exact["added_variance"] * (1 - 1e-3), name


def test_nothing_is_compared_where_lowering_saves_nothing():
    assert targets(basis_of(mlp(2), slow=1.0), (0.5,)) == []


def fake(method, variance, step=1.0, reaches=True, model="a", part=0.5, **more):
    about = {"model": model, "cluster": "x + y", "kind": "made up", "part": part, "target_s": 1.0}
    row = {"method": method, "added_variance": variance, "step_s": step, "reaches": reaches, "seconds": 0.1}
    return {**about, **row, **more}


def test_the_report_says_factors_targets_met_and_who_adds_less():
    solved = {"gap": 0.0, "bound": 1.0, "violations": []}
    rows = []
    for part, exact in ((0.2, 1.0), (0.6, 2.0)):
        rows += [
            fake(MILP, exact, part=part, **solved), fake(TWO_STAGES, 1.1 * exact, part=part),
            fake("uniform bf16", 4 * exact, part=part), fake("uniform int8", 9 * exact, part=part),
            fake(NO_CASTS, 8 * exact, 1.2 if part < 0.5 else 1.0, part > 0.5, part=part),
        ]  # fmt: skip
    found = summary(rows)
    entry = found["clusters"]["made up"]["a"]
    assert entry[TWO_STAGES]["factor"] == pytest.approx(1.1) and entry[BEST_UNIFORM][
        "factor"
    ] == pytest.approx(4)
    assert entry[NO_CASTS]["met"] == 1 and entry[NO_CASTS]["factor"] == pytest.approx(8)
    verdicts = found["verdicts"]
    assert verdicts["baselines_that_add_less"] == []
    assert verdicts["casts_left_out_misses_by"] == pytest.approx(0.2)
    rows.append(fake("another", 0.5, part=0.2))
    assert summary(rows)["verdicts"]["baselines_that_add_less"][0][3:] == ["another", 0.5]
    shown = tables(summary(rows))
    text = as_markdown(shown[0])
    assert f"| {NO_CASTS} | 8.00 (1 of 2) |" in text
    assert len(shown) == 1


def test_a_tiny_model_is_measured_posed_and_judged(fast_products, tmp_path, monkeypatch):
    def make():
        layer = torch.nn.Linear
        return torch.nn.Sequential(
            layer(32, 64), torch.nn.GELU(), layer(64, 64), torch.nn.GELU(), layer(64, 4)
        )

    def batch(seed, step, rank):
        draw = torch.Generator().manual_seed(seed + 10 * step)
        return torch.randn(16, 32, generator=draw), torch.randint(0, 4, (16,), generator=draw)

    tiny = Workload(
        "tiny",
        lambda seed: seeded(make, seed),
        batch,
        torch.nn.functional.cross_entropy,
        lambda num: [],
        1,
        1e-3,
        "",
    )
    monkeypatch.setattr(bases, "subject", lambda name: tiny)
    bases.measure("tiny", tmp_path / "tiny", rounds=1)
    problems = bases.problems("tiny", tmp_path / "tiny")
    assert [one.kind for one in problems].count("simulated devices") == len(bases.SIMULATED)
    here, *simulated = problems
    infer, train = (here.basis.profiles[name] for name in (HALF, HERE))
    assert (
        infer.emulated_share == 0.5 and infer.ops["4"]["fp32"].total_s == 2 * train.ops["4"]["fp32"].total_s
    )
    assert {p.origin for p in simulated[-1].basis.profiles.values()} == {"simulated"}
    assert simulated[0].basis.graph.batch_shapes[0] == (16 * bases.GPU_BATCH, 32)
    monkeypatch.setattr(methods, "allocate", lambda *a, **k: pytest.fail("not again"))
    monkeypatch.setattr(compare_methods, "targets", lambda basis, parts: [])
    assert compare_methods.judge(here) == []
