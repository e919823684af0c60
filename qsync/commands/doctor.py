"""`qsync doctor`: report devices and kernels, with reasons for missing ones; compile ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands import doctor_tables as tables
from qsync.commands.options import Json, console, print_json, print_lines, working
from qsync.errors import QSyncError
from qsync.records.json_files import check_folder


def doctor(
    as_json: Json = False,
    build: Annotated[
        bool, typer.Option("--build", help="Compile every kernel of this machine's devices, and time none.")
    ] = False,
    architecture: Annotated[
        list[str] | None,
        typer.Option(help="With --build: a GPU's compute capability (7.5), here or not. Repeatable."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write this machine's fingerprint for a bug report, in three minutes: kernels, rates, "
            "errors of predictions, operators in a step and alone. It names no user, host or path.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Report this machine's devices, precisions and chosen kernels, with reasons for missing ones."""
    if architecture and not build:
        raise QSyncError("--architecture has no effect without --build; add --build")
    if build and report is not None:
        raise QSyncError("--build times nothing, and --report is of times; give one of them")
    if build:
        _build(architecture, as_json)
        return
    if report is not None:
        _report(report, as_json)
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


def _report(path: Path, as_json: bool) -> None:
    """Write the fingerprint of this machine, whole or not at all."""
    check_folder("--report", path.parent)
    if path.is_dir():
        raise QSyncError(f"--report {path} is a folder; name a file in it")
    with working("taking this machine's fingerprint, in three minutes at most") as say:
        from qsync.commands.machine_report import take_fingerprint

        found = take_fingerprint(say)
    found.save(path)
    if as_json:
        print_json(found.to_json())
    else:
        print_lines(*(f"no time was left for {what}" for what in found.left_out), f"written to {path}")


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
