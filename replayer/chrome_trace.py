"""Export of a timeline as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsync.records.json_files import write_json
from qsync.records.profiles import shown
from qsync.replayer.timeline import Timeline

_THREADS = ("compute", "communication")


def write_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline as trace events, whole or not at all, one process per device class.

    Times are in microseconds, as the format requires. Compute and communication are two threads of a process,
    since they overlap.

    >>> write_trace(replay(graph, plan, profiles, cluster), "trace.json")
    """
    return write_json(path, {"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"})


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the trace events of a timeline: names of processes and threads, then the events."""
    label = "simulated" if timeline.simulated else "measured"
    process = {name: number for number, name in enumerate(timeline.classes)}
    entries: list[dict[str, Any]] = []
    for name, pid in process.items():
        title = f"{shown(name, timeline[name].origin)} x {timeline[name].num_ranks} ({label})"
        entries.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": title}})
        entries += [
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
            for tid, thread in enumerate(_THREADS)
        ]
    for event in timeline.events:
        entries.append(
            {
                "ph": "X",
                "pid": process[event.device_class],
                "tid": int(event.kind == "communication"),
                "name": event.name,
                "cat": event.kind,
                "ts": event.start_s * 1e6,
                "dur": event.duration_s * 1e6,
            }
        )
    return entries
