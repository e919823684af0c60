"""Export of a timeline as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsync.records.json_files import write_json
from qsync.records.profiles import shown
from qsync.replayer.explanation.measured_steps import MeasuredSteps, split_of
from qsync.replayer.timeline import Event, Timeline

_THREADS = ("compute", "communication")
_NUM_MEASURED_STEPS = 20  # steps at the end of the log that are drawn


def write_trace(timeline: Timeline, path: str | Path, measured: MeasuredSteps | None = None) -> Path:
    """Write a timeline as trace events in one atomic write, one process per device class.

    Times are in microseconds, as the format requires. Compute and communication are two threads of a process,
    since they overlap. Measured steps follow the simulated one, one process per rank.

    >>> write_trace(replay(graph, plan, profiles, cluster), "trace.json")
    """
    events = trace_events(timeline)
    if measured is not None:
        events += measured_events(measured, len(timeline.classes))
    return write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the trace events of a timeline: names of processes and threads, then its activities."""
    process = {name: number for number, name in enumerate(timeline.classes)}
    entries: list[dict[str, Any]] = []
    for name, pid in process.items():
        entries += _titles(
            pid, f"{shown(name, timeline[name].origin)} x {timeline[name].num_ranks} (simulated)"
        )
    entries += [_slice(process[event.device_class], event) for event in timeline.events]
    return entries


def measured_events(measured: MeasuredSteps, first_pid: int = 0) -> list[dict[str, Any]]:
    """Return the trace events of the last measured steps, one process per rank.

    Ranks log durations, not times of day. The backward passes of all ranks end together, with the last
    all-reduce. This common end aligns the ranks; the phases before it are drawn in order, the host's first.
    """
    entries: list[dict[str, Any]] = []
    for rank, name in enumerate(measured.classes):
        entries += _titles(first_pid + rank, f"rank {rank}, {name} (measured)")
    reduced_s, before = 0.0, [0.0] * len(measured.classes)
    for number in list(measured.steps)[-_NUM_MEASURED_STEPS:]:
        ranks = split_of(measured.steps[number])
        optimizers = [parts.pop("optimizer") for parts in ranks]
        reduced_s += max(b + sum(parts.values()) for b, parts in zip(before, ranks, strict=True))
        before = optimizers
        for rank, parts in enumerate(ranks):
            now_s = reduced_s - sum(parts.values())
            for phase, seconds in (*parts.items(), ("optimizer", optimizers[rank])):
                kind = "communication" if phase in ("wait", "exposed communication") else phase
                event = Event(measured.classes[rank], f"{phase}, step {number}", kind, now_s, seconds)
                entries.append(_slice(first_pid + rank, event))
                now_s += seconds
    return entries


def _titles(pid: int, title: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": title}},
        *(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
            for tid, thread in enumerate(_THREADS)
        ),
    ]


def _slice(pid: int, event: Event) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": int(event.kind == "communication"), "name": event.name,
        "cat": event.kind, "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6,
    }  # fmt: skip
