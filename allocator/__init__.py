"""Choosing which operators run in which precision on each device class, with proof of it. No torch."""

from qsync.allocator.explanation.certificate import Certificate, check_plan
from qsync.allocator.explanation.lowering_reasons import Reason, explain
from qsync.allocator.explanation.plan_warnings import doubts
from qsync.allocator.explanation.shadow_prices import Alternative, ShadowPrice, shadow_prices
from qsync.allocator.explanation.unsupported import Refusal, refusals
from qsync.allocator.levers.search import search
from qsync.allocator.op_groups import alike
from qsync.allocator.planner import allocate
from qsync.allocator.tradeoff import fastest_within, frontier
from qsync.allocator.uniform import uniform

__all__ = [
    "Alternative", "Certificate", "Reason", "Refusal", "ShadowPrice", "alike", "allocate", "check_plan",
    "doubts", "explain", "fastest_within", "frontier", "refusals", "search", "shadow_prices", "uniform",
]  # fmt: skip
