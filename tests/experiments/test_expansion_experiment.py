"""compare_growth.py on tiny models: how runs begin, what is kept, what a curve is said to save."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from qsync.errors import MismatchError, QSyncError
from qsync.experiments.expansion import compare_growth
from qsync.experiments.expansion.growth_report import reached, summary
from qsync.experiments.expansion.growth_subjects import LARGE, SETTINGS, SOURCE, Sizes, setting, workload_of
from qsync.experiments.expansion.training_runs import Method, source_of
from qsync.experiments.harness.experiment import Experiment
from qsync.records.json_files import read_json

TINY = replace(
    setting("vit"),
    steps=8,
    source_steps=8,
    small=Sizes(16, 2, 2),
    large=Sizes(24, 3, 3),
    batch=8,
    evaluations=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs of a seed by every method."""
    found = tmp_path_factory.mktemp("expansion")
    experiment = Experiment("expansion", found)
    compare_growth.train_all(experiment, [(TINY, Method(start), 0) for start in ("scratch", "source")])
    compare_growth.train_all(experiment, [(TINY, Method("expanded", 0.5), 0)])
    return found


def kept(of, method, seed, folder):
    """A finished run of the folder, None if there is none."""
    return Experiment("expansion", folder).kept(compare_growth.name_of((of, method, seed)), **asdict(of))


def row(folder, start: str, ratio: float = 0.5) -> dict:
    found = kept(TINY, Method(start, ratio), 0, folder)
    assert found is not None
    return {**found, **found["result"]}


def test_a_run_has_its_curve_and_where_it_was_made(folder):
    scratch = row(folder, "scratch", 1.0)
    assert [point["step"] for point in scratch["curve"]] == [0, 2, 4, 6, 8]
    assert [point["items"] for point in scratch["curve"]] == [0, 16, 32, 48, 64]
    assert scratch["machine"]["torch"] and scratch["commit"]
    assert [point["step"] for point in row(folder, "expanded")["curve"]] == [0, 2, 4]


def test_growing_begins_where_the_source_ended(folder):
    source = row(folder, "source", 1.0)["curve"][-1]["heldout"]
    assert row(folder, "expanded")["curve"][0]["heldout"] == pytest.approx(source, abs=1e-5)


def test_the_source_sees_other_batches_than_the_large_model(folder):
    batch = workload_of(TINY).batch
    own, other, again = batch(0, 0, SOURCE), batch(0, 0, LARGE), batch(0, 0, LARGE)
    assert torch.equal(other[0], again[0]) and not torch.equal(own[0], other[0])
    assert own[0].shape == (8, 1, 16, 16)


def test_finished_runs_are_kept_and_those_of_other_settings_refused(folder, monkeypatch):
    tasks = [(TINY, Method("source"), 0), (TINY, Method("expanded", 0.5), 0)]
    monkeypatch.setattr(compare_growth, "run", lambda *task: pytest.fail("ran again"))
    rows = compare_growth.train_all(Experiment("expansion", folder), tasks, 1)
    assert rows[1] == kept(*tasks[1], folder)["result"] and [row["steps"] for row in rows] == [8, 4]
    with pytest.raises(MismatchError, match=r"with steps = 8, not 9; give another --out"):
        kept(replace(TINY, steps=9), Method("expanded", 0.5), 0, folder)
    assert kept(TINY, Method("expanded", 0.25), 0, folder) is None


def curve(*losses: float) -> list[dict]:
    return [{"step": at, "items": 10 * at, "heldout": loss} for at, loss in enumerate(losses)]


def test_a_loss_is_reached_where_the_curve_stays_below():
    assert reached(curve(4, 3, 1), 2) == 15
    assert reached(curve(4, 1, 3, 1), 2) == 25
    assert reached(curve(4, 3, 2.5), 2) is None
    assert reached(curve(1, 1), 2) == 0
    assert reached(curve(3, 2), 2) == 10


def made(start: str, losses: list[float], seed: int = 0, ratio: float = 1.0) -> dict:
    points = curve(*losses)
    return {
        "setting": {"workload": "gpt"}, "method": Method(start, ratio).name, "start": start, "ratio": ratio,
        "seed": seed, "curve": points, "steps": len(points) - 1, "parameters": 1,
    }  # fmt: skip


def made_rows() -> list[dict]:
    return [
        *(made("scratch", [6, 5, 4, 3, 2], seed) for seed in (0, 1)),
        *(made("source", [6, 4, 3], seed) for seed in (0, 1)),
        made("expanded", [3, 2, 1], 0, 0.5), made("expanded", [3, 3, 1], 1, 0.5),
        made("expanded", [4, 3, 2.5], 0, 0.3), made("expanded", [4, 3, 2], 1, 0.3),
    ]  # fmt: skip


def test_savings_are_shares_of_the_run_from_scratch():
    methods = summary(made_rows())["gpt"]["methods"]
    assert set(methods) == {"scratch", "expanded 0.5", "expanded 0.3"}
    expanded = methods["expanded 0.5"]
    # 10 and 15 of 40 tokens; the source took 20.
    assert expanded["items"] == {"mean": 0.6875, "least": 0.625, "most": 0.75}
    assert expanded["with_source"]["mean"] == 0.1875
    assert expanded["first"]["mean"] == 0.0 and expanded["final"]["mean"] == -1.0
    assert methods["scratch"]["with_source"]["mean"] == 0.0
    assert methods["expanded 0.3"]["reached"] == 1 and methods["expanded 0.3"]["items"] is None


@pytest.mark.deep
def test_the_command_runs_everything(tmp_path, monkeypatch):
    monkeypatch.setitem(SETTINGS, "vit", replace(TINY, batch=4, steps=4, source_steps=4))
    compare_growth.main(tmp_path, ["vit"], seeds=1, processes=1)
    content = read_json(tmp_path / "figures.json")
    assert [row["method"] for row in content["rows"]] == [
        "scratch", "source", "expanded 0.5", "expanded 0.3"
    ]  # fmt: skip
    assert (tmp_path / "figures.md").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ["bert"]}, "unknown workload 'bert'; choose from gpt, vit"),
        ({"workloads": ["gpt"], "seeds": 0}, "--seeds and --processes must be at least 1"),
    ],
)
def test_bad_options_are_said_before_anything_runs(tmp_path, options, message):
    with pytest.raises(QSyncError, match=message):
        compare_growth.main(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_source_comes_back_as_it_was_trained(folder):
    first, second = source_of(TINY, 0, folder), source_of(TINY, 0, folder)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
