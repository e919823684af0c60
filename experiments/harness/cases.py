"""Cases: functions that do what users do, what becomes of each, and what its user then reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from qsync.errors import shortened
from qsync.experiments.harness.tables import table_of

WORKS, REFUSED, WARNS, SILENT = "works", "refused", "warns", "SILENT"
_SHOWN = 300  # characters of a sentence
Do = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that users do, its verdict, and a part of the sentence that they read.

    Numbers of it may differ by `tolerance`.
    """

    group: str
    name: str
    do: Do
    verdict: str = WORKS
    says: str = ""
    tolerance: float = 0.0
    tested: bool = False  # in the quick round of tests, which does not run all cases

    def became(self, verdict: str, sentence: str = "", **found: Any) -> dict[str, Any]:
        """Return what became of it, beside what should."""
        case = {"group": self.group, "name": self.name, "expected": self.verdict, "says": self.says}
        return {**case, "tolerance": self.tolerance, "verdict": verdict, "sentence": sentence, **found}


class Cases(list[Case]):
    """Cases in the order in which they are listed."""

    def case(
        self, group: str, name: str, tolerance: float = 0.0, *, refused: str = "", warns: str = "",
        logs: str = "", tested: bool = False,
    ) -> Callable[[Do], Do]:  # fmt: skip
        """List a function as a case; it works, unless it is `refused` or `warns` with such a sentence."""
        verdict = REFUSED if refused else WARNS if warns else WORKS

        def listed(do: Do) -> Do:
            self.append(Case(group, name, do, verdict, refused or warns or logs, tolerance, tested))
            return do

        return listed


def cases_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return what became of every case."""
    cells = [
        (row["group"], row["name"], row["verdict"], shortened(row["sentence"], _SHOWN, quote=False))
        for row in rows
    ]
    return table_of(title, ("", "case", "", "sentence"), cells, left=4)
