"""Union-find over pieces of axes: which dimensions are equal.

An axis of a tensor is a list of pieces, major first. Their sizes multiply to the size of the axis: a view
of an axis of 24 as 4 heads of 6 has the pieces [4][6], and merging them back keeps these. A piece may
itself be a row of axes, as the queries, keys and values of one linear are. Operators unify the axes that
they require to be equal. Splitting a piece splits it in all axes that share it. An axis of one element has
no pieces.

    batch, length, width = axis(2), axis(5), axis(24)
    *_, heads, inner = regroup([batch, length, width], (2, 5, 4, 6))
    leaves(width) == heads + inner
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


class UnificationError(Exception):
    """Two axes cannot be unified because their factors do not divide."""


@dataclass(frozen=True, slots=True)
class FixedReason:
    """Why a piece cannot grow.

    `is_expected` marks axes without parameters that grow: a batch, pixels, a vocabulary. Otherwise an
    operator is not understood, or every forward creates the tensor anew.
    """

    text: str
    is_expected: bool


class Piece:
    """One factor of an axis: unified with another, split into factors, a row of parts, or plain."""

    __slots__ = ("factors", "joined", "parts", "reasons", "size")

    def __init__(
        self, size: int, reasons: Iterable[FixedReason] = (), parts: list[Axis] | None = None
    ) -> None:
        self.size = size
        self.reasons = set(reasons)
        self.joined: Piece | None = None
        self.factors: list[Piece] | None = None
        self.parts = parts

    def __repr__(self) -> str:
        return f"{self.size}{'*' if self.reasons else ''}"

    @property
    def is_known_fixed(self) -> bool:
        """Return whether the piece, or each of its parts, is expected not to grow."""
        if any(reason.is_expected for reason in self.reasons):
            return True
        return self.parts is not None and all(is_known_fixed(part) for part in self.parts)

    @property
    def all_reasons(self) -> set[FixedReason]:
        """Return the reasons why the piece or a part of it cannot grow; empty if it can."""
        return self.reasons.union(*(piece.all_reasons for part in self.parts or [] for piece in leaves(part)))


Axis = list[Piece]


def axis(size: int, reasons: Iterable[FixedReason] = ()) -> Axis:
    """Return an axis about which nothing else is known."""
    return [Piece(size, reasons)] if size != 1 else []


def root(piece: Piece) -> Piece:
    """Return the representative of all pieces unified with this one."""
    while piece.joined is not None:
        piece = piece.joined
    return piece


def leaves(axis: Axis) -> Axis:
    """Return the axis as its current pieces, splitting pieces that have factors."""
    found: Axis = []
    for piece in axis:
        piece = root(piece)
        found += [piece] if piece.factors is None else leaves(piece.factors)
    return found


def stacked(axis: Axis) -> list[Axis]:
    """Return the axes stacked in this one, if its major piece is a row of parts."""
    known = leaves(axis)
    if not known or known[0].parts is None:
        return [known]
    return [leaves([*one, *known[1:]]) for part in known[0].parts for one in stacked(part)]


def size_of(axis: Axis) -> int:
    """Return the number of elements of an axis."""
    return prod(piece.size for piece in axis)


def is_known_fixed(axis: Axis) -> bool:
    """Return whether every piece is expected not to grow; true for an axis of one element."""
    return all(piece.is_known_fixed for piece in leaves(axis))


def fix_axis(axis: Axis, why: FixedReason) -> None:
    """Record that nothing in this axis can grow, with the reason."""
    for piece in leaves(axis):
        if why not in piece.reasons:
            piece.reasons.add(why)
            for part in piece.parts or []:
                fix_axis(part, why)


def unify(a: Axis, b: Axis) -> None:
    """Make two axes of one size equal.

    Raises:
        UnificationError: Their factors do not divide.
    """
    rest, other = leaves(a), leaves(b)
    if size_of(rest) != size_of(other):
        raise UnificationError(f"axes of {size_of(rest)} and {size_of(other)} elements cannot be equal")
    while rest and other:
        x, y = rest.pop(0), other.pop(0)
        if x.size > y.size:
            x, *minor = _split(x, y.size)
            rest = leaves([*minor, *rest])
        elif y.size > x.size:
            y, *minor = _split(y, x.size)
            other = leaves([*minor, *other])
        # x and y may share pieces, so splitting x may split y.
        if root(x).factors or root(y).factors:
            rest, other = leaves([x, *rest]), leaves([y, *other])
        else:
            _unify_pieces(x, y)


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """Return the axes of a view: the pieces in order, distributed over the sizes of `shape`.

    Raises:
        UnificationError: A size cannot be made of whole factors.
    """
    pool = [piece for axis in axes for piece in leaves(axis)]
    found: list[Axis] = []
    for size in shape:
        taken: Axis = []
        while size > 1:
            if not pool:
                raise UnificationError(f"no elements are left for a dimension of {size}")
            piece = pool.pop(0)
            if size % piece.size:
                pool = leaves([*_split(piece, size), *pool])
                # The split may affect earlier pieces.
                piece = pool.pop(0)
            taken.append(piece)
            size //= piece.size
        found.append(taken)
    return _reuse_axes(axes, found)


def _reuse_axes(axes: Sequence[Axis], found: Sequence[Axis]) -> list[Axis]:
    """Return the axes of a view, with unchanged axes replaced by the original objects."""
    old = iter(axes)
    kept = []
    for new in found:
        rest = list(old)
        same = next((index for index, one in enumerate(rest) if new and leaves(one) == leaves(new)), None)
        kept.append(new if same is None else rest[same])
        old = iter(rest if same is None else rest[same + 1 :])
    return kept


def slice_axis(axis: Axis, start: int, length: int) -> Axis:
    """Return the axis of elements [start, start + length); `axis` becomes a row of parts.

    Raises:
        UnificationError: The slice would cut through minor factors.
    """
    known = leaves(axis)
    if length == size_of(known):
        return known
    if is_known_fixed(known):
        return [Piece(length, _expected_reasons(known))] if length != 1 else []
    major, minor = known[0], known[1:]
    inner = size_of(minor)
    if start % inner or length % inner:
        raise UnificationError(f"a slice [{start}, {start + length}) cuts factors of an axis of {known}")
    return _slice_piece(major, start // inner, length // inner) + minor


def concatenate(parts: Sequence[Axis]) -> Axis:
    """Return the axis of a concatenation."""
    size = sum(size_of(part) for part in parts)
    if all(is_known_fixed(part) for part in parts):
        return axis(
            size, _expected_reasons([piece for part in parts for piece in leaves(part)]) or _SINGLE_ELEMENTS
        )
    return [Piece(size, parts=list(parts))]


_SINGLE_ELEMENTS = (FixedReason("a row of single elements", True),)


def _expected_reasons(pieces: Axis) -> list[FixedReason]:
    """Return the expected reasons of some pieces, each once."""
    return list(dict.fromkeys(reason for piece in pieces for reason in piece.reasons if reason.is_expected))


def _split(piece: Piece, major: int) -> Axis:
    """Split a piece into `major` times the rest, in all axes that share it."""
    if piece.size % major:
        raise UnificationError(f"an axis of {piece.size} cannot be split by {major}")
    if piece.parts is not None and not piece.is_known_fixed:
        first, *others = piece.parts
        if len(others) + 1 != major or any(size_of(other) != size_of(first) for other in others):
            raise UnificationError(f"a concatenation of {len(piece.parts)} parts cannot be split by {major}")
        for other in others:  # as the biases of queries, keys and values
            unify(first, other)
        piece.factors, piece.parts = [Piece(major, piece.reasons), *leaves(first)], None
        return piece.factors
    piece.parts = None
    piece.factors = [Piece(major, piece.reasons), Piece(piece.size // major, piece.reasons)]
    return piece.factors


def _unify_pieces(x: Piece, y: Piece) -> None:
    """Unify two pieces of one size."""
    x, y = root(x), root(y)
    if x is y:
        return
    if x.parts is not None and y.parts is not None:
        _align_parts(x, y)
        x, y = root(x), root(y)
    keep, gone = (y, x) if x.parts is None and y.parts is not None else (x, y)
    gone.joined = keep
    for why in gone.reasons - keep.reasons:
        fix_axis([keep], why)
    for why in keep.reasons - gone.reasons:
        for part in gone.parts or []:
            fix_axis(part, why)


def _align_parts(x: Piece, y: Piece) -> None:
    """Unify two rows of parts: cut both at all boundaries, then unify the parts in pairs."""
    for one, other in ((x, y), (y, x)):
        start = 0
        for part in list(one.parts or []):
            _slice_piece(other, start, size_of(part))
            start += size_of(part)
    for part, other_part in zip(x.parts or [], y.parts or [], strict=True):
        unify(part, other_part)


def _slice_piece(piece: Piece, start: int, length: int) -> Axis:
    """Return elements of one piece, which becomes a row with boundaries at both ends of them."""
    if length == piece.size:
        return [piece]
    if piece.parts is None:
        piece.parts = [axis(piece.size, piece.reasons)]
    for boundary in (start, start + length):
        _add_boundary(piece, boundary)
    begin, inside = 0, []
    for part in piece.parts:
        if start <= begin < start + length:
            inside.append(part)
        begin += size_of(part)
    return inside[0] if len(inside) == 1 else [Piece(length, piece.reasons, inside)]


def _add_boundary(piece: Piece, boundary: int) -> None:
    """Add a boundary between the parts of a row unless it exists."""
    begin = 0
    assert piece.parts is not None
    for index, part in enumerate(piece.parts):
        end = begin + size_of(part)
        if begin < boundary < end:
            if len(known := leaves(part)) == 1 and known[0].parts is None and not known[0].is_known_fixed:
                # Replace a plain part by its halves, so that the row stays flat.
                halves = [axis(boundary - begin, known[0].reasons), axis(end - boundary, known[0].reasons)]
                known[0].parts = halves
                piece.parts[index : index + 1] = halves
            else:
                pair = (
                    slice_axis(part, 0, boundary - begin),
                    slice_axis(part, boundary - begin, end - boundary),
                )
                piece.parts[index : index + 1] = pair
            return
        begin = end
