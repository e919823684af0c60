"""Run an elastic job under random events; check its logs and compare the costs with restarts.

    python -m qsync.experiments.elastic --out FOLDER

`--publish` writes its table into `docs/results/elastic.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from qsync.errors import QSyncError
from qsync.experiments.elastic import churn, drift, events, restarts, saving, steady, verdict
from qsync.experiments.elastic.card import NUM_SAMPLES, gradient_errors
from qsync.experiments.elastic.cluster import BATCH_SIZE, Cards
from qsync.experiments.harness import Bar, Experiment, Fresh, Out, Page, Publish, bar, run_command, table_of
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.harness.tables import grouped

_PAGE = Page(Path("docs/results/elastic.md"), note="One thread a card.", marker="bars")
_FP64_EVENTS, _DRIFT_STEPS, _SEED = 10, 120, 0
_STEPS = 150  # of a round without events, in turns with hybrid
_WHOLE, _SHORT = (100, 3, 6), (25, 1, 2)  # events, rounds without events, restarts
Job = dict[str, Any]


def main(
    out: Out = Path("elastic"),
    short: Annotated[bool, typer.Option("--short", help="A quarter of the events; not published.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run four cards through random events; compare with hybrid, with restarts and with the simulation."""
    if short and publish:
        raise QSyncError("a run with --short must not be published; leave out --short or --publish")
    num_events, rounds, num_restarts = _SHORT if short else _WHOLE
    experiment = Experiment(
        "elastic", out, settings={"steps": _STEPS, "rounds": rounds}, fresh=fresh, seed=_SEED
    )
    work = out.absolute() / "work"
    with experiment.progress() as say:
        job = experiment.piece(
            "events", lambda: _run(work / "events", num_events, _SEED, say), events=num_events
        )
        exact = experiment.piece(
            "gradients",
            lambda: _run(
                work / "fp64", _FP64_EVENTS, _SEED + 1, say, dtype="float64", lower=False, keep_gradients=10
            ),
        )
        same = experiment.piece(
            "without events",
            lambda: steady.compare(work / "steady", _STEPS, rounds, width=1024, timeout_s=10.0),
        )
        drifted = experiment.piece(
            "drift",
            lambda: drift.measure(work / "drift", _DRIFT_STEPS, width=1024, timeout_s=10.0, by_speed=True),
        )
        again = experiment.piece("restarts", lambda: restarts.measure(work / "restarts", num_restarts, _SEED))
        saving_settings = {"rounds": 12, "weak_share": 1.0, "folder": str(work)}
        stalls = experiment.piece("saving", lambda: run_on_ranks(
            saving.measure, saving_settings, command="elastic", timeout_s=600.0
        ))  # fmt: skip
    simulated = churn.simulate(job)
    bars = [
        *_exactness(job, exact, same, num_events),
        *_times(job, same, again, simulated),
        *_drift(drifted),
        bar("a checkpoint every 20 steps, part of a step", stalls["stall"], 0.05),
    ]
    experiment.finish(
        {"by_event": grouped(job["events"], "kind"), "judged": job["judged"], "without_events": same,
         "drift": drifted, "restarts": again, "saving": stalls, "churn": simulated, "origin": "measured"},
        bars=bars, tables=[_costs(job["events"])], page=_PAGE if publish else None,
    )  # fmt: skip


def _run(folder: Path, num_events: int, seed: int, say: Any, **settings: Any) -> Job:
    """Run the events; return them with the checks of the cards' logs."""
    with Cards(folder, **settings) as cards:
        happened = events.run(cards, num_events, seed, say)
    logs = {name: cards.lines(name) for name in events.NAMES}
    chain = verdict.chain(logs)
    seconds, lost_s = verdict.lost_seconds(chain)
    return {
        "events": happened,
        "judged": verdict.judge(logs, BATCH_SIZE, NUM_SAMPLES, cards.settings["seed"]),
        "dropped": verdict.dropped_by_event(logs, happened), "seconds": seconds, "lost_s": lost_s,
        "swaps_ms": [
            float(ms) for text in _said(logs) for ms in re.findall(r"runs the plan.*\((\d+) ms\)", text)
        ],
        "joins_s": [second for lines in logs.values() for second in _joins(lines)],
        "steps": [[min(line["at"] for line in lines), len(lines[0]["cards"])] for lines in chain],
        "usual_s": verdict.usual_step_s(chain),
        "gradient_errors": dict(gradient_errors(cards.folder, cards.settings)),
    }  # fmt: skip


