"""The command line, in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run `qsync` with these arguments: (exit code, stdout, stderr)."""
    from qsync.commands import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qsync", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run
