"""From costs to a step: all ranks simulated from the profiles of their classes. Pure functions, no torch.

`simulate`          replay one step of all ranks
`synchronous_step`  where the classes of ranks meet, and how long a step takes
`check_records`     plan, graph, profiles and cluster belong together
`costs/`            prices of the nodes of a lowered graph: one by one, in arrays, by length
`communication`     DDP's buckets, and the time of an all-reduce
`events`            the events of one class, laid out in time
`timeline`          the record that replay returns
`explanation/`      critical path, phases, and predicted against measured steps
`chrome_trace`      a timeline as a Chrome trace
`memory_breakdown`  the uses of memory at the peak
`slowdown`          profiles as if a device were slower
`step_noise`        steps with noise on every rank
`exchange_calibration`  links and tolls as measured steps show them
`lazy_sequence`     a sequence computed at its first use
`levers/`           profiles under batch shares, passes and recomputation
`churn/`            training while cards leave and return
"""

from qsync.replayer.chrome_trace import write_trace
from qsync.replayer.communication import Bucket, buckets, cluster_all_reduce_s
from qsync.replayer.costs.class_costs import ClassCosts, cast_cost, run_cost
from qsync.replayer.explanation.critical_path import CriticalPath, find_critical_path
from qsync.replayer.levers.apply import profiles_under_levers, under_levers
from qsync.replayer.levers.batch_size import Recapture
from qsync.replayer.memory_breakdown import Peak, peaks
from qsync.replayer.simulate import changed_since_planned, replay
from qsync.replayer.slowdown import slowed
from qsync.replayer.step_noise import Variation, vary
from qsync.replayer.synchronous_step import GradientExchange, Work, starts_s, steady_step, step_time
from qsync.replayer.timeline import ClassTimeline, Event, Timeline

__all__ = [
    "Bucket", "ClassCosts", "ClassTimeline", "CriticalPath", "Event", "GradientExchange", "Peak",
    "Recapture", "Timeline", "Variation", "Work", "buckets", "cast_cost",
    "cluster_all_reduce_s", "find_critical_path", "changed_since_planned", "peaks", "replay", "run_cost",
    "slowed", "starts_s", "steady_step", "step_time", "profiles_under_levers", "under_levers",
    "vary", "write_trace",
]  # fmt: skip
