"""The run loop of experiments: pieces are kept, interrupted runs continue, figures name their origin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync.errors import MismatchError, QSyncError
from qsync.experiments.harness import experiment as experiment_module
from qsync.experiments.harness import provenance
from qsync.experiments.harness.cases import cases_table
from qsync.experiments.harness.experiment import Experiment, Page, bar, bars_table, show
from qsync.experiments.harness.measured_memory import saved_bytes
from qsync.experiments.harness.tables import markdown_table, table_of
from qsync.records.json_files import read_json, write_json


def test_an_interrupted_run_continues_with_what_is_missing(tmp_path):
    ran = []

    def run(number: int) -> int:
        if number == 2 and len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(number)
        return number**2

    with pytest.raises(KeyboardInterrupt):
        dict(Experiment("squares", tmp_path).pieces({f"of {n}": n for n in range(4)}, run))
    assert ran == [0, 1] and len(list((tmp_path / "pieces").iterdir())) == 2
    ran.append(-1)
    found = dict(Experiment("squares", tmp_path).pieces({f"of {n}": n for n in range(4)}, run))
    assert ran == [0, 1, -1, 2, 3] and found == {"of 0": 0, "of 1": 1, "of 2": 4, "of 3": 9}


def test_pieces_run_in_processes_of_their_own_and_are_kept(tmp_path):
    """What runs is a built-in, which a new process can import."""
    tasks = {f"of {n}": f"[{n} ** 2, __import__('os').getpid()]" for n in range(3)}
    found = dict(Experiment("squares", tmp_path).pieces(tasks, eval, processes=2))
    assert [found[name][0] for name in tasks] == [0, 1, 4]
    assert os.getpid() not in {process for _, process in found.values()}
    assert dict(Experiment("squares", tmp_path).pieces(tasks, eval)) == found


def test_what_is_there_is_measured_again_only_if_asked_for(tmp_path):
    assert Experiment("one", tmp_path).piece("a", lambda: 1) == 1
    assert Experiment("one", tmp_path).piece("a", lambda: 2) == 1
    assert Experiment("one", tmp_path, fresh=True).piece("a", lambda: 2) == 2
    Experiment("one", tmp_path).forget("a")
    assert Experiment("one", tmp_path).piece("a", lambda: 4) == 4


def test_a_piece_of_other_settings_is_refused(tmp_path):
    Experiment("one", tmp_path, seed=0, settings={"turns": 3}).piece("a", lambda: 1, plans=5)
    with pytest.raises(MismatchError, match="turns = 3, not 4; give another --out"):
        Experiment("one", tmp_path, seed=0, settings={"turns": 4}).piece("a", lambda: 1, plans=5)
    with pytest.raises(MismatchError, match="plans = 5, not 6"):
        Experiment("one", tmp_path, seed=0, settings={"turns": 3}).piece("a", lambda: 1, plans=6)


@pytest.mark.parametrize("lost", ["settings", "commit", "result"])
def test_a_piece_that_lacks_a_field_is_named(lost, tmp_path):
    Experiment("one", tmp_path).piece("a", lambda: 1)
    path = tmp_path / "pieces" / "a.json"
    write_json(path, {name: value for name, value in read_json(path).items() if name != lost})
    with pytest.raises(QSyncError, match="a.json is not a piece of an experiment; delete it, or use --fresh"):
        Experiment("one", tmp_path).piece("a", lambda: 2)
    assert Experiment("one", tmp_path, fresh=True).piece("a", lambda: 2) == 2


def test_results_that_find_no_room_are_one_sentence(tmp_path):
    experiment = Experiment("one", tmp_path)
    for name in ("pieces", "figures.json"):
        file = tmp_path / name
        file.touch() if name == "pieces" else file.mkdir()
    with pytest.raises(QSyncError, match="pieces/a.json cannot be written .*; make space there, or name"):
        experiment.keep("a", 1)
    with pytest.raises(QSyncError, match="figures.json cannot be written"):
        experiment.finish({})


def test_pieces_of_another_machine_keep_its_name(tmp_path, monkeypatch):
    here, real = [""], experiment_module.provenance

    def elsewhere(seed: int) -> dict[str, Any]:
        found = real(seed)
        return {**found, "machine": {**found["machine"], "processor": here[0]}}

    monkeypatch.setattr(experiment_module, "provenance", elsewhere)
    for here[0], piece in (("first", "a"), ("second", "b")):
        experiment = Experiment("one", tmp_path)
        experiment.piece("a", lambda: 1)
        experiment.piece(piece, lambda: 1)
        experiment.finish({})
    named = read_json(tmp_path / "figures.json")["machines_of_pieces"]
    assert [one.split(",")[0] for one in named] == ["first", "second"]
    assert " and second, torch" in (tmp_path / "figures.md").read_text()


def test_figures_say_where_they_are_from_and_what_was_promised(tmp_path):
    experiment = Experiment("one", tmp_path, seed=7, settings={"turns": 3})
    experiment.piece("a", lambda: 1)
    experiment.finish({"rows": [1]}, bars=[bar("time", 1.0, 2.0), bar("speed", 1.0, 2.0, at_least=True)])
    content = read_json(tmp_path / "figures.json")
    assert {"machine", "versions", "commit", "uncommitted_changes"} <= content.keys()
    assert (content["experiment"], content["seed"], content["turns"], content["rows"]) == ("one", 7, 3, [1])
    assert content["commits_of_pieces"] == [content["commit"]]
    assert content["bars"] == [
        {"name": "time", "measured": 1.0, "limit": 2.0, "at_least": False, "holds": True},
        {"name": "speed", "measured": 1.0, "limit": 2.0, "at_least": True, "holds": False},
    ]
    assert bar("equal", False, True)["holds"] is False and bar("missing", None, 1.0)["holds"] is None


def test_promises_show_failures_first_and_the_worst_of_a_kind():
    speeds = {"a": 1.2, "b": 1.05, "c": 0.8, "d": 1.1}
    bars = [
        bar("cases", 1, 0),
        *(bar(f"{name}: error", value, 2.0) for name, value in speeds.items()),
        bar("others: error", 3.0, 4.0),
        *(bar(f"{name}: speed", value, 1.0, at_least=True) for name, value in speeds.items()),
        *(bar(f"{name}: time", value, 1.0) for name, value in (("a", 0.5), ("b", None))),
        bar("a: size", 0.5, 2.0),
        bar("b: size", None, 2.0, holds=False),
    ]
    columns = bars_table(bars).columns
    assert list(zip(*(column.cells for column in columns), strict=True)) == [
        ("cases", "1", "0", "NO"),
        ("speed: worst of 4 (c)", "0.8", "1", "NO, 3 of 4"),
        ("size: worst of 2 (b)", "-", "2", "NO, 1 of 2"),
        ("error: worst of 4 (a)", "1.2", "2", "yes"),
        ("others: error", "3", "4", "yes"),
        ("time: worst of 2 (b)", "-", "1", "-"),
    ]


def test_cases_of_one_outcome_share_a_row():
    rows = [
        ("call", "a", "works", ""),
        ("call", "b", "refused", "no"),
        ("call", "c", "works", ""),
        ("copy", "d", "works", ""),
    ]
    keys = ("group", "name", "verdict", "sentence")
    found = cases_table("cases", [dict(zip(keys, row, strict=True)) for row in rows])
    assert list(zip(*(column.cells for column in found.columns), strict=True)) == [
        ("call", "a; c", "works", ""),
        ("call", "b", "refused", "no"),
        ("copy", "d", "works", ""),
    ]


def test_without_git_pieces_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Experiment("one", tmp_path).piece("a", lambda: 1) == 1
    kept = read_json(tmp_path / "pieces" / "a.json")
    assert (kept["commit"], kept["uncommitted_changes"]) == ("unknown", None)


def test_a_run_is_written_into_its_page_with_its_commits(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results:begin -->\nstale\n<!-- results:end -->\nafter\n")
    experiment = Experiment("one", tmp_path / "out")
    experiment.piece("a", lambda: 1)
    kept = next((tmp_path / "out" / "pieces").iterdir())
    kept.write_text(kept.read_text().replace(read_json(kept)["commit"], "0123abc"))
    experiment = Experiment("one", tmp_path / "out")
    tables = [table_of("numbers", ("", "found"), [["a", str(experiment.piece("a", lambda: 2))]])]

    def finish(**options: object) -> None:
        experiment.finish({}, bars=[bar("a", 1, 1)], tables=tables, **options)

    finish()
    assert "stale" in page.read_text()
    finish(page=Page(page, "On one thread."))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "| a | 1 |" in text and "On one thread." in text and "commit 0123abc." in text
    experiment.keep("b", 1)
    with pytest.raises(QSyncError, match=r"are of 0123abc and .*, and a page is of one"):
        finish(page=Page(page))
    assert page.read_text() == text
    finish()
    assert "commits 0123abc, " in (tmp_path / "out" / "figures.md").read_text()
    experiment = Experiment("one", tmp_path / "out")
    experiment.piece("a", lambda: 1)
    with pytest.raises(QSyncError, match="lacks <!-- other:begin -->"):
        finish(page=Page(page, marker="other"))
    with pytest.raises(QSyncError, match="page .* does not exist"):
        finish(page=Page(tmp_path / "nowhere.md"))


@pytest.mark.parametrize(
    ("settings", "pieces", "said"),
    [({}, 0, "has no finished piece"), ({"tiny": True}, 1, "--tiny must not be published")],
)
def test_a_page_keeps_what_it_says_where_nothing_was_measured(settings, pieces, said, tmp_path):
    page, before = tmp_path / "page.md", "<!-- results:begin -->\npublished\n<!-- results:end -->\n"
    page.write_text(before)
    experiment = Experiment("one", tmp_path / "out", settings=settings)
    for number in range(pieces):
        experiment.piece(str(number), lambda: 1)
    with pytest.raises(QSyncError, match=said):
        experiment.finish({}, page=Page(page))
    assert page.read_text() == before and not (tmp_path / "out" / "figures.json").exists()
    experiment.finish({})
    assert (tmp_path / "out" / "figures.json").is_file()


@pytest.mark.parametrize("name", ["unseen", "gpu"])
def test_a_report_of_an_empty_folder_is_refused(name, tmp_path):
    command = import_module(f"qsync.experiments.{name}.__main__")
    with pytest.raises(QSyncError, match="has no finished piece; run at least one, or give another --out"):
        command.main(out=tmp_path, kept=True)
    assert not list(tmp_path.iterdir())


def test_a_commit_that_is_made_meanwhile_is_not_what_is_measured(tmp_path, monkeypatch):
    experiment = Experiment("one", tmp_path)
    before = provenance.source()
    monkeypatch.setattr(provenance, "_git", lambda *arguments: "0123abc\n")
    experiment.piece("a", lambda: 1)
    experiment.finish({})
    for file in ("pieces/a.json", "figures.json"):
        content = read_json(tmp_path / file)
        assert {key: content[key] for key in before} == before


def test_a_table_is_the_same_in_the_terminal_and_in_markdown():
    rows = [["a", "1"], ["b", "2"]]
    assert markdown_table(("name", "value"), rows) == [
        "| name | value |", "|---|---|", "| a | 1 |", "| b | 2 |",
    ]  # fmt: skip
    assert table_of("title", ("name", "value"), rows).row_count == 2


def test_a_line_is_printed_as_it_is(capsys):
    show("install it: pip install 'qsync-train[test]'")
    assert "'qsync-train[test]'" in capsys.readouterr().out


def test_a_storage_saved_for_backward_counts_once_and_what_is_there_anyway_not_at_all():
    x, y = (torch.randn(10, 4, requires_grad=True) for _ in range(2))
    assert saved_bytes(lambda: x.exp() + x.exp()) == 2 * 160
    assert saved_bytes(lambda: x * y) == 320
    assert saved_bytes(lambda: x * y, [y]) == 160
    assert saved_bytes(lambda: x[:5] * x[5:]) == 160


PIECES = """
import os, sys, time
from pathlib import Path
from qsync.experiments.harness.experiment import Experiment

