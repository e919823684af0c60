"""No room grows unnoticed: its lines are written down in pyproject.toml."""

from __future__ import annotations

import pytest
from lines import allowed, counted


@pytest.mark.parametrize(("room", "lines"), counted().items(), ids=[*counted()])
def test_a_room_keeps_to_its_lines(room, lines):
    limit = allowed().get(room, 0)
    assert lines <= limit, (
        f"{room} has {lines:,} lines, [tool.qsync.lines] of pyproject.toml allows {limit:,}: delete some or "
        "raise it in this commit, and say why"
    )


def test_every_number_is_of_a_room():
    assert set(allowed()) == set(counted())
