"""The record of one tensor's life in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Bytes alive from `birth` to `death`, both included; their purpose, and the operator that saves them.

    `part` is one of "casts", "saved" and "transient".
    """

    num_bytes: int
    birth: int
    death: int
    part: str = "transient"
    saver: str = ""
