"""Every experiment again: commands that exist, pages that they write, states, and the papers' table."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import typer

from qsync.errors import QSyncError
from qsync.experiments.harness import Page, bar
from qsync.experiments.harness.tables import as_markdown
from qsync.experiments.results import __main__ as results
from qsync.experiments.results import commands
from qsync.experiments.results.all_bars import all_bars_table, bars_of
from qsync.experiments.results.commands import RERUNS, Rerun, Run, Size, runs_of
from qsync.experiments.results.papers import CLAIMS, papers_table, rows_of
from qsync.experiments.speedup.report import STEP_ERROR

PAGES = Path(__file__).parents[2] / "docs" / "results"
RUNS = [(name, run) for size in Size for name, run in runs_of(size).items()]
COMMANDS = sorted({(name, command) for name, run in RUNS for command in run.commands})


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_takes_its_options(name, command, tmp_path):
    module, *options = command
    if module == "qsync":
        app = import_module("qsync.commands.main").app
    else:
        found = import_module(module)
        main = (found if hasattr(found, "main") else import_module(f"{module}.__main__")).main
        app = typer.Typer()
        app.command()(main)
    given = [option.replace("OUT", str(tmp_path)) for option in options]
    parsed = typer.main.get_command(app)
    if module == "qsync":
        parsed, given = parsed.commands[given[0]], given[1:]
    parsed.make_context(name, given)  # raises for an option that is not there


def test_sizes_keep_their_time_and_a_quick_run_publishes_nothing():
    assert [list(runs_of(size)) for size in Size][2] == sorted(
        RERUNS, key=lambda name: RERUNS[name].whole.minutes
    )
    for size, minutes in ((Size.QUICK, 45), (Size.NIGHT, 9 * 60)):
        assert 0 < sum(run.minutes for run in runs_of(size).values()) <= minutes
    assert set(runs_of(Size.NIGHT)) < set(runs_of(Size.DEEP))
    quick = [command for run in runs_of(Size.QUICK).values() for command in run.commands]
    assert not any("--publish" in command or "mixed.publish" in command[0] for command in quick)


def test_every_page_of_figures_is_written_by_an_experiment():
    written = {rerun.page for rerun in RERUNS.values()}
    by_hand = {"index.md", "gpu.md"}  # what `make gpu` finds is published where there is a GPU
    assert {page.name for page in PAGES.glob("*.md")} - by_hand <= written
    for page in PAGES.glob("*.md"):
        assert "<!-- " in page.read_text() and ":begin -->" in page.read_text(), page


@pytest.mark.parametrize("module", sorted({command[0] for _, command in COMMANDS}))
def test_every_page_has_its_markers(module):
    found = import_module(module if module != "qsync" else "qsync.experiments.results.__main__")
    found = found if hasattr(found, "main") else import_module(f"{module}.__main__")
    page = getattr(found, "_PAGE", None)
    if isinstance(page, Page):
        text = (PAGES.parents[1] / page.path).read_text()
        for one in (page, page.beside()) if hasattr(found, "Beside") else (page,):
            assert f"<!-- {one.marker}:begin -->" in text and f"<!-- {one.marker}:end -->" in text
    elif page is not None:  # the experiment names the markers when it writes
        assert ":begin -->" in (PAGES.parents[1] / page).read_text()


CODE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True, exist_ok=True)
with (folder / "runs").open("a") as log: log.write("x")
if (folder.parent / "fails").exists(): sys.exit(3)
(folder / "figures.json").write_text('{"commit": "abc", "bars": []}')
"""


@pytest.fixture
def reruns(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one_run.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    run = Run(1, (("one_run", "OUT"),))
    rerun = Rerun("index.md", run, nightly=True)
    reruns = {"one run": rerun, "other": Rerun("index.md", run, quick=run, nightly=True)}
    monkeypatch.setattr(results, "RERUNS", reruns)
    monkeypatch.setattr(commands, "RERUNS", reruns)
    return tmp_path / "out"


def states(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "figures.json").read_text())["experiments"]
    return found


def test_what_is_finished_is_not_run_again_and_what_failed_is(reruns):
    results.main(reruns, only=["one run"])
    results.main(reruns, listed=True)
    assert states(reruns) == {"one run": "finished", "other": "not finished"}
    (reruns / "fails").touch()
    with pytest.raises(QSyncError, match="other did not finish"):
        results.main(reruns)
    assert states(reruns)["one run"] == "finished" and "exit code 3" in states(reruns)["other"]
    (reruns / "fails").unlink()
    results.main(reruns)
    assert set(states(reruns).values()) == {"finished"}
    assert [(reruns / name / "runs").read_text() for name in ("one-run", "other")] == ["x", "xx"]
    results.main(reruns, only=["other"], fresh=True)
    assert (reruns / "other" / "runs").read_text() == "x" and set(states(reruns).values()) == {"finished"}
    results.main(reruns, listed=True, publish=True)  # a list is no result to publish
    assert (reruns / "other" / "runs").read_text() == "x"


