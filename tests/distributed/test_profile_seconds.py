"""How long a job profiles for: 30 seconds, or what the environment says."""

from __future__ import annotations

import pytest

from qsync.distributed import ddp_profiling
from qsync.errors import FormatError


@pytest.mark.parametrize(("text", "seconds"), [("", ddp_profiling.PROFILE_S), ("2.5", 2.5), ("0", 0.0)])
def test_the_environment_says_how_long_to_profile(monkeypatch, text, seconds):
    monkeypatch.setenv("QSYNC_PROFILE_S", text)
    assert ddp_profiling.profile_seconds() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_to_profile_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("QSYNC_PROFILE_S", text)
    with pytest.raises(FormatError, match=f"QSYNC_PROFILE_S must be a number of seconds, found '{text}'"):
        ddp_profiling.profile_seconds()
