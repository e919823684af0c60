"""Which dimensions are one: a union-find over pieces of axes.

An axis of a tensor is a list of pieces, major first, whose sizes multiply to the axis's: an axis of 24 that a
view split into 4 heads of 6 is [4][6], and merging them back gives the same two pieces. A piece may itself be
a row of axes one after the other, as the queries, keys and values of one linear are. What an operator forces
to be equal is joined; splitting a piece splits it for everybody that shares it. An axis of one element has no
pieces.

    batch, length, width = axis(2), axis(5), axis(24)
    *_, heads, inner = regroup([batch, length, width], (2, 5, 4, 6))
    leaves(width) == heads + inner
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


class Untied(Exception):
    """Two axes were asked to be one that do not divide each other."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a piece cannot grow. Settled: no parameter was expected to grow there (a batch, pixels, a
    vocabulary); otherwise something was not understood, or is made anew in every forward.
    """

    reason: str
    settled: bool


class Piece:
    """One factor of an axis: joined to another, split into factors, a row of parts, or plain."""

    __slots__ = ("factors", "holds", "joined", "parts", "size")

    def __init__(self, size: int, holds: Iterable[Hold] = (), parts: list[Axis] | None = None) -> None:
        self.size = size
        self.holds = set(holds)
        self.joined: Piece | None = None
        self.factors: list[Piece] | None = None
        self.parts = parts

    def __repr__(self) -> str:
        return f"{self.size}{'*' if self.holds else ''}"

    @property
    def settled(self) -> bool:
        """Whether it is known not to grow: itself, or each of its parts."""
        if any(hold.settled for hold in self.holds):
            return True
        return self.parts is not None and all(settled(part) for part in self.parts)

    @property
    def all_holds(self) -> set[Hold]:
        """Why it cannot grow: itself, or a part of it; empty if it can."""
        return self.holds.union(*(piece.all_holds for part in self.parts or [] for piece in leaves(part)))


Axis = list[Piece]


def axis(size: int, holds: Iterable[Hold] = ()) -> Axis:
    """An axis about which nothing else is known."""
    return [Piece(size, holds)] if size != 1 else []


def root(piece: Piece) -> Piece:
    """The piece that stands for all that were joined with this one."""
    while piece.joined is not None:
        piece = piece.joined
    return piece


def leaves(axis: Axis) -> Axis:
    """The axis in the pieces that are known today, none of which is split into factors."""
    found: Axis = []
    for piece in axis:
        piece = root(piece)
        found += [piece] if piece.factors is None else leaves(piece.factors)
    return found


def stacked(axis: Axis) -> list[Axis]:
    """The axes that stand one after the other in this one, if its major piece is a row of parts."""
    known = leaves(axis)
    if not known or known[0].parts is None:
        return [known]
    return [leaves([*one, *known[1:]]) for part in known[0].parts for one in stacked(part)]


def size_of(axis: Axis) -> int:
    return prod(piece.size for piece in axis)


def settled(axis: Axis) -> bool:
    """Whether every piece is known not to grow; an axis of one element is."""
    return all(piece.settled for piece in leaves(axis))


def hold(axis: Axis, why: Hold) -> None:
    """Nothing in this axis grows, because of `why`."""
    for piece in leaves(axis):
        if why not in piece.holds:
            piece.holds.add(why)
            for part in piece.parts or []:
                hold(part, why)


def unify(a: Axis, b: Axis) -> None:
    """From now on the two axes, of one size, are the same. Raises Untied where their factors do not
    divide.
    """
    rest, other = leaves(a), leaves(b)
    if size_of(rest) != size_of(other):
        raise Untied(f"{size_of(rest)} and {size_of(other)}")
    while rest and other:
        x, y = rest.pop(0), other.pop(0)
        if x.size > y.size:
            x, *minor = _split(x, y.size)
            rest = leaves([*minor, *rest])
        elif y.size > x.size:
            y, *minor = _split(y, x.size)
            other = leaves([*minor, *other])
        # Splitting x may have split y: they share pieces.
        if root(x).factors or root(y).factors:
            rest, other = leaves([x, *rest]), leaves([y, *other])
        else:
            _join(x, y)


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a view: their pieces, in order, dealt out to the sizes of `shape`; raises Untied."""
    pool = [piece for axis in axes for piece in leaves(axis)]
    found: list[Axis] = []
    for size in shape:
        taken: Axis = []
        while size > 1:
            if not pool:
                raise Untied(f"nothing left for {size}")
            piece = pool.pop(0)
            if size % piece.size:
                pool = leaves([*_split(piece, size), *pool])
                # The pieces that were taken may have been split along.
                piece = pool.pop(0)
            taken.append(piece)
            size //= piece.size
        found.append(taken)
    return _kept(axes, found)


