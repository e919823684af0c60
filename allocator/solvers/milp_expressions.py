"""A mixed-integer linear program, written in sums of binary variables and solved by HiGHS.

Conjunctions of binary variables are linear: z = a and b becomes z <= a, z <= b, z >= a + b - 1. If a and b
are integer, z need not be declared integer (Glover and Woolsey, 1974).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # its import takes half a second, and only solving needs it
    from scipy.optimize import LinearConstraint, OptimizeResult

FloatArray = npt.NDArray[np.float64]

# Names of scipy.optimize.milp's status codes; "unsolved" means numerical trouble without a result.
OPTIMAL, TIME_LIMITED, INFEASIBLE, UNSOLVED = "optimal", "time-limited", "infeasible", "unsolved"
STATUSES = {0: OPTIMAL, 1: TIME_LIMITED, 2: INFEASIBLE, 3: UNSOLVED, 4: UNSOLVED}


@dataclass(slots=True)
class Sum:
    """A linear expression: constant + sum of coefficient x column."""

    terms: dict[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def add(self, other: Sum, times: float = 1.0) -> None:
        """Add a multiple of another sum to this one."""
        self.constant += times * other.constant
        own = self.terms
        for column, coefficient in other.terms.items():
            own[column] = own.get(column, 0.0) + times * coefficient

    def at(self, point: FloatArray) -> float:
        """Return the value of the expression at `point`, the values of all columns."""
        return self.constant + sum(c * float(point[column]) for column, c in self.terms.items())

    @property
    def settled(self) -> bool:
        """Return whether the expression is a constant."""
        return not self.terms


ZERO, ONE = Sum(), Sum(constant=1.0)


Row = tuple[Sum, float, float]  # an expression, its least and its most


def total(parts: Iterable[Sum]) -> Sum:
    """Return the sum of all parts."""
    found = Sum()
    for part in parts:
        found.add(part)
    return found


def difference(one: Sum, other: Sum) -> Sum:
    """Return `one` minus `other`."""
    found = Sum(dict(one.terms), one.constant)
    found.add(other, -1.0)
    return found


def negated(binary: Sum) -> Sum:
    """Return 1 minus a binary variable."""
    return difference(ONE, binary)


class IntegerProgram:
    """An integer program: columns in [0, 1], rows, and the cost to minimise."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[Row] = []

    @property
    def num_columns(self) -> int:
        """Return the number of variables."""
        return len(self._cost)

    def choice(self, costs: Sequence[float]) -> list[Sum]:
        """Add one binary variable per alternative, with the row that exactly one of them is 1."""
        if len(costs) == 1:
            return [ONE]
        binaries = [self._column(cost, True) for cost in costs]
        self.row(total(binaries), 1.0, 1.0)
        return binaries

    def binary(self) -> Sum:
        """Add a continuous variable in [0, 1], which further rows must force to 0 or 1."""
        return self._column(0.0, False)

    def row(self, what: Sum, least: float = -np.inf, most: float = np.inf) -> None:
        """Add the row least <= what <= most."""
        self._rows.append((what, least, most))

    def at_most(self, small: Sum, large: Sum) -> None:
        """Add the row small <= large."""
        self.row(difference(large, small), least=0.0)

    def all_of(self, binaries: Iterable[Sum]) -> Sum:
        """Return a variable that is 1 if all binaries are 1, else 0."""
        open_ = [binary for binary in binaries if not (binary.settled and binary.constant == 1.0)]
        if any(binary.settled for binary in open_):
            return ZERO
        if len(open_) < 2:
            return open_[0] if open_ else ONE
        found = self.binary()
        for binary in open_:
            self.at_most(found, binary)
        self.row(difference(total(open_), found), most=len(open_) - 1.0)
        return found

    def any_of(self, binaries: Iterable[Sum]) -> Sum:
        """Return a variable that is 1 if any binary is 1, else 0."""
        return negated(self.all_of([negated(binary) for binary in binaries]))

    def parted(self, binaries: Sequence[Sum], by: Sum) -> list[Sum]:
        """Return the conjunction of each binary with `by`; the sum of the binaries is 1.

        z_k <= x_k and sum of z_k = by: tighter than a conjunction alone.
        """
        if by.settled:
            return [binary if by.constant else ZERO for binary in binaries]
        parts = [self.binary() for _ in binaries[1:]]
        parts.append(difference(by, total(parts)))
        for part, binary in zip(parts, binaries, strict=True) if len(parts) > 1 else ():
            self.at_most(part, binary)
        if len(parts) > 1:
            self.at_most(ZERO, parts[-1])
        return parts

    def at_least_any(self, binaries: Sequence[Sum]) -> Sum:
        """Return a variable that is at least each binary, so that its minimum is 1 if any of them is 1."""
        if any(binary.settled and binary.constant == 1.0 for binary in binaries):
            return ONE
        open_ = [binary for binary in binaries if not binary.settled]
        if len(open_) < 2:
            return open_[0] if open_ else ZERO
        found = self.binary()
        for binary in open_:
            self.at_most(binary, found)
        return found

    def at_least_all(self, binaries: Iterable[Sum]) -> Sum:
        """Return a variable that is at least 1 if all binaries are 1, and else at least 0."""
        open_ = [binary for binary in binaries if not (binary.settled and binary.constant == 1.0)]
        if len(open_) < 2:
            return open_[0] if open_ else ONE
        found = self.binary()
        self.row(difference(total(open_), found), most=len(open_) - 1.0)
        return found

    def solve(
        self,
        cost: Sum | None = None,
        *,
        also: Sequence[Row] = (),
        gap: float = 1e-9,
        time_limit_s: float | None = None,
    ) -> OptimizeResult:
        """Minimise `cost` (None: the cost of the choices) under all rows and the rows `also`, by scipy."""
        from scipy.optimize import Bounds, milp

        rows = [*self._rows, *also]
        weights = np.array(self._cost)
        if cost is not None:
            weights = np.zeros(self.num_columns)
            weights[list(cost.terms)] = list(cost.terms.values())
        options: dict[str, float] = {"mip_rel_gap": gap}
        if time_limit_s is not None:
            options["time_limit"] = max(time_limit_s, 0.01)
        with _without_c_output():
            return milp(
                weights,
                integrality=np.array(self._whole, dtype=np.int8),
                bounds=Bounds(0.0, 1.0),
                constraints=[self._matrix(rows)] if rows else [],
                options=options,
            )

    def _column(self, cost: float, whole: bool) -> Sum:
        self._cost.append(cost)
        self._whole.append(whole)
        return Sum({len(self._cost) - 1: 1.0})

    def _matrix(self, rows: Sequence[Row]) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        start = np.cumsum([0, *(len(what.terms) for what, _, _ in rows)])
        columns = np.fromiter((c for what, _, _ in rows for c in what.terms), dtype=np.int64, count=start[-1])
        values = np.fromiter(
            (v for what, _, _ in rows for v in what.terms.values()), dtype=np.float64, count=start[-1]
        )
        matrix = csr_array((values, columns, start), shape=(len(rows), self.num_columns))
        least = np.array([low - what.constant for what, low, _ in rows])
        most = np.array([high - what.constant for what, _, high in rows])
        return LinearConstraint(matrix, least, most)


@contextmanager
def _without_c_output() -> Iterator[None]:
    """Discard C code's output to standard output.

    HiGHS occasionally prints a line despite its options, which would break the output of `--json`.
    """
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C's own buffer may still hold output
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
