"""From costs to a step: all ranks simulated from the profiles of their classes. Pure functions, no torch."""

from qsync.replayer.communication import Bucket, all_reduce_s, buckets, cluster_all_reduce_s
from qsync.replayer.costs import ClassCosts, cast_cost, run_cost
from qsync.replayer.levers.apply import under
from qsync.replayer.levers.batch_size import Sized
from qsync.replayer.memory_breakdown import Peak, peaks
from qsync.replayer.simulate import Exchange, Work, least_time, replay, starts_s, steady_step, step_time
from qsync.replayer.step_noise import Variation, vary
from qsync.replayer.timeline import ClassTimeline, Event, Timeline
from qsync.replayer.trace import write_trace

__all__ = [
    "Bucket",
    "ClassCosts",
    "ClassTimeline",
    "Event",
    "Exchange",
    "Peak",
    "Sized",
    "Timeline",
    "Variation",
    "Work",
    "all_reduce_s",
    "buckets",
    "cast_cost",
    "cluster_all_reduce_s",
    "least_time",
    "peaks",
    "replay",
    "run_cost",
    "starts_s",
    "steady_step",
    "step_time",
    "under",
    "vary",
    "write_trace",
]
