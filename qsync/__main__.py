"""`python -m qsync` is the command `qsync`."""

from __future__ import annotations

from qsync.commands.main import main

main()
