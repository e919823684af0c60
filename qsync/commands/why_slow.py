"""`qsync explain --critical-path`, `--help-most` and `--measured`: what makes the step, what would help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync.commands.options import console, print_json, print_lines
from qsync.errors import MismatchError
from qsync.records.profiles import Profile, shown

_NUM_LARGEST = 3  # events that a row of the critical path names


def why_slow(
    parts: tuple[Any, ...],
    limits: Mapping[str, Any],
    wants_path: bool,
    most: int | None,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Print the critical path, the changes that help most, and the steps that a job logged."""
    from qsync.allocator import what_ifs
    from qsync.replayer import find_critical_path

    graph, plan, profiles, _, cluster = parts
    path = find_critical_path(graph, plan, profiles, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    found = what_ifs(*parts, **limits) if most is not None else []
    logged = measured_beside_predicted(parts, measured) if measured is not None else {}
    if as_json:
        body: dict[str, Any] = {"simulated": True}
        body |= {"critical_path": path.to_json()} if wants_path else {}
        body |= {"help_most": [one.to_json() for one in found[:most]]} if most is not None else {}
        print_json(body | ({"measured": logged} if logged else {}))
        return
    if wants_path:
        console.print(path_table(path, profiles, {c.name: c.count for c in cluster.classes}))
    if most is not None:
        console.print(what_ifs_table(found, profiles, path.step_s, most))
    if logged:
        console.print(measured_table(logged))
        fine = (
            f"No fifty steps in a row take a tenth longer than predicted{machines_text(logged['slowdown'])}."
        )
        print_lines(*(logged["slower"] or [fine]))


def machines_text(slowdown: float) -> str:
    """Return what the machines' speed has to do with it, in words."""
    if slowdown < 1.05:
        return ""
    return f" on machines {slowdown:.2f} times slower than when they were profiled, as all of these are"


def path_table(path: Any, profiles: Mapping[str, Profile], counts: Mapping[str, int]) -> Table:
    """Return a row per run of events of one class and phase: seconds, part of the step, largest events."""
    table = Table(title=f"The critical path: what makes the step of {path.step_s * 1e3:.1f} ms (simulated)")
    for heading in ("who", "phase", "takes", "of the step", "of it slowed", "largest"):
        table.add_column(heading, justify="left" if heading in ("who", "phase", "largest") else "right")
    for run in path.stretches():
        name = run[0].device_class
        ranks = f", any of {counts[name]}" if counts.get(name, 1) > 1 else ""
        seconds, slowed_s = (sum(getattr(event, f) for event in run) for f in ("duration_s", "slowed_s"))
        largest = sorted(run, key=lambda event: -event.duration_s)[:_NUM_LARGEST]
        named = [
            f"{event.name.removesuffix(', backward')} {event.duration_s * 1e3:.2f} ms" for event in largest
        ]
        more = [f"{len(run) - len(largest)} more"] if len(run) > len(largest) else []
        table.add_row(
            shown(name, profiles[name].origin) + ranks if name in profiles else name, run[0].phase,
            f"{seconds * 1e3:.2f} ms", f"{seconds / path.step_s:.1%}",
            f"{slowed_s * 1e3:.2f} ms" if slowed_s > 1e-9 else "-", "\n".join(named + more),
        )  # fmt: skip
    return table


def what_ifs_table(found: Sequence[Any], profiles: Mapping[str, Profile], step_s: float, most: int) -> Table:
    """Return a row per change, the most seconds won first; changes of like operators share a row."""
    table = Table(title=f"What would shorten the step of {step_s * 1e3:.1f} ms (simulated)")
    for heading in ("what", "class", "wins", "of the step", "adds variance"):
        table.add_column(heading, justify="left" if heading in ("what", "class") else "right")
    alike: dict[tuple[str, str | None], list[Any]] = {}
    for one in found:
        alike.setdefault((re.sub(r"\d+", "*", one.what), one.device_class), []).append(one)
    for (_, name), those in list(alike.items())[:most]:
        one = those[0]
        too_large = f", {one.beyond_bytes / 2**20:.3g} MiB over the budget" if one.beyond_bytes else ""
        more = f" (and {len(those) - 1} like it)" if len(those) > 1 else ""
        table.add_row(
            one.what + more + too_large, shown(name, profiles[name].origin) if name else "-",
            f"{one.won_s * 1e3:.2f} ms", f"{one.won_s / step_s:.1%}",
            f"{one.variance:+.2e}" if one.kind == "precision" else "-",
        )  # fmt: skip
    return table


def measured_beside_predicted(parts: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """Return the phases of every rank of a logged job, measured and predicted, and what was slower."""
    from qsync.replayer import replay
    from qsync.replayer.explanation.measured_steps import MeasuredSteps, split
    from qsync.replayer.explanation.phases import expected

    graph, plan, profiles, _, cluster = parts
    logged = MeasuredSteps.load(folder)
    for rank, (name, calls) in enumerate(zip(logged.classes, logged.calls, strict=True)):
        if name not in plan.classes:
            raise MismatchError(
                f"rank {rank} of {folder} is of class {name!r}, which the plan lacks; give its plan"
            )
        planned = graph.num_calls * plan.levers_of(name).passes
        if calls != planned:
            raise MismatchError(
                f"rank {rank} of {folder} calls the model {calls} times a step, the plan {planned}; log such "
                "steps as were profiled"
            )
    timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    phases = expected(timeline)
    ranks = [
        {
            "rank": rank, "device_class": name, "measured": found,
            "predicted": split(phases[name], timeline[name].exposed_s, timeline[name].wait_s),
        }
        for rank, (name, found) in enumerate(zip(logged.classes, logged.by_rank(), strict=True))
    ]  # fmt: skip
    slower = [f"steps {first} to {last}: {drift}" for first, last, drift in logged.drifts(phases)]
    return {
        "num_steps": len(logged.steps), "ranks": ranks, "slower": slower,
        "slowdown": logged.slowdown(phases),
    }  # fmt: skip


def measured_table(logged: Mapping[str, Any]) -> Table:
    """Return a row per rank: medians of the logged steps, and the predictions."""
    table = Table(title=f"Medians of {logged['num_steps']} logged steps, ms: measured (predicted)")
    table.add_column("rank", no_wrap=True)
    names = list(logged["ranks"][0]["measured"])
    for name in (*names, "step"):
        table.add_column(name.partition(" ")[0], justify="right", no_wrap=True)
    for one in logged["ranks"]:
        both = [(one["measured"][name], one["predicted"][name]) for name in names]
        both.append((sum(m for m, _ in both), sum(p for _, p in both)))
        table.add_row(
            f"{one['rank']}, {one['device_class']}", *(f"{m * 1e3:.3g} ({p * 1e3:.3g})" for m, p in both)
        )
    return table
