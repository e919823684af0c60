"""Interpret a trace: the spaces that each module reads and writes, and what is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qsync.expansion.derivation.axis_tracer import RETURNED
from qsync.expansion.derivation.axis_unification import (
    Axis,
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
from qsync.expansion.derivation.trace_records import Attention, Norm, ParameterUse, Writer
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
        self.heads = self.kv_heads = self.head_dim = 0
        # Matrix -> its rows of queries, keys and values.
        self.roles: dict[str, dict[tuple[int, int], set[str]]] = {}
        self.inner: Axis = []
        self.mixed: set[tuple[int, ...]] = set()
        self.counts: set[int] = set()  # pieces that count heads
        self._close_norms()
        self._hold_norms()
        self._read_attention()

    @property
    def rotary(self) -> bool:
        """Return whether queries meet constants within a head, as in a rotation by position."""
        return any(piece.all_reasons for one in self.recorder.attentions for piece in leaves(one.inner))

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
        anywhere = {pieces for _, pieces in written}
        closed = {norm.path for norm in norms if _pieces(norm.writes) in anywhere}
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

    def _read_attention(self) -> None:
        """Read the numbers of heads, and the roles of matrix rows in attention."""
        found = [one for one in self.recorder.attentions if self._heads_of(one) is not None]
        for one in found:  # a second pass: splits by one attention affect others
            self._read_heads(one, *(self._heads_of(one) or ()))
        shapes = {(one.num_heads, one.num_kv_heads, size_of(one.inner)) for one in found}
        if len(shapes) > 1:
            self.open.append(
                f"attentions have {' and '.join(map(str, sorted(shapes)))} heads, key/value heads and "
                "coordinates each; a recipe has one number of each"
            )
        self.heads, self.kv_heads, self.head_dim = max(shapes, default=(0, 0, 0))

    def _heads_of(self, one: Attention) -> list[list[Axis]] | None:
        """Return heads and their coordinates for queries, keys and values, None if unknown."""
        if not (one.query and one.key and one.value):
            lacking = [name for name in ("query", "key", "value") if not getattr(one, name)]
            self.open.append(f"{_where(one)}: no single matrix writes its {' and '.join(lacking)}")
            return None
        each = size_of(one.inner)
        of_values = one.value.length // one.num_kv_heads
        try:
            return [
                regroup([one.query.axis], (one.num_heads, each)),
                regroup([one.key.axis], (one.num_kv_heads, each)),
                regroup([one.value.axis], (one.num_kv_heads, of_values)),
            ]
        except UnificationError:
            self.open.append(f"{_where(one)}: the rows of its matrices are not one head after the other")
            return None

    def _read_heads(self, one: Attention, of_q: list[Axis], of_k: list[Axis], of_v: list[Axis]) -> None:
        """Read the heads of one attention."""
        queries, groups = leaves(of_q[0]), leaves(of_k[0])
        self.inner += [*one.inner, *of_q[1], *of_k[1]]
        if queries[: len(groups)] != groups:
            self.open.append(
                f"{_where(one)}: its heads of queries and of keys are not tied one after the other, as where "
                "a norm stands over all heads, or those that share keys lie apart"
            )
        self.counts |= {id(piece) for piece in [*queries, *groups]}
        self.mixed.add(_pieces([*queries, *of_v[1]]))
        for why in sorted({why.text for piece in queries for why in piece.all_reasons}):
            self.open.append(f"{_where(one)}: its heads cannot grow: {why}")
        for role in ("query", "key", "value"):
            writer: Writer = getattr(one, role)
            rows = self.roles.setdefault(writer.param, {})
            rows.setdefault((writer.start, writer.length), set()).add(role)

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
        reads, writes = (self._slot(axis, norm.path) for axis in (norm.reads, norm.writes))
        if list(self.recorder.model.get_submodule(norm.path).parameters()):
            yield Entry(norm.at, norm.path, "norm", (reads,), (reads if reads.word else writes,))
        elif not reads.word:
            self.open.append(f"{norm.path} is a norm without a weight, which no line can name; give it one")

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
        writes = self._written(use, path)
        if use.kind == "product" and use.has_rows_first == (type(module).__name__ == "Conv1D"):
            self.open.append(
                f"{use.param} has its inputs in axis 0, which tables know of Conv1D only; transpose it"
            )
            writes = (Slot(word=UNKNOWN),)
        kind = "convolution" if own[name].dim() > 2 else {"product": "linear"}.get(use.kind, use.kind)
        is_module = name == "weight" and set(own) <= {"weight", "bias"}
        where = path if is_module else f"{path}.{name}".lstrip(".")
        reads = () if use.kind == "lookup" else self._read(use.reads, path)
        yield Entry(use.at, where, kind, reads, writes, self._tied(use, path))

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
                unused.append(name)
                continue
            if same := self._uses(known):  # another module shares it
                entry, path = next(self._of_use(same[0])), name.removesuffix(".weight")
                yield replace(entry, at=entry.at + 1, path=path, tied=self._tied(same[0], path))
                continue
            slots = self._last(known, name)
            reads = slots if all(slot.word == FIXED for slot in slots) else ()
            yield Entry(self.recorder.first_use[known], name, "parameter", reads, slots)
        if unused:
            self.open.append(f"{first_few(unused)} had nothing to do on these inputs")

    def _last(self, param: str, name: str) -> tuple[Slot, ...]:
        """Return the spaces of a parameter's last dimension; a bias has those of its matrix."""
        *others, last = self.recorder.parameters[param].axes or [[]]
        if any(not self._is_fixed(axis, name) for axis in others):
            self.open.append(f"{name} grows in more than its last dimension")
            return (Slot(word=UNKNOWN),)
        for use in self.recorder.uses:
            if use.kind == "product" and not others and leaves(use.writes) == leaves(last):
                return self._written(use, name)
        return self._read(last, name)

    # -- slots --

    def _written(self, use: ParameterUse, path: str) -> tuple[Slot, ...]:
        """Return the spaces of a matrix's rows, with attention's names where known."""
        roles = self.roles.get(use.param)
        if not roles or use.kind != "product":
            return self._read(use.writes, path)
        rows = sorted(roles)
        starts = [start for start, _ in rows]
        ends = [start + length for start, length in rows]
        whole = starts == [0, *ends[:-1]] and ends[-1] == size_of(use.writes)
        if not whole or any(len(roles[row]) > 1 for row in rows):
            described = ", ".join(f"{'/'.join(sorted(roles[row]))} in [{row[0]}, {sum(row)})" for row in rows)
            self.open.append(f"the rows of {use.param} are to attention {described}: not stacked whole")
            return (Slot(word=UNKNOWN),)
        if all(piece.all_reasons for one in stacked(use.writes) for piece in one):
            return self._read(use.writes, path)
        return tuple(Slot(word=next(iter(roles[row]))) for row in rows)

    def _read(self, axis: Axis, path: str) -> tuple[Slot, ...]:
        """Return the spaces stacked in an axis."""
        slots = tuple(self._slot(one, path) for one in stacked(axis))
        if len(slots) > 1 and all(slot.word == FIXED for slot in slots):
            return (Slot(word=FIXED),)
        return slots

    def _slot(self, axis: Axis, path: str) -> Slot:
        """Return one space; the pieces that grow must be the major ones."""
        known = leaves(axis)
        if _pieces(known) in self.mixed and not all(piece.all_reasons for piece in known):
            return Slot(word="mixed")
        if set(map(id, known)) <= {id(piece) for piece in leaves(self.inner)}:
            return Slot(word=FIXED)
        if any(id(piece) in self.counts for piece in known):
            self.open.append(
                f"a dimension of {path} ({size_of(known)}) counts heads, which tables have no word for"
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
                fragile, message = averaged if event.kind == "acts on" else zeroed, _RESTRICTED[event.kind]
                limited = [spaces[id(piece)] for piece in pieces if id(piece) in spaces.keys() & fragile]
                self.multiples |= dict.fromkeys(limited)
                self.notes += [f"{where} {message.format(space=space)}" for space in limited[:1]]


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


def _pieces(axis: Axis) -> tuple[int, ...]:
    """Return the identities of an axis's pieces."""
    return tuple(id(piece) for piece in leaves(axis))