def test_a_quick_run_is_no_part_of_the_whole(reruns):
    results.main(reruns, size=Size.QUICK)
    assert states(reruns) == {"other": "finished"} and (reruns / "quick" / "other" / "runs").is_file()
    results.main(reruns)
    assert states(reruns) == {"one run": "finished", "other": "finished"}
    assert (reruns / "other" / "runs").read_text() == "x"


SPEEDUP = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True, exist_ok=True)
bar = {"name": NAME, "measured": 0.031, "limit": 0.05, "holds": True, "at_least": False}
figures = {"commit": "abc", "machine": {"processor": "a chip"}, "bars": [bar]}
(folder / "figures.json").write_text(json.dumps(figures))
"""


def test_a_row_stays_published_until_its_experiment_is_measured_again(reruns, tmp_path, monkeypatch):
    page, kept = tmp_path / "index.md", tmp_path / "index.json"
    page.write_text("Results\n\n<!-- results:begin -->\n<!-- results:end -->\n")
    monkeypatch.setattr(results, "_PAGE", page)
    monkeypatch.setattr(results, "_KEPT", kept)
    (tmp_path / "code" / "speedup_run.py").write_text(SPEEDUP.replace("NAME", repr(STEP_ERROR)))
    rerun = Rerun("index.md", Run(1, (("speedup_run", "OUT"),)))
    monkeypatch.setattr(results, "RERUNS", results.RERUNS | {"speedup": rerun})
    results.main(reruns, only=["speedup"], publish=True)
    written = page.read_text()
    assert "| median 3.1% | speedup | a chip, abc |" in written
    results.main(tmp_path / "another", only=["one run"], publish=True)
    assert page.read_text() == written
    (tmp_path / "code" / "speedup_run.py").write_text(
        SPEEDUP.replace("NAME", repr(STEP_ERROR)).replace("0.031", "0.012").replace("abc", "def")
    )
    results.main(reruns, only=["speedup"], publish=True, fresh=True)
    assert "| median 1.2% | speedup | a chip, def |" in page.read_text()
    assert json.loads(kept.read_text())["papers"].keys() == {
        "QSync (IPDPS 2024): the same, of every way to train"
    }
    assert "| speedup | promises that hold | 1 | 1 |  | a chip, def |" in page.read_text()


def test_failing_promises_come_first_and_each_experiment_says_how_many_hold():
    bars = [bar("slow", 2.5, 2), bar("fast", 1, 2), bar("not measured", None, 2)]
    of = {"machine": {"processor": "a chip"}, "commit": "abc", "commits_of_pieces": ["abc", "def"]}
    kept = bars_of({"z": {"bars": bars} | of, "a": {"bars": bars[1:]} | of, "none": {}})
    found = list(zip(*(column.cells for column in all_bars_table(kept).columns), strict=True))
    assert found == [
        ("z", "slow", "2.5", "2", "NO", "a chip, abc, def"),
        ("a", "promises that hold", "1", "1", "", "a chip, abc, def"),
        ("z", "promises that hold", "1", "2", "", "a chip, abc, def"),
    ]


def test_an_experiment_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(QSyncError, match="unknown experiment 'speeed'"):
        results.main(tmp_path, only=["speeed"])


def runs(*accuracies: float) -> dict[str, dict[str, float]]:
    return {str(i): {"final_accuracy": one, "final_loss": 1 - one} for i, one in enumerate(accuracies)}


def test_the_papers_table_reads_the_figures_of_their_experiments():
    step = {"ddp": 2.0, "weak_16": 1.2, "weak_int8": 0.9, "all_int8": 0.95, "qsync": 1.0}
    task = {
        "methods": {name: {"step_s": seconds} for name, seconds in step.items()},
        "runs": {"qsync": runs(0.9, 0.92, 0.91), "weak_int8": runs(0.89, 0.911, 0.9)},
    }
    growing = {"start": "expanded", "items": {"mean": 0.69, "least": 0.64, "most": 0.74}}
    found = {
        "accuracy": {"tasks": {"digits": task}},
        "speedup": {"bars": [{"name": STEP_ERROR, "measured": 0.031}, {"name": "other", "measured": 1}]},
        "growing": {"summary": {"gpt": {"methods": {"a": growing}}}},
        "unseen": {
            "families": {"vit": {"ranks": {"errors": [0.004, -0.012]}}, "bart": {"speed": {}}},
            "held_out": {"t5": {"ranks": {"errors": [-0.05]}}, "gpt2": {"ranks": {"failed": "a sentence"}}},
        },
    }
    of = {"commit": "abc", "machine": {"processor": "a chip"}}
    table = papers_table(rows_of({name: one | of for name, one in found.items()}))
    text = as_markdown(table)
    assert text.count("median 1.2%, 95th percentile 5.0%") == 2  # QSync's row, and dPRO's
    assert "median 3.1%" in text and not rows_of({"speedup": {"bars": []}})
    assert text.count("| a chip, abc |") == 5
    assert "+0.97 to +0.97 points over 1 tasks" in text
    assert "69% (64% to 74%)" in text and len(table.rows) == len(CLAIMS)
    assert {claim.experiment for claim in CLAIMS} <= set(RERUNS)
