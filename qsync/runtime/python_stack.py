"""Give a function room on Python's stack for its callees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Eight-byte entries of the frame: its stack chunk is 512 KiB, of which callees have half.
_NUM_ENTRIES = 31_800

Function = TypeVar("Function", bound=Callable[..., object])


def with_room(function: Function) -> Function:
    """Give a function so large a frame that its callees fit into the same chunk of Python's stack.

    Python maps its stack in chunks of 16 KiB and unmaps a chunk when its last frame ends (CPython,
    `_PyThreadState_PushFrame`). If a chunk ends just below a loop, every call in the loop maps and unmaps
    one: 8 us each, 24 ms of a 190 ms step measured (Swin in `int8_all`). This depends on the number of values
    in the rewritten graph, and so on the plan. A larger frame gets a larger chunk.
    """
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _NUM_ENTRIES)
    return function
