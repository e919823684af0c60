"""Progress without a terminal: a line for every piece of work, or one for work that comes in many pieces."""

from __future__ import annotations

import pytest

from qsync.processes.progress import shown_on_rank_zero


@pytest.mark.parametrize(("once", "lines"), [(False, 2), (True, 1)])
def test_a_title_is_a_line_each_time_or_once(capsys, once, lines):
    for _ in range(2):
        with shown_on_rank_zero(f"counting, {once}", once) as progress:
            progress("one, two")
    assert capsys.readouterr().err == f"counting, {once} ...\n" * lines


def test_other_ranks_say_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with shown_on_rank_zero("counting on another rank") as progress:
        progress("one")
    assert capsys.readouterr().err == ""
