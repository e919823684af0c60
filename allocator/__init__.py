"""Choosing which operators run in which precision on each device class, with proof of it. No torch."""

from qsync.allocator.baselines import uniform
from qsync.allocator.certificate import Certificate, check_plan
from qsync.allocator.doubts import doubts
from qsync.allocator.frontier import frontier
from qsync.allocator.reasons import Reason, explain
from qsync.allocator.refused import Refusal, refusals
from qsync.allocator.search import search
from qsync.allocator.shadow import Alternative, ShadowPrice, shadow_prices
from qsync.allocator.solving import allocate
from qsync.allocator.together import alike
from qsync.allocator.within import fastest_within

__all__ = [
    "Alternative", "Certificate", "Reason", "Refusal", "ShadowPrice", "alike", "allocate", "check_plan",
    "doubts", "explain", "fastest_within", "frontier", "refusals", "search", "shadow_prices", "uniform",
]  # fmt: skip
