"""The choice of a precision for each operator on each device class. No torch.

`planner`             from records to a plan: `allocate`
`constraints`         what the caller constrains
`problem`             what may be chosen, and the variance that each choice adds
`block_levers`        what blocks may do to take less memory
`op_groups`           operators that run alike, or share a cast
`search_state`        the assignment of every class during a search
`solvers/`            fastest start, the exact solver, recovery
`pareto`              plans from the least step to the least variance
`uniform`             one precision wherever possible, to compare with
`compression_choice`  how each bucket of gradients travels
`fit`                 whether a batch fits, and the ways to make it fit
`verdict`             what a plan makes beside other ways to use the cards
`levers/`             search over batch shares, passes, buckets, recomputation and saving less
`explanation/`        certificates, reasons, shadow prices, what-ifs, warnings, unsupported precisions
"""

from qsync.allocator.explanation.certificate import Certificate, check_plan
from qsync.allocator.explanation.lowering_reasons import Reason, explain
from qsync.allocator.explanation.plan_state import Alternative
from qsync.allocator.explanation.plan_warnings import find_warnings
from qsync.allocator.explanation.shadow_prices import ShadowPrice, shadow_prices
from qsync.allocator.explanation.unsupported import UnsupportedPrecision, unsupported_precisions
from qsync.allocator.explanation.what_if import WhatIf, what_ifs
from qsync.allocator.fit import Fit, find_fit
from qsync.allocator.levers.search import check_options, search
from qsync.allocator.op_groups import matched_groups
from qsync.allocator.pareto import fastest_within, frontier
from qsync.allocator.planner import allocate
from qsync.allocator.uniform import uniform
from qsync.allocator.verdict import find_verdict

__all__ = [
    "Alternative", "Certificate", "Fit", "Reason", "ShadowPrice", "UnsupportedPrecision", "WhatIf",
    "allocate", "check_options", "check_plan", "explain", "fastest_within", "find_fit", "find_verdict",
    "find_warnings", "frontier", "matched_groups", "search", "shadow_prices", "uniform",
    "unsupported_precisions", "what_ifs",
]  # fmt: skip