def _kept(axes: Sequence[Axis], found: Sequence[Axis]) -> list[Axis]:
    """The axes that a view made, those that it left alone as the very ones that it was given."""
    old = iter(axes)
    kept = []
    for new in found:
        rest = list(old)
        same = next((index for index, one in enumerate(rest) if new and leaves(one) == leaves(new)), None)
        kept.append(new if same is None else rest[same])
        old = iter(rest if same is None else rest[same + 1 :])
    return kept


def cut(axis: Axis, start: int, length: int) -> Axis:
    """The axis of elements [start, start + length) of `axis`, which becomes a row of parts; raises Untied
    where that would cut through the minor factors.
    """
    known = leaves(axis)
    if length == size_of(known):
        return known
    if settled(known):
        return [Piece(length, _shared(known))] if length != 1 else []
    major, minor = known[0], known[1:]
    inner = size_of(minor)
    if start % inner or length % inner:
        raise Untied(f"[{start}, {start + length}) of {known}")
    return _part(major, start // inner, length // inner) + minor


def row(parts: Sequence[Axis]) -> Axis:
    """The axis of a concatenation."""
    size = sum(size_of(part) for part in parts)
    if all(settled(part) for part in parts):
        return axis(size, _shared([piece for part in parts for piece in leaves(part)]) or _ONE)
    return [Piece(size, parts=list(parts))]


_ONE = (Hold("a row of single elements", True),)


def _shared(pieces: Axis) -> list[Hold]:
    return list(dict.fromkeys(hold for piece in pieces for hold in piece.holds if hold.settled))


def _split(piece: Piece, major: int) -> Axis:
    """The piece as `major` times the rest, for everybody that has it."""
    if piece.size % major:
        raise Untied(f"{piece.size} by {major}")
    if piece.parts is not None:
        if not piece.settled:
            raise Untied(f"a row of {len(piece.parts)} parts by {major}")
        piece.parts = None
    piece.factors = [Piece(major, piece.holds), Piece(piece.size // major, piece.holds)]
    return piece.factors


def _join(x: Piece, y: Piece) -> None:
    x, y = root(x), root(y)
    if x is y:
        return
    if x.parts is not None and y.parts is not None:
        _align(x, y)
        x, y = root(x), root(y)
    keep, gone = (y, x) if x.parts is None and y.parts is not None else (x, y)
    gone.joined = keep
    for why in gone.holds - keep.holds:
        hold([keep], why)
    for why in keep.holds - gone.holds:
        for part in gone.parts or []:
            hold(part, why)


def _align(x: Piece, y: Piece) -> None:
    """Two rows of parts become one: both are cut wherever either is, and the parts are joined in pairs."""
    for one, other in ((x, y), (y, x)):
        start = 0
        for part in list(one.parts or []):
            _part(other, start, size_of(part))
            start += size_of(part)
    for part, other_part in zip(x.parts or [], y.parts or [], strict=True):
        unify(part, other_part)


def _part(piece: Piece, start: int, length: int) -> Axis:
    """Elements of one piece: it becomes a row with a boundary at both ends of them."""
    if length == piece.size:
        return [piece]
    if piece.parts is None:
        piece.parts = [axis(piece.size, piece.holds)]
    for boundary in (start, start + length):
        _bound(piece, boundary)
    begin, inside = 0, []
    for part in piece.parts:
        if start <= begin < start + length:
            inside.append(part)
        begin += size_of(part)
    return inside[0] if len(inside) == 1 else [Piece(length, piece.holds, inside)]


def _bound(piece: Piece, boundary: int) -> None:
    """One more boundary between the parts of a row, if it is not one already."""
    begin = 0
    assert piece.parts is not None
    for index, part in enumerate(piece.parts):
        end = begin + size_of(part)
        if begin < boundary < end:
            if len(known := leaves(part)) == 1 and known[0].parts is None and not known[0].settled:
                # A plain part is simply two: the row stays flat.
                halves = [axis(boundary - begin, known[0].holds), axis(end - boundary, known[0].holds)]
                known[0].parts = halves
                piece.parts[index : index + 1] = halves
            else:
                pair = cut(part, 0, boundary - begin), cut(part, boundary - begin, end - boundary)
                piece.parts[index : index + 1] = pair
            return
        begin = end
