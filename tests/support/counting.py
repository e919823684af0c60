"""How much work a call is, without a clock: the Python functions that it calls. The same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], Any]) -> int:
    """The number of Python functions called while `work` runs, itself included."""
    count = 0

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
