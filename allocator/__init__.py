"""Choosing which operators run in which precision on each device class, with proof of it. No torch."""

from qsync.allocator.baselines import uniform
from qsync.allocator.certificate import Certificate, check_plan
from qsync.allocator.greedy import allocate
from qsync.allocator.reasons import Reason, explain

__all__ = ["Certificate", "Reason", "allocate", "check_plan", "explain", "uniform"]