def _said(logs: Mapping[str, Sequence[Any]]) -> list[str]:
    return [line["text"] for lines in logs.values() for line in lines if line.get("event") == "says"]


def _joins(lines: Sequence[Any]) -> list[float]:
    """Return seconds from a process's start (torch imported) to the end of its first counted step."""
    found, started = [], None
    for line in lines:
        if line.get("event") == "started":
            started = line["at"]
        elif started is not None and "digest" in line and not line["behind"]:
            found.append(line["at"] - started)
            started = None
    return found[1:]  # the first waits for all cards and the first plan


def _recoveries(happened: Sequence[Any], *kinds: str) -> list[float]:
    return [event["recovered"] - event["at"] for event in happened if event["kind"] in kinds]


def _exactness(job: Job, exact: Job, same: Mapping[str, Any], num_events: int) -> list[Bar]:
    judged, both = job["judged"], (job, exact)
    return [
        bar("events that the job did not get over", num_events - len(job["events"]), 0),
        bar("steps with unequal replicas", sum(one["judged"]["replicas"] for one in both), 0),
        bar("steps with another batch", sum(one["judged"]["batch"] for one in both), 0),
        bar("samples lost or seen twice", sum(one["judged"]["samples"] for one in both), 0),
        bar("steps lost by an event, at most", max(job["dropped"]), 1),
        bar("gradient against one process, FP64", max(exact["gradient_errors"].values()), 1e-12),
        bar("losses and weights without events are hybrid's, bit by bit", same["bitwise_equal"], True),
        bar("epochs in the long run", judged["epochs"], 1, at_least=True),
    ]


def _times(
    job: Job, same: Mapping[str, Any], again: Mapping[str, Any], simulated: Mapping[str, Any]
) -> list[Bar]:
    happened = job["events"]
    deaths = _recoveries(happened, "kill", "two")
    gone = [event["gone"] - event["at"] for event in happened if event["gone"] is not None]
    lost_s = job["lost_s"] / len(happened)
    return [
        bar("step over hybrid's", same["ratio"], 1.03),
        bar("death to the next good step, median s", median(deaths), 3.0),
        bar("release, median s", median(gone), 1.0 + max(job["usual_s"].values())),
        bar("swap of a plan, longest ms", max(job["swaps_ms"]), 100.0),
        bar("newcomer in step, median s after its process has started", median(job["joins_s"]), 5.0),
        bar(
            "time lost to an event: restarts over elastic",
            again["lost_s_per_event"] / lost_s,
            3.0,
            at_least=True,
        ),
        bar("steps: simulated over real, off by", abs(simulated["ratio"] - 1), 0.1),
    ]


def _drift(drifted: Job) -> list[Bar]:
    told = [one["card"] == drift.SLOWED for one in drifted["told"]]
    kinds = ["slower" if "times as long" in one["text"] else "back" for one in drifted["told"]]
    own = [kind for kind, is_own in zip(kinds, told, strict=True) if is_own]
    return [
        bar(
            "a card slows down and recovers: planned for once, and back once", own == ["slower", "back"], True
        ),
        bar("other cards planned for as slower meanwhile", told.count(False), 0),
        bar("steps with unequal replicas meanwhile", drifted["unequal_steps"], 0),
    ]


def _costs(happened: Sequence[Any]) -> Table:
    rows = []
    for kind, found in sorted(grouped(happened, "kind").items()):
        seconds = _recoveries(found, kind)
        rows.append([kind, str(len(found)), f"{median(seconds):.2f}", f"{max(seconds):.2f}"])
    return table_of(
        "Until all other cards have taken a step", ("event", "times", "median s", "longest s"), rows
    )


if __name__ == "__main__":
    run_command(main)
