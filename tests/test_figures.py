"""Pictures are written whole, for models of one to many operators, and refuse what they cannot draw."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from qsync.errors import QSyncError
from qsync.figures import churn, memory, pareto, precision_map
from qsync.figures import timeline as timeline_figure
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.records.graph import Op, OpGraph
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.profiles import Sensitivity
from qsync.replayer import Peak
from qsync.replayer.churn import ChurnEvent, play
from qsync.replayer.timeline import ClassTimeline, Event, Timeline


def op_names(num_ops: int) -> list[str]:
    parts = ("attention.qkv", "attention.sdpa", "attention.proj", "mlp.fc", "mlp.proj")
    names = [f"blocks.{i // 5}.{parts[i % 5]}" for i in range(num_ops - 1)]
    return [*names, "head"]


def records(num_ops: int) -> tuple[Plan, OpGraph, Sensitivity]:
    """A plan of three classes with made-up precisions and variances."""
    draw = random.Random(0)
    names = op_names(num_ops)
    ops = tuple(Op(name, "linear", Role.ADJUSTABLE, ("x",), (), "fp32", (4, 4)) for name in names)
    graph = OpGraph("Gpt", (), ops)
    low = (Precision.INT8, Precision.BF16, Precision.FP32)
    classes = {
        "strong": ClassPlan(dict.fromkeys(names, Precision.FP32)),
        "middle": ClassPlan({name: draw.choice(low[1:]) for name in names}),
        "weak": ClassPlan({name: draw.choice(low) for name in names}),
    }
    omega = {}
    for name in names:
        int8 = 10 ** draw.uniform(-7, -2)
        omega[name] = {"fp32": 0.0, "bf16": int8 / 40, "int8": int8}
    return Plan("Gpt", graph.hash, classes), graph, Sensitivity(graph.hash, "variance", omega)


def lanes(num_events: int) -> list[timeline_figure.Lane]:
    """Two ranks whose step has `num_events` operators; the second is half as fast and hardly waits."""
    result: list[timeline_figure.Lane] = []
    for label, pace in (("rank 0, strong", 1.0), ("rank 1, weak\nemulated", 1.6)):
        now, events = 0.0, []
        for kind, length in (("host", 0.02), ("forward", 0.25), ("loss", 0.02), ("backward", 0.5)):
            for _ in range(num_events if kind in ("forward", "backward") else 1):
                duration = pace * length / (num_events if kind in ("forward", "backward") else 1)
                events.append((kind, now, duration))
                if kind in ("forward", "backward") and pace > 1:
                    events.append(("cast", now + duration, duration / 8))
                now += duration * (1.125 if pace > 1 else 1)
        events += [("wait", now, 1.44 - now), ("communication", 1.38, 0.1), ("optimizer", 1.48, 0.02)]
        result.append({"label": label, "events": events})
    return result


def check_png(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 5000
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("num_ops", [1, 25, 150])
def test_allocation(tmp_path, num_ops):
    check_png(precision_map.allocation(*records(num_ops), tmp_path / "allocation.png", emulated={"weak"}))


@pytest.mark.parametrize("num_events", [1, 25, 150])
def test_timelines(tmp_path, num_events):
    path = tmp_path / "timeline.png"
    check_png(timeline_figure.timelines(lanes(num_events), path, simulated=True, emulated=True))


def test_a_replayed_timeline_has_a_lane_per_class(tmp_path):
    events = (Event("strong", "fc", "forward", 0.0, 0.1), Event("weak", "fc", "cast", 0.0, 0.2))
    classes = {name: ClassTimeline(0.1, 0.0, 0.0, 0.0, 0.0, 10, 2) for name in ("strong", "weak")}
    timeline = Timeline(0.2, classes, events)
    drawn = timeline_figure.lanes_of(timeline, emulated={"weak"})
    assert [lane["label"] for lane in drawn] == ["strong × 2", "weak × 2\nemulated"]
    check_png(timeline_figure.timelines(drawn, tmp_path / "timeline.png", simulated=True))


def test_blocks_end_with_their_first_numbers():
    names = ("encoder.layer.3.attention.query", "stages.1.0.shortcut.0", "head", "blocks.2")
    assert [precision_map.block_of(name) for name in names] == [
        "encoder.layer.3",
        "stages.1.0",
        "head",
        "blocks.2",
    ]


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """Every figure that is written, as it was written."""
    written, save = [], Figure.savefig

    def saved(self: Figure, *args: object, **options: object) -> None:
        written.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return written


def trade() -> list[Plan]:
    """Three plans, each slower than the one before; the last adds no variance."""
    names, plans = op_names(10), []
    for step_s, added, bound, num_lowered in (
        (0.1, 4e-3, 3e-3, 8),
        (0.15, 1e-4, 9e-5, 4),
        (0.2, 0.0, 0.0, 0),
    ):
        low = {name: Precision.INT8 if i < num_lowered else Precision.FP32 for i, name in enumerate(names)}
        classes = {
            "strong": ClassPlan(dict.fromkeys(names, Precision.FP32), Predicted(0.1, 0.0, 1, 0.0)),
            "weak": ClassPlan(low, Predicted(step_s, 0.0, 1, added), origin="what if"),
        }
        plans.append(Plan("Gpt", "0", classes, step_s, bound=bound))
    return plans


def test_the_trade_numbers_its_plans_and_names_the_classes(tmp_path, figures):
    check_png(pareto.draw(trade(), tmp_path / "frontier.png"))
    above, below = figures[0].axes
    assert [text.get_text() for text in above.texts] == ["1", "2", "3: none"]
    assert above.collections[0].get_offsets()[:2].tolist() == [[100.0, 4e-3], [150.0, 1e-4]]
    assert [list(line.get_ydata()) for line in below.lines] == [[0.0, 0.0, 0.0], [80.0, 40.0, 0.0]]
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["strong", "weak (what if)"]
    assert above.get_legend() is not None  # the bound, which the first plan is not at
    proved = [replace(plan, bound=plan.added_variance) for plan in trade()]
    pareto.draw(proved, tmp_path / "frontier.png")
    assert figures[1].axes[0].get_legend() is None


def filled() -> dict[str, Peak]:
    """Two classes, one near its budget."""
    curve = {part: [10, 20, 10] for part in ("throughout", "casts", "saved", "transient")}
    return {
        "near": Peak("near", 100_000_000, {"parameters": 80_000_000}, curve),
        "far": Peak("far", 8_000_000_000, {"parameters": 80_000_000}, curve),
    }


def test_memory_is_drawn_against_its_budget(tmp_path, figures):
    check_png(memory.steps(filled(), tmp_path / "memory.png"))
    near, far = figures[0].axes
    assert near.get_title("left") == "near: 80 MB at most, margin included; 80 % of its budget"
    assert far.get_title("left") == "far: 80 MB at most, margin included; 1 % of its budget"
    assert [len([line for line in axes.lines if line.get_label() == "budget"]) for axes in (near, far)] == [
        1,
        0,
    ]


def test_the_allocation_names_where_the_costs_of_a_class_come_from(tmp_path, figures):
    plan, graph, sensitivity = records(5)
    weak = replace(plan["weak"], origin="what if")
    plan = replace(plan, classes={**plan.classes, "weak": weak})
    precision_map.allocation(plan, graph, sensitivity, tmp_path / "allocation.png", emulated={"middle"})
    labels = [label.get_text().splitlines()[0] for label in figures[0].axes[0].get_yticklabels()]
    assert labels == ["strong", "middle (emulated)", "weak (what if)"]


def test_what_cannot_be_drawn_is_said_and_leaves_no_file(tmp_path):
    path = tmp_path / "picture.png"
    plan, _, sensitivity = records(1)
    with pytest.raises(QSyncError, match="no operator whose precision"):
        precision_map.allocation(plan, OpGraph("Empty", (), ()), sensitivity, path)
    with pytest.raises(QSyncError, match="at least one lane"):
        timeline_figure.timelines([], path, simulated=True)
    with pytest.raises(QSyncError, match="'sleep'; use one of loading, host"):
        timeline_figure.timelines([{"label": "rank 0", "events": [("sleep", 0, 1)]}], path, simulated=True)
    with pytest.raises(QSyncError, match=r"the picture's name must end in \.png, found .*; rename it"):
        memory.steps(filled(), tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_churn_is_drawn_with_a_row_of_marks_for_each_kind_of_event(tmp_path, figures):
    events = [ChurnEvent(10.5, "kill", "a:0"), ChurnEvent(15.0, "join", "a:0"), ChurnEvent(60.0, "end")]
    report = play(events, {"a": 2}, lambda ranks: 2.0 / ranks["a"], samples_per_step=4)
    check_png(churn.throughput(report, events, tmp_path / "churn.png", model="Gpt"))
    above, below = figures[0].axes
    assert [label.get_text() for label in below.get_yticklabels()] == ["kill", "join"]
    assert below.get_xlabel() == "seconds since the start" and above.get_ylim()[1] == pytest.approx(4 * 1.08)
    quiet = [ChurnEvent(3 * 86400.0, "end")]
    report = play(quiet, {"a": 1}, lambda ranks: 2.0)
    check_png(churn.throughput(report, quiet, tmp_path / "churn.png", model="Gpt"))
    assert figures[1].axes[1].get_xlabel() == "days since the start"
