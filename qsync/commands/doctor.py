"""`qsync doctor`: report devices and kernels, with reasons for missing ones; compile ahead."""

from __future__ import annotations

from typing import Annotated

import typer

from qsync.commands import doctor_tables as tables
from qsync.commands.options import Json, console, print_json, working
from qsync.errors import QSyncError


def doctor(
    as_json: Json = False,
    build: Annotated[
        bool, typer.Option("--build", help="Compile every kernel of this machine's devices, and time none.")
    ] = False,
    architecture: Annotated[
        list[str] | None,
        typer.Option(help="With --build: a GPU's compute capability (7.5), here or not. Repeatable."),
    ] = None,
) -> None:
    """Report this machine's devices, precisions and chosen kernels, with reasons for missing ones."""
    if architecture and not build:
        raise QSyncError("--architecture has no effect without --build; add --build")
    if build:
        _build(architecture, as_json)
        return
    with working("timing the kernels of this machine"):
        from qsync.commands import device_report

        found = device_report.examine()
    if as_json:
        print_json(found)
        return
    for line in tables.summary(found):
        console.print(line)
    for device in found["devices"]:
        for shown in (tables.kernels_table(device), *tables.remarks(device), tables.reasons_table(device)):
            console.print(shown)


def _build(architectures: list[str] | None, as_json: bool) -> None:
    """Compile kernels ahead, show each library, and exit with code 1 on a failure."""
    with working("compiling kernels") as say:
        from qsync.backend import build_ahead

        wanted = build_ahead.checked(architectures or build_ahead.architectures_here())
        rows = []
        for row in build_ahead.build(wanted):
            rows.append(row)
            say(f"compiling kernels: {row['library']} for {row['device']} done")
    if as_json:
        print_json(rows)
    else:
        console.print(tables.build_table(rows))
    if any("why_not" in row for row in rows):
        raise typer.Exit(1)
