"""What stands in a graph beside torch's operators: its borders, functions of the user, and all else."""

from __future__ import annotations

from qsync.operators.declaration import Operator, Role

INPUT = Operator(  # a tensor that enters a recomputed block
    kind="input", role=Role.FOLLOWING, calls={}, moves_nothing=True, passes_magnitude=True, saves_nothing=True
)
OUTPUT = Operator(
    kind="output", role=Role.FIXED, calls={}, moves_nothing=True, keeps_order=False, saves_nothing=True
)
# A user's torch.autograd.Function, and one that saves nothing for backward.
FUNCTION = Operator(kind="function", role=Role.FOLLOWING, calls={}, saves_by_rule=True)
UNSAVED_FUNCTION = Operator(
    kind="unsaved_function",
    role=Role.FOLLOWING,
    calls={},
    passes_magnitude=True,
    saves_nothing=True,
    saves_by_rule=True,
)
OTHER = Operator(kind="other", role=Role.FIXED, calls={}, passes_magnitude=True)  # any other call

OPERATORS = (INPUT, OUTPUT, FUNCTION, UNSAVED_FUNCTION, OTHER)
