"""Interpret a trace: the spaces that each module reads and writes, and what is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from qsync.expansion.derivation.axis_tracer import RETURNED
from qsync.expansion.derivation.axis_unification import (
    Axis,
    Piece,
    UnificationError,
    fix_axis,
    is_known_fixed,
    leaves,
    regroup,
    size_of,
    stacked,
    unify,
)
from qsync.expansion.derivation.recorder import Recorder
from qsync.expansion.derivation.table_writer import UNKNOWN, Entry, Names, Slot, block_of, blocks_pattern
from qsync.expansion.derivation.trace_records import Attention, Event, Norm, ParameterUse
from qsync.expansion.maps.space_growth import laid_out
from qsync.expansion.recipe.recipe import FIXED
from qsync.expansion.recipe.sizes import first_few

_UNSUPPORTED = {
    "sums over": "sums over {space}, whose copies would count more than once",
    "chooses along": "chooses single coordinates of {space}",
    "multiplies along": "multiplies two values along {space}, whose copies would count more than once",
    "norm": "normalises {space} without a module of its own, whose eps could change",
}
# Events that exclude a partial rest of copies (LEMON, arXiv:2310.07999, section 3).
_RESTRICTED = {
    "averages": "averages over {space}, which is the same only where all coordinates have equally many "
    "copies, so that only multiples of its size are lossless",
    "acts on": "acts on {space}, which a LayerNorm reads: a mean of copies is then another's, so that only "
    "multiples of its size are lossless",
    "moves zero": "makes something else of 0 on {space}, which a norm leaves 0 beside its copies, so that "
    "only multiples of its size are lossless",
}


class Findings:
    """The interpretation of one trace."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.notes: list[str] = []
        self.blocks, self.open = blocks_pattern(recorder.model, recorder.sums)
        self.copied = self.blocks  # the blocks that depth may replicate
        if self.blocks and any(
            count > 1
            for path, count in recorder.calls.items()
            if path and block_of(path, self.blocks) == path
        ):
            self.notes.append(f"{self.blocks} run more than once each, so that depth cannot copy them")
            self.copied = ""
        self.multiples: dict[str, None] = {}  # spaces that grow only to multiples
        self.shapes: list[tuple[int, int, int]] = []  # heads, key/value heads, head_dim of each attention
        self.fixed: dict[str, None] = {}  # sizes that cannot grow
        # Matrix -> the rows of queries, keys and values, head after head.
        self.roles: dict[str, dict[str, tuple[int, ...]]] = {}
        self.inner: Axis = []
        self.words: dict[tuple[int, ...], str] = {}  # pieces -> heads, kv_heads or mixed
        self.heads: set[int] = set()  # pieces that count heads
        self._close_norms()
        for norm in self.recorder.norms:
            if not list(self.recorder.model.get_submodule(norm.path).parameters()):
                unify(norm.reads, norm.writes)  # exact copies keep its statistics
                recorder.events.append(Event("averages", norm.path, "norm", [norm.reads]))
        self._read_attention()
        self._hold_norms()

    @property
    def rotary(self) -> bool:
        """Return whether queries meet constants within a head, as in a rotation by position."""
        return any(piece.all_reasons for one in self.recorder.attentions for piece in leaves(one.query.inner))

    @property
    def parameters(self) -> list[str]:
        """Return every name of every parameter."""
        return [name for name, _ in self.recorder.model.named_parameters(remove_duplicate=False)]

    def _close_norms(self) -> None:
        """Unify input and output of norms that write the residual stream itself (Post-LN).

        Blocks add to the output of such a norm, or it acts on a sum in the same block. Norms of the same
        name in other blocks are treated alike.
        """
        norms = [norm for norm in self.recorder.norms if block_of(norm.path, self.blocks)]
        written = {
            (block_of(use.path, self.blocks), _pieces(axis))
            for use in self.recorder.uses
            for axis in stacked(use.writes)
        }
        first: dict[tuple[int, ...], int] = {}  # when a space is first written, or added to
        for use in self.recorder.uses:
            for axis in stacked(use.writes):
                first.setdefault(_pieces(axis), use.at)
        # What was written before the norm is what its own result is added to.
        closed = {norm.path for norm in norms if first.get(_pieces(norm.writes), 0) > norm.at}
        blocks = {block_of(path, self.blocks) for path in closed}
        closed |= {
            norm.path
            for norm in norms
            if (block := block_of(norm.path, self.blocks)) in blocks
            and (block, _pieces(norm.reads)) in written
        }
        names = {self._in_block(path) for path in closed}
        for norm in norms:
            if self._in_block(norm.path) in names:
                try:
                    unify(norm.reads, norm.writes)
                except UnificationError:
                    self.open.append(f"{norm.path} norms several spaces that stand in a row")

    def _hold_norms(self) -> None:
        """Fix both sides of a norm if either is fixed: a norm keeps the number of coordinates."""
        while any(
            [
                _hold_along(one, other)
                for n in self.recorder.norms
                for one, other in ((n.reads, n.writes), (n.writes, n.reads))
            ]
        ):
            pass

    def _in_block(self, path: str) -> str:
        """Return a path without its block."""
        return path[len(block_of(path, self.blocks)) :]

    # -- attention --

    def number(self, shape: tuple[int, int, int]) -> str:
        """Return the number of the attentions of one shape, "" if all have it."""
        return str(self.shapes.index(shape)) if len(self.shapes) > 1 else ""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the numbers of heads by name."""
        found: dict[str, int] = {}
        for shape in self.shapes:
            number = self.number(shape)
            found |= {f"heads{number}": shape[0], f"kv_heads{number}": shape[1]}
        return found

    def _read_attention(self) -> None:
        """Read the numbers of heads, and the roles of matrix rows in attention."""
        found = [(one, parts) for one in self.recorder.attentions if (parts := self._parts(one))]
        self.shapes = list(dict.fromkeys(_shape_of(parts) for _, parts in found))
        for one, parts in found:  # a second pass: splits by one attention affect others
            self._read_heads(one, parts)
        for one, parts in found:
            number = self.number(_shape_of(parts))
            try:
                heads, groups = self._heads_of(one, parts)
            except UnificationError:
                continue
            self.words[_pieces(groups)] = f"kv_heads{number}"
            self.words[_pieces(heads)] = f"heads{number}"
            self.heads |= {*_pieces(heads)}
            self.words[_pieces([*heads, *one.value.inner])] = f"mixed{number}"

    def _parts(self, one: Attention) -> list[list[tuple[int, ...]]]:
        """Return the rows of each head of queries, keys and values, empty if unknown."""
        named = {name: getattr(one, name) for name in ("query", "key", "value")}
        all_heads = {name: operand.heads for name, operand in named.items()}
        if lacking := [name for name, heads in all_heads.items() if not heads]:
            self.open.append(f"{_where(one)}: no single matrix writes its {' and '.join(lacking)}")
            return []
        parts = [list(dict.fromkeys(heads)) for heads in all_heads.values()]
        per_group = max(len(parts[0]) // len(parts[1]), 1)
        queries = [parts[0].index(head) for head in all_heads["query"]]
        for name, own in zip(("key", "value"), parts[1:], strict=True):
            order = [own.index(head) for head in all_heads[name]]
            in_order = [query // per_group for query in queries]
            if len(own) != len(parts[1]) or (len(order) == len(queries) and order != in_order):
                self.open.append(
                    f"{_where(one)}: its heads of queries and of keys are not tied one after the other, as "
                    "where those that share keys lie apart"
                )
                return []
        return parts

    def _heads_of(self, one: Attention, parts: list[list[tuple[int, ...]]]) -> tuple[Axis, Axis]:
        """Return the pieces of an attention's heads, and of its key/value heads."""
        heads = [piece for piece in leaves(one.query.batch) if not piece.is_known_fixed]
        num_heads, num_kv_heads, _ = _shape_of(parts)
        if size_of(heads) != num_heads:
            raise UnificationError
        groups, _ = regroup([heads], (num_kv_heads, num_heads // num_kv_heads))
        return leaves(heads), leaves(groups)

    def _read_heads(self, one: Attention, parts: list[list[tuple[int, ...]]]) -> None:
        """Read the heads of one attention, and the rows that write them."""
        shape = _shape_of(parts)
        number = self.number(shape)
        try:
            heads, _ = self._heads_of(one, parts)
            for norm in self.recorder.norms:
                if {*_pieces(heads)} & {*_pieces(norm.writes)}:
                    unify(norm.reads, norm.writes)  # a norm over all heads
        except UnificationError:
            self.open.append(f"{_where(one)}: its heads are not one dimension of their own")
            return
        inner = [*one.query.inner, *one.key.inner, *one.value.inner]
        within = _nested(inner)
        self.inner += inner
        for norm in self.recorder.norms:
            if all(_nested([piece]) & within for piece in leaves(norm.writes)):
                self.inner += [*norm.reads, *norm.writes]
        for why in sorted({why.text for piece in leaves(heads) for why in piece.all_reasons}):
            self.notes.append(f"{_where(one)}: its number of heads cannot grow: {why}")
            self.fixed[f"heads{number}"] = None
        for name, operand, rows in zip(
            ("query", "key", "value"), (one.query, one.key, one.value), parts, strict=True
        ):
            assert operand.writer is not None
            every = self.roles.setdefault(operand.writer.param, {})
            flat = tuple(row for head in rows for row in head)
            if every.setdefault(f"{name}{number}", flat) != flat:
                self.open.append(f"{operand.writer.param} writes several kinds of {name}")

    # -- entries --

    def entries(self) -> list[Entry]:
        """Return one entry per module or parameter, in the order of first use."""
        found: dict[str, Entry] = {}
        for entry in sorted(self._all(), key=lambda entry: entry.at):
            found.setdefault(entry.path, entry)
        return list(found.values())

    def _all(self) -> list[Entry]:
        """Return all entries, several for modules that run more than once."""
        found: list[Entry] = []
        for use in self.recorder.uses:
            found += self._of_use(use)
        for norm in self.recorder.norms:
            found += self._of_norm(norm)
        return [*found, *self._rest({entry.path for entry in found})]

    def _of_norm(self, norm: Norm) -> Iterator[Entry]:
        """Yield the entry of a norm."""
        known, roles = leaves(norm.reads), self.roles.get(norm.writer.param if norm.writer else "", {})
        if norm.writer and {*_pieces(known)} & self.heads:
            rows = norm.writer.rows
            own = set() if rows is None else set(rows.flatten().int().tolist())
            reads = writes = Slot(word=next((w for w, of in roles.items() if set(of) == own), UNKNOWN))
        else:
            reads, writes = (self._slot(axis, norm.path) for axis in (norm.reads, norm.writes))
        if list(self.recorder.model.get_submodule(norm.path).parameters()) or isinstance(
            self.recorder.model.get_submodule(norm.path), (nn.LayerNorm, nn.RMSNorm)
        ):
            yield Entry(norm.at, norm.path, "norm", (reads,), (reads if reads.word else writes,))

    def _of_use(self, use: ParameterUse) -> Iterator[Entry]:
        """Yield the entry of a parameter use."""
        if use.kind == "batch_norm":
            slot = self._slot(use.reads, use.path)
            yield Entry(use.at, use.path, use.kind, (slot,), (slot,))
            return
        owners = dict(self._owners(use.param))
        if use.path not in owners and any(other.path in owners for other in self._uses(use.param)):
            self.open.append(
                f"{use.param} is at work in {use.path or 'the model'} too, where no module has it"
            )
            return
        path = use.path if use.path in owners else next(iter(owners))
        module = self.recorder.model.get_submodule(path)
        name, own = owners[path], dict(module.named_parameters(recurse=False))
        writes, layout = self._written(use, path)
        is_transposed = use.kind == "product" and not use.has_rows_first
        is_transposed = is_transposed and type(module).__name__ != "Conv1D"
        kind = "convolution" if isinstance(module, _ConvNd) else {"product": "linear"}.get(use.kind, use.kind)
        is_module = name == "weight" and set(own) <= {"weight", "bias"}
        where = path if is_module else f"{path}.{name}".lstrip(".")
        reads = () if use.kind == "lookup" else self._read(use.reads, path)
        yield Entry(use.at, where, kind, reads, writes, self._tied(use, path), layout, is_transposed)

    def _tied(self, use: ParameterUse, path: str) -> str:
        """Return the path of the first other module with the same weight, "" if there is none.

        A head is tied to embeddings, never the reverse.
        """
        first, *others = [owner for owner, _ in self._owners(use.param)]
        kinds = {other.path: other.kind for other in self._uses(use.param)}
        if path != first:
            return "" if (use.kind, kinds.get(first)) == ("lookup", "product") else first
        if use.kind == "product":
            return next((other for other in others if kinds.get(other) == "lookup"), "")
        return ""

    def _uses(self, param: str) -> list[ParameterUse]:
        """Return all uses of a parameter."""
        return [use for use in self.recorder.uses if use.param == param]

    def _owners(self, param: str) -> list[tuple[str, str]]:
        """Return the modules that have a parameter, with its name in each."""
        wanted = self.recorder.model.get_parameter(param)
        return [
            (path, name)
            for path, module in self.recorder.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter is wanted
        ]

    def _rest(self, covered: set[str]) -> Iterator[Entry]:
        """Yield entries for parameters without one; their last dimension counts."""
        unused = []
        for name, parameter in self.recorder.model.named_parameters(remove_duplicate=False):
            known = self.recorder.names[id(parameter)]
            if name in covered or name.rpartition(".")[0] in covered:
                continue
            if known not in self.recorder.first_use:
                beside = self._beside(name, parameter.shape)
                if beside:
                    yield Entry(self.recorder.clock, name, "parameter", (), beside)
                else:
                    unused.append(name)
                continue
            if same := self._uses(known):  # another module shares it
                entry, path = next(self._of_use(same[0])), name.removesuffix(".weight")
                yield replace(entry, at=entry.at + 1, path=path, tied=self._tied(same[0], path))
                continue
            slots, layout = self._plain(known, name)
            reads = slots if layout == "," and all(slot.word == FIXED for slot in slots) else ()
            yield Entry(self.recorder.first_use[known], name, "parameter", reads, slots, layout=layout)
        if unused:
            self.open.append(f"{first_few(unused)} had nothing to do on these inputs")

    def _beside(self, name: str, shape: Sequence[int]) -> tuple[Slot, ...]:
        """Return the spaces of an unused vector: those of a used one of its length in the same module."""
        path, found = name.rpartition(".")[0], dict[tuple[Slot, ...], None]()
        for other, parameter in self.recorder.model.get_submodule(path).named_parameters(recurse=False):
            full = f"{path}.{other}".lstrip(".")
            if shape and full in self.recorder.first_use and list(parameter.shape[-1:]) == list(shape[-1:]):
                slots, layout = self._plain(full, full)
                found[slots if layout == "," else ()] = None
        is_vector = bool(shape) and shape[-1] == torch.Size(shape).numel()
        return next(iter(found)) if is_vector and len(found) == 1 else ()

    def _plain(self, param: str, name: str) -> tuple[tuple[Slot, ...], str]:
        """Return the spaces of a plain parameter and their layout; a bias has those of its matrix.

        A dimension that meets no other parameter stays as it is.
        """
        *others, last = self.recorder.parameters[param].axes or [[]]
        for use in self.recorder.uses:
            if use.kind == "product" and not others and leaves(use.writes) == leaves(last):
                return self._written(use, name)
        used = [one for use in self.recorder.uses for one in (use.reads, use.writes)]
        met = {id(piece) for one in used for piece in leaves(one)}
        met |= {piece for pieces in self.words for piece in pieces}
        slots = [
            self._slot(one, name) if met & {*_pieces(one)} else Slot(word=FIXED) for one in (*others, last)
        ]
        if all(slot.word == FIXED for slot in slots[:-1]):
            return self._spread(last, name)
        return tuple(slots), "*"

    # -- slots --

    def _written(self, use: ParameterUse, path: str) -> tuple[tuple[Slot, ...], str]:
        """Return the spaces of a matrix's rows, with attention's names where known, and their layout."""
        roles = self.roles.get(use.param)
        fixed = all(piece.all_reasons for one in stacked(use.writes) for piece in one)
        if not roles or use.kind != "product" or fixed:
            return self._spread(use.writes, path)
        own = self.recorder.parameters[use.param].axes
        num_rows = size_of(own[0] if use.has_rows_first and len(own) == 2 else use.writes)
        named = dict(sorted(roles.items(), key=lambda item: min(item[1])))
        number = next(iter(named)).lstrip("abcdefghijklmnopqrstuvwxyz")
        for layout, num_rounds in (
            (",", 1),
            ("|", self.sizes[f"kv_heads{number}"]),
            (":", len(roles[min(roles)])),
        ):
            if all(len(rows) % num_rounds == 0 for rows in named.values()):
                laid = laid_out([torch.tensor(rows) for rows in named.values()], num_rounds)
                if laid.tolist() == list(range(num_rows)):
                    return tuple(Slot(word=word) for word in named), layout
        self.open.append(
            f"the rows of {use.param} for attention's {' and '.join(named)} lie neither one after the other, "
            "nor by head, nor by coordinate, or are not all of its rows"
        )
        return (Slot(word=UNKNOWN),), ","

    def _spread(self, axis: Axis, path: str) -> tuple[tuple[Slot, ...], str]:
        """Return the spaces of a written axis, one after the other or by coordinate, and their layout."""
        *major, minor = leaves(axis) or [Piece(1)]
        is_paired = minor.parts is not None and all(size_of(part) == 1 for part in minor.parts)
        if major and is_paired and not self.words.get(_pieces(axis)):
            return (self._slot(major, path),) * minor.size, ":"
        return self._read(axis, path), ","

    def _read(self, axis: Axis, path: str) -> tuple[Slot, ...]:
        """Return the spaces stacked in an axis."""
        slots = tuple(self._slot(one, path) for one in stacked(axis))
        if len(slots) > 1 and all(slot.word == FIXED for slot in slots):
            return (Slot(word=FIXED),)
        return slots

    def _slot(self, axis: Axis, path: str) -> Slot:
        """Return one space; the pieces that grow must be the major ones."""
        known = leaves(axis)
        word = self.words.get(_pieces(known), "") if known else ""
        if word and not (word[:5] == "mixed" and all(piece.all_reasons for piece in known)):
            return Slot(word=word)
        if set(map(id, known)) <= {id(piece) for piece in leaves(self.inner)}:
            return Slot(word=FIXED)
        if {*_pieces(known)} & self.heads:
            self.open.append(
                f"a dimension of {path} ({size_of(known)}) counts heads and something else, which tables "
                "have no word for"
            )
            return Slot(word=UNKNOWN)
        grown = [piece for piece in known if not piece.all_reasons]
        puzzling = [piece for piece in known if piece.all_reasons and not piece.is_known_fixed]
        for piece in puzzling:
            why = next(iter(sorted(why.text for why in piece.all_reasons)))
            self.open.append(f"a dimension of {path} ({size_of(known)}) cannot grow: {why}")
        if not grown:
            return Slot(word=UNKNOWN if puzzling else FIXED)
        if known[: len(grown)] != grown:
            self.open.append(f"{path} has what grows inside what does not")
            return Slot(word=UNKNOWN)
        return Slot(_pieces(grown), size_of(grown))

    def _is_fixed(self, axis: Axis, path: str) -> bool:
        """Return whether an axis is fixed, even if only a part of it is used (a table of positions)."""
        return any(is_known_fixed(part) for part in stacked(axis)) or self._slot(axis, path).word == FIXED

    def fold_messages(self, messages: Sequence[str]) -> tuple[str, ...]:
        """Return the messages without repeats, merging equal ones about several blocks."""
        folded = [self._of_all_blocks(message) for message in messages]
        return tuple(
            dict.fromkeys(
                one if len({m for m, f in zip(messages, folded, strict=True) if f == one}) > 1 else message
                for message, one in zip(messages, folded, strict=True)
            )
        )

    def _of_all_blocks(self, message: str) -> str:
        """Return a message with the pattern of blocks in place of one block."""
        words = message.split(" ")
        blocks = [block_of(word, self.blocks) for word in words]
        return " ".join(
            self.blocks + word[len(block) :] if block else word
            for word, block in zip(words, blocks, strict=True)
        )

    # -- operators that copies do not survive --

    def check_events(self, entries: Sequence[Entry], names: Names) -> None:
        """Report operators on growing spaces that no table can describe."""
        spaces: dict[int, str] = {}
        whole: dict[int, tuple[int, ...]] = {}
        for entry in entries:
            for slot in (*entry.reads, *entry.writes):
                if not slot.word and names.name(slot, entry.path) == UNKNOWN:
                    self.open.append(f"{entry.path} reads what nothing that is understood writes")
                for piece in slot.pieces:
                    name = spaces.setdefault(piece, names.name(slot, entry.path))
                    if whole.setdefault(piece, slot.pieces) != slot.pieces:
                        self.open.append(
                            f"{entry.path} has some coordinates of {name}, or has them in another order"
                        )
        inner = {id(piece) for piece in leaves(self.inner)}
        norms = self.recorder.norms
        averaged = {id(piece) for norm in norms if norm.centred for piece in leaves(norm.reads)}
        zeroed = {id(piece) for norm in norms for piece in leaves(norm.writes)} - averaged
        zeroed |= {id(piece) for norm in norms if not norm.centred for piece in leaves(norm.reads)}
        for use in self.recorder.uses:
            if block_of(use.path, self.blocks) and any(p.reasons == {RETURNED} for p in leaves(use.writes)):
                self.notes.append(
                    "what the blocks add to cannot grow: the model returns it; derive and grow it with the "
                    "head that it trains with"
                )
        for event in self.recorder.events:
            pieces = [piece for axis in event.axes for piece in leaves(axis) if not piece.all_reasons]
            found = [spaces[id(piece)] for piece in pieces if id(piece) in spaces and id(piece) not in inner]
            where = f"aten.{event.op} in {event.path or 'the model'}"
            if found and event.kind in _UNSUPPORTED:
                self.open.append(f"{where} {_UNSUPPORTED[event.kind].format(space=found[0])}")
            elif event.kind in _RESTRICTED:
                fragile = {"acts on": averaged, "moves zero": zeroed}.get(event.kind, {*spaces} - inner)
                message = _RESTRICTED[event.kind]
                limited = [spaces[id(piece)] for piece in pieces if id(piece) in spaces.keys() & fragile]
                self.multiples |= dict.fromkeys(limited)
                self.notes += [f"{where} {message.format(space=space)}" for space in limited[:1]]


def _shape_of(parts: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int, int]:
    """Return the numbers of heads and of key/value heads, and the width of a head."""
    return len(parts[0]), len(parts[1]), len(parts[0][0])


def _where(one: Attention) -> str:
    """Return the text that names an attention in messages."""
    return f"attention in {one.path or 'the model'}"


def _hold_along(one: Axis, other: Axis) -> bool:
    """Fix `other` for the reasons of `one`; return whether any reason was new."""
    why = {reason for piece in leaves(one) for reason in piece.all_reasons}
    new = why - {reason for piece in leaves(other) for reason in piece.all_reasons}
    for reason in new:
        fix_axis(other, reason)
    return bool(new)


def _nested(axis: Axis) -> set[int]:
    """Return the identities of an axis's pieces and of the pieces of their parts."""
    known = leaves(axis)
    return {*map(id, known)}.union(*(_nested(part) for piece in known for part in piece.parts or []))


def _pieces(axis: Axis) -> tuple[int, ...]:
    """Return the identities of an axis's pieces."""
    return tuple(id(piece) for piece in leaves(axis))
