"""From what a run showed to entries of a table: which module reads and writes which space, and what is
open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qsync.expansion.derivation.axis_unification import (
    Axis,
    Untied,
    hold,
    leaves,
    regroup,
    settled,
    size_of,
    stacked,
    unify,
)
from qsync.expansion.derivation.observations import Attention, Norm, Use, Writer
from qsync.expansion.derivation.recorder import Recorder
from qsync.expansion.derivation.table_writer import UNKNOWN, Entry, Names, Slot, block_of, blocks_pattern
from qsync.expansion.derivation.watched_run import RETURNED
from qsync.expansion.recipe.recipes import FIXED
from qsync.expansion.recipe.sizes import joined

_SAYS = {
    "sums over": "sums over {space}, whose copies would count more than once",
    "chooses along": "chooses single coordinates of {space}",
    "multiplies along": "multiplies two values along {space}, whose copies would count more than once",
    "norm": "normalises {space} without a module of its own, whose eps could change",
}
# Where a rest stands beside whole copies (LEMON, arXiv:2310.07999, section 3), and is not what it should be.
_REST = {
    "acts on": "acts on {space}, which a LayerNorm reads: a mean of copies is then another's, so that only "
    "multiples of its size are lossless",
    "moves zero": "makes something else of 0 on {space}, which a norm leaves 0 beside its copies, so that "
    "only multiples of its size are lossless",
}


class Findings:
    """One run, read."""

    def __init__(self, seen: Recorder) -> None:
        self.seen = seen
        self.notes: list[str] = []
        self.blocks, self.open = blocks_pattern(seen.model, seen.sums)
        self.copied = self.blocks  # by depth
        if self.blocks and any(
            count > 1 for path, count in seen.calls.items() if path and block_of(path, self.blocks) == path
        ):
            self.notes.append(f"{self.blocks} run more than once each, so that depth cannot copy them")
            self.copied = ""
        self.multiples: dict[str, None] = {}  # spaces that grow to multiples alone
        self.heads = self.kv_heads = self.head_dim = 0
        # By matrix: which rows are queries, keys, values.
        self.roles: dict[str, dict[tuple[int, int], set[str]]] = {}
        self.inner: Axis = []
        self.mixed: set[tuple[int, ...]] = set()
        self.counts: set[int] = set()  # pieces that count heads
        self._close_norms()
        self._hold_norms()
        self._read_attention()

    @property
    def rotary(self) -> bool:
        """Whether queries meet constants inside a head, as a rotation by position does."""
        return any(piece.all_holds for one in self.seen.attentions for piece in leaves(one.inner))

    @property
    def parameters(self) -> list[str]:
        """Every name of every parameter."""
        return [name for name, _ in self.seen.model.named_parameters(remove_duplicate=False)]

    # -- what closes a circle --

    def _close_norms(self) -> None:
        """A norm in a block that others add to what it writes hands on the residual stream itself (Post-LN),
        as does one that norms a sum in the same block; so do its namesakes in other blocks.
        """
        norms = [norm for norm in self.seen.norms if block_of(norm.path, self.blocks)]
        written = {
            (block_of(use.path, self.blocks), _pieces(axis))
            for use in self.seen.uses
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
                except Untied:
                    self.open.append(f"{norm.path} norms several spaces that stand in a row")

    def _hold_norms(self) -> None:
        """A norm hands on as many coordinates as it reads: where either does not grow, the other cannot."""
        while any(
            [
                _hold_along(one, other)
                for n in self.seen.norms
                for one, other in ((n.reads, n.writes), (n.writes, n.reads))
            ]
        ):
            pass

    def _in_block(self, path: str) -> str:
        return path[len(block_of(path, self.blocks)) :]

    # -- attention --

    def _read_attention(self) -> None:
        """Numbers of heads, and what the rows of matrices are to attention."""
        found = [one for one in self.seen.attentions if self._heads_of(one) is not None]
        for one in found:  # once more: what one attention splits, others share
            self._read_heads(one, *(self._heads_of(one) or ()))
        shapes = {(one.num_heads, one.num_kv_heads, size_of(one.inner)) for one in found}
        if len(shapes) > 1:
            self.open.append(
                f"attentions have {' and '.join(map(str, sorted(shapes)))} heads, key/value heads and "
                "coordinates each; a recipe has one number of each"
            )
        self.heads, self.kv_heads, self.head_dim = max(shapes, default=(0, 0, 0))

    def _heads_of(self, one: Attention) -> list[list[Axis]] | None:
        """Heads and coordinates within one, of queries, keys and values; None where they are not seen."""
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
        except Untied:
            self.open.append(f"{_where(one)}: the rows of its matrices are not one head after the other")
            return None

    def _read_heads(self, one: Attention, of_q: list[Axis], of_k: list[Axis], of_v: list[Axis]) -> None:
        queries, groups = leaves(of_q[0]), leaves(of_k[0])
        self.inner += [*one.inner, *of_q[1], *of_k[1]]
        if queries[: len(groups)] != groups:
            self.open.append(
                f"{_where(one)}: its heads of queries and of keys are not tied one after the other, as where "
                "a norm stands over all heads, or those that share keys lie apart"
            )
        self.counts |= {id(piece) for piece in [*queries, *groups]}
        self.mixed.add(_pieces([*queries, *of_v[1]]))
        for why in sorted({why.reason for piece in queries for why in piece.all_holds}):
            self.open.append(f"{_where(one)}: its heads cannot grow: {why}")
        for role in ("query", "key", "value"):
            writer: Writer = getattr(one, role)
            rows = self.roles.setdefault(writer.param, {})
            rows.setdefault((writer.start, writer.length), set()).add(role)

    # -- entries --

    def entries(self) -> list[Entry]:
        """In the order of first use, one per module or parameter."""
        found: dict[str, Entry] = {}
        for entry in sorted(self._all(), key=lambda entry: entry.at):
            found.setdefault(entry.path, entry)
        return list(found.values())

    def _all(self) -> list[Entry]:
        found: list[Entry] = []
        for use in self.seen.uses:
            found += self._of_use(use)
        for norm in self.seen.norms:
            found += self._of_norm(norm)
        return [*found, *self._rest({entry.path for entry in found})]

    def _of_norm(self, norm: Norm) -> Iterator[Entry]:
        reads, writes = (self._slot(axis, norm.path) for axis in (norm.reads, norm.writes))
        if list(self.seen.model.get_submodule(norm.path).parameters()):
            yield Entry(norm.at, norm.path, "norm", (reads,), (reads if reads.word else writes,))
        elif not reads.word:
            self.open.append(f"{norm.path} is a norm without a weight, which no line can name; give it one")

    def _of_use(self, use: Use) -> Iterator[Entry]:
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
        module = self.seen.model.get_submodule(path)
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

    def _tied(self, use: Use, path: str) -> str:
        """Which other module has the same weight: the first one; but a head is tied to embeddings, and not
        they to it.
        """
        first, *others = [owner for owner, _ in self._owners(use.param)]
        kinds = {other.path: other.kind for other in self._uses(use.param)}
        if path != first:
            return "" if (use.kind, kinds.get(first)) == ("lookup", "product") else first
        if use.kind == "product":
            return next((other for other in others if kinds.get(other) == "lookup"), "")
        return ""

    def _uses(self, param: str) -> list[Use]:
        return [use for use in self.seen.uses if use.param == param]

    def _owners(self, param: str) -> list[tuple[str, str]]:
        """The modules that have a parameter, and what they call it."""
        wanted = self.seen.model.get_parameter(param)
        return [
            (path, name)
            for path, module in self.seen.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter is wanted
        ]

    def _rest(self, covered: set[str]) -> Iterator[Entry]:
        """Parameters that no entry is about yet: the last dimension counts."""
        unused = []
        for name, parameter in self.seen.model.named_parameters(remove_duplicate=False):
            known = self.seen.names[id(parameter)]
            if name in covered or name.rpartition(".")[0] in covered:
                continue
            if known not in self.seen.seen:
                unused.append(name)
                continue
            if same := self._uses(known):  # it is at work where another module has it too
                entry, path = next(self._of_use(same[0])), name.removesuffix(".weight")
                yield replace(entry, at=entry.at + 1, path=path, tied=self._tied(same[0], path))
                continue
            slots = self._last(known, name)
            reads = slots if all(slot.word == FIXED for slot in slots) else ()
            yield Entry(self.seen.seen[known], name, "parameter", reads, slots)
        if unused:
            self.open.append(f"{joined(unused)} had nothing to do on these inputs")

    def _last(self, param: str, name: str) -> tuple[Slot, ...]:
        """The spaces of a parameter's last dimension, if no other grows; a bias's are those of its matrix."""
        *others, last = self.seen.parameters[param].axes or [[]]
        if any(not self._is_fixed(axis, name) for axis in others):
            self.open.append(f"{name} grows in more than its last dimension")
            return (Slot(word=UNKNOWN),)
        for use in self.seen.uses:
            if use.kind == "product" and not others and leaves(use.writes) == leaves(last):
                return self._written(use, name)
        return self._read(last, name)

    # -- slots --

    def _written(self, use: Use, path: str) -> tuple[Slot, ...]:
        """The spaces of a matrix's rows: attention's, where it says so."""
        roles = self.roles.get(use.param)
        if not roles or use.kind != "product":
            return self._read(use.writes, path)
        rows = sorted(roles)
        starts = [start for start, _ in rows]
        ends = [start + length for start, length in rows]
        whole = starts == [0, *ends[:-1]] and ends[-1] == size_of(use.writes)
        if not whole or any(len(roles[row]) > 1 for row in rows):
            said = ", ".join(f"{'/'.join(sorted(roles[row]))} in [{row[0]}, {sum(row)})" for row in rows)
            self.open.append(f"the rows of {use.param} are to attention {said}: not stacked whole")
            return (Slot(word=UNKNOWN),)
        if all(piece.all_holds for one in stacked(use.writes) for piece in one):
            return self._read(use.writes, path)
        return tuple(Slot(word=next(iter(roles[row]))) for row in rows)

    def _read(self, axis: Axis, path: str) -> tuple[Slot, ...]:
        """The spaces that stand one after the other in an axis."""
        slots = tuple(self._slot(one, path) for one in stacked(axis))
        if len(slots) > 1 and all(slot.word == FIXED for slot in slots):
            return (Slot(word=FIXED),)
        return slots

    def _slot(self, axis: Axis, path: str) -> Slot:
        """One space. What grows must be the major pieces, whose coordinates then stand for whole rows."""
        known = leaves(axis)
        if _pieces(known) in self.mixed and not all(piece.all_holds for piece in known):
            return Slot(word="mixed")
        if set(map(id, known)) <= {id(piece) for piece in leaves(self.inner)}:
            return Slot(word=FIXED)
        if any(id(piece) in self.counts for piece in known):
            self.open.append(
                f"a dimension of {path} ({size_of(known)}) counts heads, which tables have no word for"
            )
            return Slot(word=UNKNOWN)
        grown = [piece for piece in known if not piece.all_holds]
        puzzling = [piece for piece in known if piece.all_holds and not piece.settled]
        for piece in puzzling:
            why = next(iter(sorted(hold.reason for hold in piece.all_holds)))
            self.open.append(f"a dimension of {path} ({size_of(known)}) cannot grow: {why}")
        if not grown:
            return Slot(word=UNKNOWN if puzzling else FIXED)
        if known[: len(grown)] != grown:
            self.open.append(f"{path} has what grows inside what does not")
            return Slot(word=UNKNOWN)
        return Slot(_pieces(grown), size_of(grown))

    def _is_fixed(self, axis: Axis, path: str) -> bool:
        """Also of an axis that only some of was used, as of a table of more positions than came."""
        return any(settled(part) for part in stacked(axis)) or self._slot(axis, path).word == FIXED

    def said(self, messages: Sequence[str]) -> tuple[str, ...]:
        """Messages once each, and what holds in several blocks once for all."""
        folded = [self._of_all_blocks(message) for message in messages]
        return tuple(
            dict.fromkeys(
                one if len({m for m, f in zip(messages, folded, strict=True) if f == one}) > 1 else message
                for message, one in zip(messages, folded, strict=True)
            )
        )

    def _of_all_blocks(self, message: str) -> str:
        """A message with the pattern of blocks where it names one."""
        words = message.split(" ")
        blocks = [block_of(word, self.blocks) for word in words]
        return " ".join(
            self.blocks + word[len(block) :] if block else word
            for word, block in zip(words, blocks, strict=True)
        )

    # -- what copies would not survive --

    def judge(self, entries: Sequence[Entry], names: Names) -> None:
        """Operators that no table describes, on spaces that grow."""
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
        norms = self.seen.norms
        averaged = {id(piece) for norm in norms if norm.centred for piece in leaves(norm.reads)}
        zeroed = {id(piece) for norm in norms for piece in leaves(norm.writes)} - averaged
        zeroed |= {id(piece) for norm in norms if not norm.centred for piece in leaves(norm.reads)}
        for use in self.seen.uses:
            if block_of(use.path, self.blocks) and any(p.holds == {RETURNED} for p in leaves(use.writes)):
                self.notes.append(
                    "what the blocks add to cannot grow: the model returns it; derive and grow it with the "
                    "head that it trains with"
                )
        for event in self.seen.events:
            pieces = [piece for axis in event.axes for piece in leaves(axis) if not piece.all_holds]
            found = [spaces[id(piece)] for piece in pieces if id(piece) in spaces and id(piece) not in inner]
            where = f"aten.{event.op} in {event.path or 'the model'}"
            if found and event.kind in _SAYS:
                self.open.append(f"{where} {_SAYS[event.kind].format(space=found[0])}")
            elif event.kind in _REST:
                fragile, said = averaged if event.kind == "acts on" else zeroed, _REST[event.kind]
                limited = [spaces[id(piece)] for piece in pieces if id(piece) in spaces.keys() & fragile]
                self.multiples |= dict.fromkeys(limited)
                self.notes += [f"{where} {said.format(space=space)}" for space in limited[:1]]


def _where(one: Attention) -> str:
    return f"attention in {one.path or 'the model'}"


def _hold_along(one: Axis, other: Axis) -> bool:
    """Hold `other` for why `one` is held; whether that was news."""
    why = {hold for piece in leaves(one) for hold in piece.all_holds}
    new = why - {hold for piece in leaves(other) for hold in piece.all_holds}
    for reason in new:
        hold(other, reason)
    return bool(new)


def _pieces(axis: Axis) -> tuple[int, ...]:
    return tuple(id(piece) for piece in leaves(axis))
