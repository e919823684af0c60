"""An elastic job of real processes under real signals, and its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from lighthouses import lighthouse
from two_ranks import Program

from qsync.experiments.elastic import events, verdict
from qsync.experiments.elastic.card import NUM_SAMPLES, gradient_errors
from qsync.experiments.elastic.cluster import BATCH_SIZE, KILL, Cards

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("elastic")]


@pytest.mark.deep
def test_ten_events_lose_no_sample_and_no_bit(tmp_path):
    """Each event is waited for: a hang is an error. In FP64, so that gradients are compared to 1e-12."""
    settings = {"dtype": "float64", "lower": False, "width": 32, "keep_gradients": 40, "timeout_s": 3.0}
    with Cards(tmp_path / "job", **settings) as cards:
        happened = events.run(cards, 10, seed=7, say=print)
    logs = {name: cards.lines(name) for name in events.NAMES}
    found = verdict.judge(logs, BATCH_SIZE, NUM_SAMPLES, cards.settings["seed"])
    assert (found["replicas"], found["batch"], found["samples"]) == (0, 0, 0), found
    assert found["steps"] > 10 and {event["kind"] for event in happened} >= {"join", "kill"}
    errors = dict(gradient_errors(cards.folder, cards.settings))
    assert errors and max(errors.values()) < 1e-12


def said_by(cards, name):
    return "\n".join(line["text"] for line in cards.lines(name) if line.get("event") == "says")


def wait_until_said(cards, name, text):
    until = time.monotonic() + 120.0
    while text not in said_by(cards, name):
        assert cards.is_running(name) and time.monotonic() < until, said_by(cards, name)
        time.sleep(0.05)


class WarmCards(Cards):
    """Cards forked from the warm process."""

    def _run(self, name, config, environment):
        script = self.folder / f"{name}.py"
        module = "'qsync.experiments.elastic.card', run_name='__main__'"
        script.write_text(f"import runpy; runpy.run_module({module})")
        return Card(Program(script, environment, str(config)))


class Card:
    """A card as `subprocess` has processes."""

    def __init__(self, program):
        self._process = program.process
        self.kill, self.send_signal = program.kill, lambda number: os.kill(program.process.pid, number)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        return self._process.exitcode


@pytest.mark.slow
def test_planned_cards_swap_plans_and_the_last_one_waits_for_a_successor(command, tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.3")
    with WarmCards(tmp_path / "job", start_with=2, width=32, timeout_s=3.0, compression="int8") as cards:
        for name in ("train-0", "infer-1"):
            cards.start(name)
        cards.wait_for_step(["train-0", "infer-1"], time.time())
        code, _, said = command("release", "nobody", "--lighthouse", cards.address)
        assert code == 2 and "there is no card 'nobody' in the job" in said and "infer-1, train-0" in said
        _, printed, _ = command("release", "infer-1", "--lighthouse", cards.address, "--json")
        assert json.loads(printed) == {"released": "infer-1", "others": ["train-0"]}
        assert cards.processes["infer-1"].wait(timeout=60) == 0, cards.errors("infer-1")
        wait_until_said(cards, "train-0", "uses the plan for 1 train from step")
        cards.wait_for_step(["train-0"], time.time())
        assert command("release", "train-0", "--lighthouse", cards.address)[0] == 0
        wait_until_said(cards, "train-0", "waits for a card to take the job over")
        steps = len(cards.steps("train-0"))
        cards.start("infer-1")
        cards.wait_for_step(["infer-1"], time.time())
        assert cards.processes["train-0"].wait(timeout=60) == 0, cards.errors("train-0")
        assert len(cards.steps("train-0")) <= steps + 3  # it handed over, and trained no further
        cards.signal("infer-1", KILL)
    logs = {name: cards.lines(name) for name in ("train-0", "infer-1")}
    found = verdict.judge(logs, BATCH_SIZE, NUM_SAMPLES, 0)
    assert (found["replicas"], found["batch"], found["samples"]) == (0, 0, 0), found


@pytest.mark.parametrize(("arguments", "text"), [
    (("lighthouse", "--port", "99999"), "--port must be from 0 to 65535, found 99999"),
    (("lighthouse", "--wait", "0"), "--wait must be from 0.2 to 86400 seconds, found 0"),
    (("lighthouse", "--bind", "no such host"), "cannot listen at no such host:29510"),
    (("lighthouse", "--bind", "::1"), "--bind must be an IPv4 address, found '::1'"),
    (("release", "x"), "the lighthouse's address is missing; give it with --lighthouse or QSYNC_LIGHTHOUSE"),
    (("release", "x", "--lighthouse", "here"), "a lighthouse's address must be HOST:PORT, found 'here'"),
    (("release", "x", "--lighthouse", "127.0.0.1:9"), "no lighthouse answers at 127.0.0.1:9"),
])  # fmt: skip
def test_bad_input_of_the_commands_is_one_sentence(command, arguments, text, monkeypatch):
    monkeypatch.delenv("QSYNC_LIGHTHOUSE", raising=False)
    code, _, said = command(*arguments)
    assert code == 2 and text in said and len(said.strip().splitlines()) == 1, said


def test_a_lighthouse_at_all_addresses_says_one_that_other_machines_reach(tmp_path):
    started = [sys.executable, "-m", "qsync", "lighthouse", "--bind", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = server.stdout.readline()
        finally:
            server.kill()
    assert "lighthouse at " in said and "0.0.0.0" not in said


def test_a_port_that_is_taken_is_named(command):
    with lighthouse() as address:
        code, _, said = command("lighthouse", "--port", address.rpartition(":")[2])
    assert code == 2 and f"cannot listen at {address}" in said, said