def wait(folder):
    (Path(folder) / f"pid-{os.getpid()}").touch()
    time.sleep(60)

if __name__ == "__main__":
    tasks = {str(number): sys.argv[1] for number in range(6)}
    list(Experiment("waiting", Path(sys.argv[1]) / "out").pieces(tasks, wait, 2))
"""


def test_processes_of_pieces_end_with_a_killed_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(PIECES)
    run = subprocess.Popen([sys.executable, script, tmp_path], stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    finally:
        run.kill()
        run.wait()
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert eventually(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds, seconds=60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


STARTED = """
import sys
from qsync.experiments.harness.ranks import run_on_ranks
from test_harness import wait_in_ranks
run_on_ranks(wait_in_ranks, {"folder": sys.argv[1]}, command="wait")
"""


def wait_in_ranks(config, place):
    """Say on disk that this rank runs, and wait."""
    Path(config["folder"], f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    time.sleep(120)


@pytest.mark.dist
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_an_interrupted_job_leaves_no_rank_and_says_nothing(how, tmp_path):
    """The whole group gets the signal, as a terminal sends it."""
    tests = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(tmp_path)], env=os.environ | {"PYTHONPATH": tests},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        # A file is there before its text is.
        assert eventually(lambda: len([path for path in tmp_path.glob("*.pid") if path.read_text()]) == 2)
        ranks = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    finally:
        os.killpg(process.pid, how)
        said = process.communicate(timeout=60)[1]
    assert said.count("Traceback") == (how is signal.SIGINT), said  # of this process's own KeyboardInterrupt
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
