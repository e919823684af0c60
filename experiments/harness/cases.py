"""Cases: functions that mimic users' operations, their outcomes, and the messages that users read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from qsync.errors import shortened
from qsync.experiments.harness.tables import table_of

WORKS, REFUSED, WARNS, SILENT = "works", "refused", "warns", "SILENT"
_SHOWN = 300  # characters of a message
Do = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of users, its expected outcome, and a part of the expected message.

    Its numbers may differ by `tolerance`.
    """

    group: str
    name: str
    do: Do
    verdict: str = WORKS
    says: str = ""
    tolerance: float = 0.0
    tested: bool = False  # run in the quick round of tests, too, which skips most cases

    def became(self, verdict: str, sentence: str = "", **found: Any) -> dict[str, Any]:
        """Return the actual outcome beside the expected one."""
        case = {"group": self.group, "name": self.name, "expected": self.verdict, "says": self.says}
        return {**case, "tolerance": self.tolerance, "verdict": verdict, "sentence": sentence, **found}


class Cases(list[Case]):
    """Cases in the order of registration."""

    def case(
        self, group: str, name: str, tolerance: float = 0.0, *, refused: str = "", warns: str = "",
        logs: str = "", tested: bool = False,
    ) -> Callable[[Do], Do]:  # fmt: skip
        """Register a function as a case; it must work, unless `refused` or `warns` gives a message."""
        verdict = REFUSED if refused else WARNS if warns else WORKS

        def listed(do: Do) -> Do:
            self.append(Case(group, name, do, verdict, refused or warns or logs, tolerance, tested))
            return do

        return listed


def cases_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of outcomes; cases of one group, verdict and sentence share a row."""
    said = [(row["group"], row["verdict"], shortened(row["sentence"], _SHOWN, quote=False)) for row in rows]
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row, key in zip(rows, said, strict=True):
        merged.setdefault(key, []).append(row["name"])
    cells = [(group, "; ".join(names), verdict, text) for (group, verdict, text), names in merged.items()]
    return table_of(title, ("", "case", "", "sentence"), cells, left=4)
