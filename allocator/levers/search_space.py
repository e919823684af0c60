"""The space of lever settings, drawn by a trial, and the settings tried first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qsync.allocator.levers.save_less_steps import Patterns, save_less_steps
from qsync.allocator.levers.shares import PASSES
from qsync.allocator.uniform import uniform
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.levers import (
    ACCUMULATE,
    BUCKETS,
    RECOMPUTE,
    SAVE_LESS,
    SHARE,
    ClassLevers,
    Levers,
    samples_of,
)
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.communication import gradient_bytes
from qsync.replayer.levers.batch_size import Recapture, reach
from qsync.replayer.levers.recomputation import blocks


@dataclass(frozen=True, slots=True)
class LeverSetting:
    """One setting of all levers: per class, DDP's bucket cap, and operators that save less.

    `saving_less` maps classes to patterns of operators that save less for backward.
    """

    levers: Levers
    bucket_cap_bytes: int | None = None
    saving_less: Mapping[str, Patterns] = field(default_factory=dict)

    def without(self, lever: str) -> LeverSetting:
        """Return the setting with one lever off."""
        if lever == BUCKETS:
            return replace(self, bucket_cap_bytes=None)
        if lever == SAVE_LESS:
            return replace(self, saving_less={})
        off: dict[str, Any] = {
            SHARE: {"samples": None},
            ACCUMULATE: {"passes": 1},
            RECOMPUTE: {"recomputed": ()},
        }
        classes = {name: replace(entry, **off[lever]) for name, entry in self.levers.classes.items()}
        return replace(self, levers=Levers(classes))

    def used(self, plan: Plan) -> tuple[str, ...]:
        """Return the levers that are on in this setting and its plan."""
        saves = any(self.saving_less.values())
        here = [*([BUCKETS] if self.bucket_cap_bytes else []), *([SAVE_LESS] if saves else [])]
        return (*(plan.levers.used if plan.levers else ()), *here)


@dataclass(frozen=True, slots=True)
class Space:
    """All lever settings of one problem; levers outside `levers` stay off."""

    graph: OpGraph
    profiles: Mapping[str, Profile]
    cluster: Cluster
    levers: Sequence[str]
    other: Recapture | None = None
    base: str | None = None

    def suggest(self, trial: Any) -> LeverSetting | None:
        """Draw a setting; return None if its shares or passes are impossible.

        `trial` draws numbers by name, with the methods of an optuna trial (`suggest_float`, `suggest_int`,
        `suggest_categorical`).
        """
        samples: dict[str, int] = {}
        if SHARE in self.levers:
            samples = self._shared(lambda name, low, high: trial.suggest_float(f"share {name}", 0.0, 1.0))
        classes, saving = {}, dict[str, Patterns]()
        for c in self.cluster.classes:
            own = samples.get(c.name)
            passes = 1
            if ACCUMULATE in self.levers:
                passes = trial.suggest_categorical(f"passes {c.name}", PASSES)
            able = self._passes(c.name, own or samples_of(self.graph)) if self.other is not None else [1]
            if not able:
                return None
            nearest = min(able, key=lambda k, passes=passes: (abs(math.log2(k / passes)), k))  # type: ignore[misc]
            paths = blocks(self.graph) if RECOMPUTE in self.levers else ()
            num = trial.suggest_int(f"recomputed {c.name}", 0, len(paths)) if paths else 0
            classes[c.name] = ClassLevers(own, nearest, paths[:num])
            if len(steps := self.save_less_steps(c.name)) > 1:
                saving[c.name] = steps[trial.suggest_int(f"saving less {c.name}", 0, len(steps) - 1)]
        cap = trial.suggest_categorical("bucket cap", self._caps()) if BUCKETS in self.levers else None
        return LeverSetting(Levers(classes), cap, saving)

    def save_less_steps(self, name: str) -> tuple[Patterns, ...]:
        """Return the steps of saving less (`save_less_steps`) on a class; one empty step if off."""
        return save_less_steps(self.graph, self.profiles[name]) if SAVE_LESS in self.levers else ((),)

    def _passes(self, name: str, samples: int) -> list[int]:
        """Return the numbers of passes in which a class may take `samples` samples."""
        least, most = reach(self.profiles[name], self.graph, self.other)
        passes = PASSES if ACCUMULATE in self.levers else PASSES[:1]
        return [k for k in passes if samples % k == 0 and least <= samples // k <= most]

    def _shared(self, part: Callable[[str, int, int], float]) -> dict[str, int]:
        """Return samples by class that add up to the batch, chosen for the largest classes first.

        `part` (0 to 1) places a class within its possible range of samples, from which the later classes can
        still complete the batch. The last class takes the rest.
        """
        order = sorted(self.cluster.classes, key=lambda c: -c.count)
        most_passes = max(PASSES) if ACCUMULATE in self.levers else 1
        left, found = self.cluster.num_ranks * samples_of(self.graph), {}
        for number, c in enumerate(order):
            least, most = self._ends(c.name, most_passes)
            after = [(d.count, *self._ends(d.name, most_passes)) for d in order[number + 1 :]]
            least_after = sum(count * fewest for count, fewest, _ in after)
            most_after = sum(count * largest for count, _, largest in after)
            low = max(least, math.ceil((left - most_after) / c.count))
            high = max(low, min(most, (left - least_after) // c.count))
            if number == len(order) - 1:
                found[c.name] = max(1, left // c.count)
            else:
                found[c.name] = low + round((high - low) * part(c.name, low, high))
            left -= c.count * found[c.name]
        return found

    def _ends(self, name: str, most_passes: int) -> tuple[int, int]:
        least, most = reach(self.profiles[name], self.graph, self.other)
        return least, most * most_passes

    def starts(self, relieving: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the parameters of the settings tried first.

        The first has no levers. In the next two, all operators that can, and half of them, save less. Then
        follow shares half way to equal compute times in the base (precisions do the rest), and shares of
        equal compute times. With `relieving`, shares follow that give the strongest class less work, since
        lower precisions make the others as fast.
        """
        equal = dict.fromkeys(self.profiles, float(samples_of(self.graph)))
        yield self._start(equal)
        if any(len(self.save_less_steps(c.name)) > 1 for c in self.cluster.classes):
            yield from (self._start(equal, saving=part) for part in (1.0, 0.5))
        if SHARE in self.levers:
            parts = (0.5, 1.0, *((-0.125, -0.25, -0.5) if relieving else ()))
            yield from (self._start(self._towards_equal_times(part)) for part in parts)

    def _towards_equal_times(self, part: float) -> dict[str, float]:
        """Return samples by class between equal shares (`part` 0) and equal base times (`part` 1)."""
        captured = samples_of(self.graph)
        plain = uniform(self.graph, self.profiles, self.cluster, {}, base=self.base)
        rate = {
            name: 1.0 / entry.predicted.compute_s for name, entry in plain.classes.items() if entry.predicted
        }
        each = self.cluster.num_ranks * captured / sum(c.count * rate[c.name] for c in self.cluster.classes)
        return {name: captured + part * (each * own - captured) for name, own in rate.items()}

    def _start(self, samples: Mapping[str, float], saving: float = 0.0) -> dict[str, Any]:
        """Return parameters with these samples, a fraction `saving` of its steps, and other levers off."""
        found: dict[str, Any] = {"bucket cap": None} if BUCKETS in self.levers else {}
        for c in self.cluster.classes:
            if ACCUMULATE in self.levers:
                found[f"passes {c.name}"] = 1
            if RECOMPUTE in self.levers:
                found[f"recomputed {c.name}"] = 0
            if len(steps := self.save_less_steps(c.name)) > 1:
                found[f"saving less {c.name}"] = round(saving * (len(steps) - 1))

        def place(name: str, low: int, high: int) -> float:
            nearest = min(1.0, max(0.0, (samples[name] - low) / (high - low or 1)))
            found[f"share {name}"] = nearest
            return nearest

        if SHARE in self.levers:
            self._shared(place)
        return found

    def _caps(self) -> list[int | None]:
        """Return candidate bucket caps: DDP's own, then 1, 2, 4, ... MiB up to one bucket for all."""
        total, caps, cap = sum(gradient_bytes(self.graph).values()), [], 2**20
        while cap < total:
            caps.append(cap)
            cap *= 2
        return [None, *caps, cap]
