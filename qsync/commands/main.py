"""The program `qsync`: its commands, its version and its errors.

Every command takes --json. Bad input is one sentence on stderr and exit code 2, and nothing is written.
Importing a command does not import torch; doctor, demo, learn and expand import it when they run.
"""

from __future__ import annotations

import sys
from errno import ENOSPC
from typing import Annotated

import typer

import qsync
from qsync.commands import (
    checkpoint,
    demo,
    diff,
    doctor,
    expand,
    explain,
    fit,
    learn,
    lighthouse,
    links,
    plan,
    replay,
    report,
)  # fmt: skip
from qsync.errors import QSyncError, shortened
from qsync.processes.exit_signals import exit_on_signals

app = typer.Typer(
    help="Train one model synchronously over unequal devices, and let nobody wait.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    doctor.doctor, demo.demo, learn.learn, plan.plan, fit.fit, expand.expand, explain.explain, replay.replay,
    report.report, links.links, diff.diff, checkpoint.checkpoint, lighthouse.lighthouse,
    lighthouse.release,
):  # fmt: skip
    app.command()(command)

# Newer typer bundles its own click, so click.UsageError would be another class.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_INTERRUPTED = 130  # the shells' exit code for Ctrl-C


def main() -> None:
    """Run the program: parse its arguments, run a command and exit with its code."""
    exit_on_signals()
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="qsync", standalone_mode=False)
        if code == _INTERRUPTED:  # typer has already caught Ctrl-C
            raise KeyboardInterrupt
    except QSyncError as error:
        _fail(str(error), 2)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context is not None else ""
        message = error.format_message()  # type: ignore[attr-defined]  # a click.UsageError
        _fail(shortened(message, 400, quote=False).rstrip(".") + hint, 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # otherwise Python complains again at exit
        sys.exit(1)
    except OSError as error:
        path = error.filename2 or error.filename  # the second file is the intended target of a rename
        if path is None and error.errno != ENOSPC:
            raise
        path = path or "what was printed"
        shown = shortened(str(path), 200, quote=False)
        _fail(f"cannot write or read {shown}: {error.strerror}; name another path", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print("qsync: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qsync {qsync.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one model synchronously over unequal devices, and let nobody wait."""


if __name__ == "__main__":
    main()
