"""Detect dead ranks: the others name the dead one and stop, instead of hanging in a collective.

Once a second every rank counts up a key of its own in the job's rendezvous store and reads the keys of all
others. Gloo notices a peer whose connection closes, but names an address. NCCL notices nothing. Neither
notices a host that vanishes or a process that is stopped. The main thread may be inside a collective and
cannot be interrupted there, so the process ends itself, with a sentence on stderr and exit code 3.

A rank that has not begun is waited for, with a line that names it every ten seconds, up to a bound. A rank
that lives but does not move is named too, by a rank that waits for it: with its count every rank publishes
where its loop stands (`follow`). That ends nothing, since a rank may take its time.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from qsync.distributed.monitoring.positions import EarlyEnd, Position, Stall
from qsync.distributed.monitoring.pulses import Pulses
from qsync.errors import QSyncError, shortened

EXIT_CODE = 3
DEFAULT_TIMEOUT_S = 30.0
JOIN_TIMEOUT_S = 600.0  # seconds to wait for ranks that have not started: they may load more, or start later
TOLD_S = 10.0  # seconds between two lines about a missing rank

_FINISHED, _FAREWELL = "finished", "error: "
_MOST_NAMED = 4
_INTERVAL_S = 1.0  # longest interval between two beats, in seconds
_JOIN_POLL_S = 0.05
_POLL_S = 0.01  # seconds between two looks, while rank 0 waits for others to read its farewell
_FOR_EVER = datetime.timedelta(days=20)  # the store's limit of milliseconds allows no more
_watched_groups: list[dist.ProcessGroup] = []
_followed: list[weakref.WeakMethod[Callable[[], Position]]] = []


def start(
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    before: tuple[distributed_c10d.Store, int, int] | None = None,
) -> Watch:
    """Watch the other ranks of the default process group from a daemon thread, until `finish`.

    This process prints one sentence and exits with code 3 if a rank shows no sign of life for `timeout_s`, if
    a rank has not begun its watch within `join_timeout_s`, if a rank leaves with an error, or if the store is
    gone. Call it on every rank, after `init_process_group`; for a call before that, pass `before`: store,
    rank and number of ranks. A rank is silent while a call holds the GIL, so choose a timeout longer than any
    such call. A process without a process group, or alone in it, watches nothing. Raises QSyncError for a
    timeout under 1 s.

    >>> with liveness.start(timeout_s=30):
    ...     train()  # an exception in here tells the others why this rank leaves
    """
    check_timeouts(timeout_s, join_timeout_s)
    if before is None and dist.is_available() and dist.is_initialized():
        before = distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if before is None or before[2] == 1:
        return Watch(None, 0, 1, timeout_s, join_timeout_s)
    watch = Watch(*before, timeout_s, join_timeout_s)
    watch.begin()
    return watch


def check_timeouts(timeout_s: object, join_timeout_s: object) -> None:
    """Raise QSyncError unless a timeout is a number of at least 1 second."""
    for what, seconds in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds < 1e6:
            raise QSyncError(f"{what} must be at least 1 second, found {shortened(seconds)}; give e.g. 60")


def watch_once(timeout_s: float = DEFAULT_TIMEOUT_S, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Start watching the job's ranks once per process, however many models are wrapped."""
    group = dist.group.WORLD
    if group is not None and not any(group is watched for watched in _watched_groups):
        _watched_groups.append(group)
        start(timeout_s, join_timeout_s)


def follow(position: Callable[[], Position]) -> None:
    """Publish this rank's loop position, read from a method while its object lives."""
    _followed[:] = [weakref.WeakMethod(position)]


def _own_position() -> Position | None:
    position = _followed[0]() if _followed else None
    return position() if position is not None else None


