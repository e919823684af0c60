"""Run the command `qsync` as `python -m qsync`."""

from __future__ import annotations

from qsync.commands.main import main

main()
