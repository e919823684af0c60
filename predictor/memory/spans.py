"""The record of one tensor's lifetime in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Bytes of a tensor alive from time `birth` to `death`, both included; their use and saver.

    `part` is one of "casts", "saved" and "transient".
    """

    num_bytes: int
    birth: int
    death: int
    part: str = "transient"
    saver: str = ""
