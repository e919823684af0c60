"""The page of `qsync report`: complete, self-contained, and working in a real browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import cluster_of, encoder, profile_of, sensitivity_of

import qsync
from qsync.allocator import allocate
from qsync.commands import main
from qsync.figures import interactive, page
from qsync.records.graph import digest
from qsync.records.json_files import write_json
from qsync.records.plan_folder import Basis, save_plan
from qsync.runtime.wrapping import plan_of

SECTIONS = (
    "Precision of every operator", "What each precision would cost", "One step", "Step time against variance",
    "Memory over a step", "Predicted against measured",
)  # fmt: skip
RUN = {"measured_step_s": 0.9, "planned_step_s": 0.88, "training_losses": [[3.0, 2.0], [3.2, 2.2]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A plan, its basis, and the report of a demo of this plan."""
    made = tmp_path_factory.mktemp("plan")
    graph = replace(encoder(2), model="Encoder</script><script>alert(1)</script>")
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 1.6))}
    basis = Basis(graph, cluster_of(), profiles, sensitivity_of(graph))
    plan = allocate(graph, profiles, basis.sensitivity, basis.cluster)
    assert plan["infer"].lowered
    save_plan(made, plan, basis)
    report = {"plan": digest(plan.to_json()), "runs": {"alone": RUN, "qsync": RUN}}
    write_json(made / "figures.json", report)
    return made


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qsync", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_the_page_has_every_section_and_needs_nothing_else(folder, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    assert run(monkeypatch, folder, "--out", page) == 0
    text = page.read_text()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert [re.sub("<.*?>", "", found) for found in re.findall("<h2>.*?</h2>", own)] == [
        *SECTIONS,
        "Training losses",
    ]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in own
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", own)  # no plan.json lies beside this page
    assert "Steps of every run of the demo" in text
    assert "alert(1)" not in own.replace("&lt;script&gt;alert(1)", "")


def test_the_page_goes_by_the_plan_s_budgets_and_links_what_lies_beside_it(folder, tmp_path, monkeypatch):
    seen, made = [], shutil.copytree(folder, tmp_path / "made")
    memory = interactive.memory
    monkeypatch.setattr(
        interactive, "memory", lambda filled, graph: seen.append(filled) or memory(filled, graph)
    )
    plan = qsync.Plan.load(made / "plan.json")
    replace(plan, budgets={"infer": 123_456_789}).save(made / "plan.json")
    assert run(monkeypatch, made) == 0
    assert seen[0]["infer"].budget_bytes == 123_456_789 != seen[0]["train"].budget_bytes
    text = (made / "report.html").read_text()
    assert '<a href="plan.json">' in text and '<a href="figures.json">' in text and "trace.json" not in text


def test_a_page_says_what_is_missing(folder, tmp_path, monkeypatch):
    for file in folder.glob("*.json"):
        if file.name != "figures.json":
            shutil.copy(file, tmp_path)
    assert run(monkeypatch, tmp_path) == 0
    text = (tmp_path / "report.html").read_text()
    assert "No measured steps: train with qsync.hybrid(..., log_steps=FOLDER)" in text
    assert "No losses here" in text and "<h2>Memory over a step" in text


def test_a_report_of_another_plan_is_left_out(folder, tmp_path, monkeypatch, capsys):
    made = shutil.copytree(folder, tmp_path / "made")
    write_json(made / "figures.json", {"plan": "another", "runs": {"qsync": RUN}})
    assert run(monkeypatch, made) == 0
    assert "Steps of every run of the demo" not in (made / "report.html").read_text()
    assert "is of another plan" in capsys.readouterr().out


def test_a_plan_that_precisions_alone_do_not_reach_has_a_page(folder, tmp_path):
    plan = replace(qsync.Plan.load(folder / "plan.json"), budgets={"infer": 10})
    text = page.write(tmp_path / "page.html", plan, Basis.load(folder)).read_text()
    assert "No plan by precisions alone: infer: no assignment fits" in text and "Memory over a step" in text


def test_a_page_ends_in_html(folder, monkeypatch, capsys):
    plan = (folder / "plan.json").read_text()
    assert run(monkeypatch, folder, "--out", folder / "plan.json") == 2
    assert "--out must end in .html" in capsys.readouterr().err
    assert (folder / "plan.json").read_text() == plan


def test_the_trade_shows_the_variance_of_a_plan_that_adds_none(folder):
    plan = qsync.Plan.load(folder / "plan.json")
    none = replace(plan, classes={
        name: replace(own, predicted=replace(own.predicted, added_variance=0.0))
        for name, own in plan.classes.items()
    })  # fmt: skip
    line, chosen = interactive.trade([plan, none], plan).data
    shown = [f"{plan.added_variance:.2e}", "none"]
    assert [texts[0] for texts in line.customdata] == shown and chosen.customdata[0][0] == shown[0]
    assert "%{customdata[0]}" in line.hovertemplate and "%{y" not in line.hovertemplate
    zero = replace(none, classes={"train": none.classes["train"]})
    assert interactive.trade([zero], zero).layout.yaxis.showticklabels is False


