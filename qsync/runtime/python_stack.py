"""Room on Python's stack for what a function calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Entries of eight bytes that a frame asks for: it gets a piece of 512 KiB, of which callees have half.
_NUM_ENTRIES = 31_800

Function = TypeVar("Function", bound=Callable[..., object])


def with_room(function: Function) -> Function:
    """Give a function a frame so large that its callees find room in the same piece of Python's stack.

    Python maps its stack in pieces of 16 KiB and unmaps a piece as soon as no frame is in it (CPython,
    `_PyThreadState_PushFrame`). Where a piece ends just below a loop, every call in the loop maps and unmaps
    one: 8 us each, 24 ms of a 190 ms step measured (Swin in `int8_all`). Whether that happens depends on how
    many values the rewritten graph holds, and so on the plan. A larger frame gets a larger piece.
    """
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _NUM_ENTRIES)
    return function