class Watch:
    """One rank's watch over the others, from `start`. Use `with`, or end it by `finish` or `fail`."""

    def __init__(
        self,
        store: distributed_c10d.Store | None,
        rank: int,
        world_size: int,
        timeout_s: float,
        join_timeout_s: float,
    ) -> None:
        self.rank = rank
        self.timeout_s, self.join_timeout_s = timeout_s, join_timeout_s
        # Own connections: on a shared one, calls would wait for the blocking calls of other threads.
        self._store, self._bell = (_connection(store, timeout_s) if store else None for _ in range(2))
        self._interval_s = min(_INTERVAL_S, timeout_s / 10)
        self._names = {other: f"rank {other}" for other in range(world_size)}
        self._absent = {other for other in range(world_size) if other != rank}
        self._finished: dict[int, int | None] = {}  # finished ranks -> number of steps, if known
        self._began_s = self._round_s = self._told_s = time.monotonic()
        self._pulses = Pulses(self._round_s, patience_s=3 * self._interval_s + 1)
        self._stall, self._early_end = Stall(timeout_s), EarlyEnd(timeout_s)
        self._ended, self._woken = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def finish(self) -> None:
        """Tell the other ranks that this rank is done. A second call does nothing."""
        own = _own_position()
        self._end(_FINISHED if own is None else f"{_FINISHED} {own.step}")

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this rank leaves for `reason`; they print it and stop."""
        self._end(_FAREWELL + " ".join(reason.split()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            return
        sentence = self._named_dead(error)
        self.fail(sentence or _sentence(error))
        if sentence:
            raise QSyncError(sentence) from error

    def begin(self) -> None:
        """Start the threads. Called by `start`."""
        assert self._store is not None
        self._store.set(f"who/{self.rank}", f"{socket.gethostname()}, pid {os.getpid()}")
        # In this order, which `_end` relies on
        for run in (self._watch_ranks, self._watch_store, self._hear_bell):
            thread = threading.Thread(target=run, name=f"qsync liveness {run.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self._leave)

    def wait_for_all(self) -> None:
        """Wait until every rank has started its watch; if one does not, the watch ends this process."""
        names = [f"who/{rank}" for rank in self._names]
        while self._store is not None and not self._store.check(names):
            time.sleep(_JOIN_POLL_S)

    def _leave(self) -> None:
        """End the watch at interpreter exit, for scripts that do not end it."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.finish()
            return
        sentence = self._named_dead(error)
        if sentence:
            _print(sentence)
        self.fail(sentence or _sentence(error))

    def _named_dead(self, error: BaseException) -> str | None:
        """Return the sentence that names a dead rank, if it may have caused `error` in a collective."""
        in_collective = isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
        if self._store is None or self._ended.is_set() or not in_collective:
            return None
        # A living rank beats once per interval. At an error of a peer the watch stops this process now.
        time.sleep(4 * self._interval_s)
        silent = self._pulses.silent(time.monotonic(), 3 * self._interval_s)
        if silent:
            return self._stopped(silent[0], 3 * self._interval_s)
        if self._absent:
            return self._stayed_away(time.monotonic() - self._began_s)
        return self._left_early(next(iter(self._finished))) if self._finished else None

    def _end(self, farewell: str) -> None:
        if self._store is None or self._ended.is_set():
            return
        self._ended.set()
        self._woken.set()
        atexit.unregister(self._leave)
        with contextlib.suppress(RuntimeError):  # the store is gone, so no rank could read a farewell
            if self._threads[-1].is_alive():
                self._store.set(f"bell/{self.rank}", "1")
            # A thread inside the store at Python's exit aborts the process (SIGABRT), so wait for it.
            for thread in self._threads:
                thread.join(max(2 * self._interval_s, 10.0))
                if thread.is_alive():
                    return  # the store does not answer, so no rank could read a farewell
            self._store.set(f"beat/{self.rank}", farewell)
            if self.rank == 0:
                self._wait_until_read()

    def _wait_until_read(self) -> None:
        """Wait until the others have read rank 0's farewell: the store may end with rank 0.

        A rank that is leaving itself reads no more; its own farewell counts instead. A rank that beats is
        waited for as long as it may be silent; one that has stopped or never came, for a few intervals.
        """
        assert self._store is not None
        now_s = time.monotonic()
        soon_s, end_s = now_s + 4 * self._interval_s, now_s + self.timeout_s
        silent = set(self._pulses.silent(now_s, 3 * self._interval_s)) | self._absent
        unread = set(self._pulses.since_s) | silent
        for other in unread:
            self._store.set(f"bell/{other}", "1")
        while unread and time.monotonic() < (soon_s if unread <= silent else end_s):
            unread = {other for other in unread if not self._has_read(other)}
            time.sleep(_POLL_S)

    def _has_read(self, other: int) -> bool:
        assert self._store is not None
        has_read, has_beat = (self._store.check([f"{what}/{other}"]) for what in ("read", "beat"))
        return has_read or (has_beat and not self._store.get(f"beat/{other}")[:1].isdigit())

    def _watch_ranks(self) -> None:
        """Exchange beats once per interval until this rank finishes; stop at a dead rank."""
        count = 0
        try:
            while not self._ended.is_set():
                count += 1
                # Once all others have finished, the store may be gone.
                beats = self._exchange(count) if self._pulses.since_s or self._absent else {}
                self._round_s = time.monotonic()
                self._pulses.hear(self._round_s, beats)
                self._stop_at_dead(beats)
                self._name_absent()
                self._name_stuck(beats)
                self._woken.wait(self._interval_s)
                self._woken.clear()
        except RuntimeError as error:
            # Once rank 0 has finished, its store may be gone, and watching ends.
            if 0 not in self._finished:
                self._stop(self._lost_store(str(error).splitlines()[0]))
        finally:
            self._round_s = math.inf

    def _exchange(self, count: int) -> dict[int, str]:
        """Publish this rank's beat; return the beats of the other ranks that have started their watch."""
        assert self._store is not None
        numbers = (count, *(_own_position() or ()))
        self._store.set(f"beat/{self.rank}", " ".join(str(int(number)) for number in numbers))
        come = {r for r in self._absent if self._store.check([f"who/{r}", f"beat/{r}"])}
        for other in come:
            self._names[other] += f" ({self._store.get(f'who/{other}').decode()})"
        self._absent -= come
        ranks = sorted(come | set(self._pulses.since_s))
        if not ranks:
            return {}
        values = self._store.multi_get([f"beat/{other}" for other in ranks])
        return {other: value.decode() for other, value in zip(ranks, values, strict=True)}

    def _stop_at_dead(self, beats: Mapping[int, str]) -> None:
        assert self._store is not None
        for other, beat in beats.items():
            if beat.startswith(_FINISHED):
                self._pulses.forget(other)
                steps = beat.removeprefix(_FINISHED).strip()
                self._finished[other] = int(steps) if steps else None
            if other == 0 and not beat[:1].isdigit():
                self._store.set(f"read/{self.rank}", "1")
            if beat.startswith(_FAREWELL):
                left = f"{self._names[other]} left with an error ({beat.removeprefix(_FAREWELL)})"
                self._stop(f"{left}, so rank {self.rank} stops too; mend that")
        if silent := self._pulses.silent(time.monotonic(), self.timeout_s):
            self._stop(self._stopped(silent[0], self.timeout_s))

    def _name_absent(self) -> None:
        """Print missing ranks periodically (on the first rank present); stop the job at the timeout."""
        now_s = time.monotonic()
        if self._absent and now_s - self._began_s > self.join_timeout_s:
            self._stop(self._stayed_away(self.join_timeout_s) + "; a larger join_timeout_s waits longer")
        if self._absent and now_s - self._told_s >= TOLD_S:
            self._told_s = now_s
            if not any(other < self.rank for other in self._pulses.since_s):
                waited_s = now_s - self._began_s
                _print(f"rank {self.rank} has waited {waited_s:.0f} s for {self._those_absent()} to join")

    def _name_stuck(self, beats: Mapping[int, str]) -> None:
        """Print the rank that all others wait for, from the first waiting rank."""
        own = _own_position()
        if own is None or self._absent:
            return
        early = self._early_end.hear(time.monotonic(), own, self._finished)
        if early is not None:
            _print(self._left_early(early) + f" (rank {self.rank} has been {own} for {self.timeout_s:g} s)")
        if not self._pulses.since_s:
            return
        positions = {self.rank: own}
        for other in self._pulses.since_s:
            numbers = beats.get(other, "").split()[1:]
            if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
                return  # it has no loop yet, or is leaving
            step, phase, num_gradients, loads = map(int, numbers)
            positions[other] = Position(step, phase, num_gradients, bool(loads))
        stuck = self._stall.hear(time.monotonic(), positions)
        waiting = sorted(set(positions) - set(stuck))
        if not stuck or self.rank != (waiting or sorted(positions))[0]:
            return
        where = positions[stuck[0]]
        if not waiting:
            _print(f"all ranks have been {where} for {self.timeout_s:g} s: look at the network between them")
            return
        names = ", ".join(self._names[other] for other in sorted(stuck))
        have = "has" if len(stuck) == 1 else "have"
        _print(
            f"{names} {have} been {where} for {self.timeout_s:g} s, and all others wait for that; look at "
            "what it does there (py-spy dump shows it)"
        )

    def _hear_bell(self) -> None:
        """Wake the other thread when rank 0 or this rank finishes."""
        assert self._bell is not None
        with contextlib.suppress(RuntimeError):  # the store is gone; the other thread reports it
            self._bell.wait([f"bell/{self.rank}"], _FOR_EVER)
        self._woken.set()

    def _watch_store(self) -> None:
        """Stop if the other thread waits too long: a store on a vanished host never answers."""
        awake_s = time.monotonic()
        while not self._ended.wait(self._interval_s):
            now_s = time.monotonic()
            # As in Pulses: if this thread was suspended, so was the other thread.
            previous_s, awake_s = awake_s, now_s
            if now_s - previous_s > 3 * self._interval_s + 1:
                self._round_s = max(self._round_s, now_s)
            if now_s - self._round_s > self.timeout_s:
                self._stop(self._lost_store(f"no answer for {self.timeout_s:g} s"))

    def _stopped(self, other: int, silence_s: float) -> str:
        return (
            f"{self._names[other]} stopped responding {silence_s:.1f} s ago, so rank {self.rank} stops; "
            f"look at the output of rank {other}"
        )

    def _those_absent(self) -> str:
        first = sorted(self._absent)[:_MOST_NAMED]
        more = len(self._absent) - len(first)
        return ", ".join(f"rank {other}" for other in first) + (f" and {more} more" if more else "")

    def _stayed_away(self, waited_s: float) -> str:
        return (
            f"{self._those_absent()} did not join within {waited_s:.0f} s, so rank {self.rank} stops; look "
            f"at the output of rank {min(self._absent)}"
        )

    def _left_early(self, other: int) -> str:
        return (
            f"{self._names[other]} finished before rank {self.rank}, so a collective with it fails; "
            "let all ranks take the same number of steps, or look at its output if it called sys.exit"
        )

    def _lost_store(self, reason: str) -> str:
        return (
            f"rank {self.rank} lost the rendezvous store ({reason}), which {self._names[0]} or torchrun "
            "on its host serves, so it stops; look at the output of rank 0"
        )

    def _stop(self, sentence: str) -> None:
        """End this process: a main thread inside a collective cannot be interrupted otherwise."""
        if self._ended.is_set():
            return
        _print(sentence)
        # Flush the main thread's output, but not for long: it may hold the stream's lock.
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)
        flush.start()
        flush.join(1.0)
        os._exit(EXIT_CODE)


def _connection(store: Any, timeout_s: float) -> Any:
    """Return the watch's own connection to its part of a store."""
    own = store.clone()
    own.set_timeout(datetime.timedelta(seconds=timeout_s))
    return distributed_c10d.PrefixStore("qsync/liveness", own)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _print(sentence: str) -> None:
    """Write to stderr without Python's buffer, whose lock another thread may hold."""
    os.write(2, f"{sentence}\n".encode())
