"""Training while cards leave and return: a trace of events, played over the steps of every membership. Pure.

`trace`             events from a file, or drawn from failure rates
`play`              the events played: goodput, and seconds lost by cause
`membership_steps`  the step time of a plan at any membership
"""

from qsync.replayer.churn.membership_steps import MembershipSteps
from qsync.replayer.churn.play import ChurnCosts, ChurnReport, play
from qsync.replayer.churn.trace import ChurnEvent, RandomChurn, read_events

__all__ = ["ChurnCosts", "ChurnEvent", "ChurnReport", "MembershipSteps", "RandomChurn", "play", "read_events"]
