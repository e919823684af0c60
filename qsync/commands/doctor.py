"""`qsync doctor`: what this machine has, and why any kernel is missing."""

from __future__ import annotations

from qsync.commands import doctor_tables as tables
from qsync.commands.options import Json, console, print_json, working


def doctor(as_json: Json = False) -> None:
    """Report what this machine has: devices, precisions, kernels chosen, and why any is missing."""
    with working("timing the kernels of this machine"):
        from qsync.commands import device_report

        found = device_report.examine()
    if as_json:
        print_json(found)
        return
    for line in tables.summary(found):
        console.print(line, highlight=False)
    for device in found["devices"]:
        for shown in (tables.kernels_table(device), *tables.remarks(device), tables.reasons_table(device)):
            console.print(shown, highlight=False)