@pytest.mark.parametrize(("decades", "step"), [(3, 1), (20, 3)])
def test_labels_of_many_decades_do_not_overlap(folder, decades, step):
    basis = Basis.load(folder)
    costs = {qsync.Precision.INT8: 1.0, qsync.Precision.BF16: 10.0**-decades}
    wide = replace(basis.sensitivity, omega={op.name: costs for op in basis.graph.adjustable})
    assert interactive.sensitivities(wide, basis.graph).layout.yaxis.dtick == step


def test_hybrid_writes_the_page_of_its_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "1")
    model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)

    def hybrid(**options: object) -> torch.nn.Module:
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        return qsync.hybrid(copy.deepcopy(model), batch, loss, cache_dir=tmp_path / "cache", **options)

    for wrong in ("report.pdf", 3):
        with pytest.raises(qsync.QSyncError, match="must end in .html, found .*; rename it"):
            hybrid(report=wrong)
    assert not (tmp_path / "cache").exists()
    planned = hybrid(report=tmp_path / "pages" / "report.html")
    assert "<h2>Memory over a step" in (tmp_path / "pages" / "report.html").read_text()
    with pytest.raises(qsync.QSyncError, match="use qsync report FOLDER"):
        hybrid(report=tmp_path / "report.html", plan=plan_of(planned))


def test_without_plotly_one_sentence_says_so(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    assert run(monkeypatch, folder, "--out", tmp_path / "page.html") == 2
    assert "pip install plotly" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_losses_of_the_accuracy_experiment_are_shown_and_with_json_where(
    folder, tmp_path, monkeypatch, capsys
):
    content = {"experiment": "accuracy", "tasks": {"gpt": {"curves": {"FP32": [[1.0, 3.0], [2.0, 2.5]]}}}}
    write_json(tmp_path / "figures.json", content)
    shown = tmp_path / "page.html"
    assert run(monkeypatch, folder, "--out", shown, "--accuracy", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(shown)}
    assert "<h2>Held-out loss: gpt" in shown.read_text()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("plan.json", [], "has no plan.json; give an output folder"),
        ("graph.json", [], "there is no graph.json beside"),
        ("profile-infer.json", [], "profile-infer.json"),
        (None, ["--accuracy", "{folder}"], "figures.json"),
        (None, ["--measured", "{folder}"], "has no step that every rank logged"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(folder, tmp_path, monkeypatch, capsys, change, options, said):
    for file in folder.glob("*.json"):
        if file.name != change:
            shutil.copy(file, tmp_path)
    assert run(monkeypatch, tmp_path, *(o.format(folder=tmp_path) for o in options)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("content", [{}, {"tasks": {"gpt": {"curves": 5}}}, {"tasks": [1]}])
def test_losses_that_are_none_are_one_sentence(folder, tmp_path, monkeypatch, capsys, content):
    write_json(tmp_path / "figures.json", {"experiment": "accuracy", **content})
    assert run(monkeypatch, folder, "--out", tmp_path / "page.html", "--accuracy", tmp_path) == 2
    assert "figures.json has no loss curves by task" in capsys.readouterr().err


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def browser(tmp_path):
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,1600",
        "--disable-background-networking", "--no-first-run", f"--user-data-dir={tmp_path / 'browser'}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no chromium and chromedriver on the PATH")
def test_in_a_browser_it_draws_shows_more_under_the_mouse_and_prints(folder, browser, monkeypatch):
    from selenium.webdriver.common.action_chains import ActionChains

    assert run(monkeypatch, folder) == 0
    browser.get((folder / "report.html").as_uri())
    plots = browser.find_elements("css selector", ".js-plotly-plot .main-svg")
    assert len(plots) >= len(SECTIONS)
    drag = browser.find_element("css selector", "#plot-0 .nsewdrag")
    ActionChains(browser).move_to_element_with_offset(drag, 5 - drag.size["width"] // 2, 10).perform()
    until = time.monotonic() + 20
    while not (shown := browser.find_elements("css selector", "#plot-0 .hoverlayer text")):
        assert time.monotonic() < until
    assert re.search("layer.0.query|layer.0.key", " ".join(one.text for one in shown))

    def ink() -> str:
        return browser.execute_script("return document.getElementById('plot-0').layout.font.color")

    light = ink()
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    while ink() == light:
        assert time.monotonic() < until
    assert len(browser.print_page()) > 10_000
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not complaints, json.dumps(complaints)
