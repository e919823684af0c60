"""Tables of `qsync explain --critical-path` and `--help-most`: what makes the step, and what would help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from qsync.records.profiles import Profile, shown

_NUM_LARGEST = 3  # events that a row of the critical path names


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
            f"{escape(event.name.removesuffix(', backward'))} {event.duration_s * 1e3:.2f} ms"
            for event in largest
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
