"""Span: how long a tensor of a step lives, and why. A record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Bytes alive from `birth` to `death`, both included: what for (`part`) and which operator keeps it."""

    num_bytes: int
    birth: int
    death: int
    part: str = "transient"
    saver: str = ""
