"""A learned model of the time of an operator, at a shape or on a device that was never profiled.

    t = law(kind, mode, direction) x exp(strength x residual(features)),

with features of the program and of the device, as in CDMPP (arXiv:2311.09690). The law is a linear fit: a
launch, products at a share of their peak, bytes at a share of the bandwidth (`roofline_law`). The residual is
a smooth function of the features (`gaussian`), and zero far from all samples. Sums of gradients, which
autograd adds, are separate. All costs are relative to the roofline. The model prices an unmeasured device by
assuming that it reaches the same shares of its peaks as the device that the model was learned on. Such a
price is an assumption, not a measurement, and is called simulated.

A step is a sum of seconds, in which errors common to a whole model do not average out. So the residual counts
only by a factor (`strength`, from 0 to 1) that discernibly improves the sums of profiles held out.

The model states its own error: of samples held out by shape, and of whole profiles held out.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsync.errors import CalibrationError, FormatError
from qsync.predictor.cost_model.features import family, features
from qsync.predictor.cost_model.gaussian_process import Array, Gaussian
from qsync.predictor.cost_model.op_calls import Call, Direction, has_direction, parts, sum_s
from qsync.predictor.cost_model.roofline_law import Law
from qsync.predictor.cost_model.samples import DIRECTIONS, MIN_SAMPLE_S, Sample, without_sums
from qsync.records.datasheets import DataSheet
from qsync.records.json_files import read_json, write_json
from qsync.records.profiles import Cost
from qsync.records.record_json import Count, FileRecord, Number

FOLDS = 5
# With so few samples a residual is noise: the law alone is used.
_FEW_SAMPLES = 6
# A residual is fitted to a random part of more samples than these: the fit takes the cube of their number.
_MAX_FITTED_SAMPLES = 200
# No residual changes a cost by more than the factor e^1.5.
_MAX_LOG_RESIDUAL = 1.5
# Fewer profiles do not show how well residuals carry over to another one: random parts of the calls are held
# out instead.
_MIN_SOURCES = 3
_STRENGTHS = tuple(i / 8 for i in range(9))

# The measured mode that stands for an unmeasured one: its shares of the peak are used.
_SUBSTITUTE = {"fp32_fast": "fp32", "fp16": "bf16", "tf32": "fp32", "fp8": "int8", "int8_all": "int8"}

Key = tuple[str, str, Direction]


@dataclass(frozen=True, slots=True)
class StatedError:
    """Relative errors |predicted / measured - 1| of data held out: median and 95th percentile.

    `by_kind` and `overall` are of single operators, forward or backward, at shapes held out. `step` is of the
    sum of all operators and casts of a profile held out; None where there was only one profile.
    """

    by_kind: Mapping[str, tuple[Number, Number]]
    overall: tuple[Number, Number]
    step: Number | None = None

    def of(self, kind: str) -> float:
        """Return the median error of one kind; of all kinds, where that kind was not held out."""
        return self.by_kind.get(kind, self.overall)[0]


@dataclass(frozen=True, slots=True)
class _File(FileRecord):
    """The file of a cost model: the fields of each sample, with the place of its data sheet for the sheet."""

    FILE_KIND = "cost model"
    FILE_VERSION = 2

    error: StatedError | None
    sheets: tuple[DataSheet, ...]
    samples: tuple[tuple[Call, str, Direction, Number, Count, str], ...]


class CostModel:
    """The cost of calls on any device, learned from samples.

    >>> model = CostModel.learn(samples_of(graph, profile))
    >>> model.seconds([(call, "int8", "forward", datasheet("T4"))])
    """

    def __init__(self, samples: Sequence[Sample], error: StatedError | None = None) -> None:
        if not samples:
            raise CalibrationError("there are no samples to learn costs from; profile a model first")
        self.samples = tuple(samples)
        self.error = error
        self._laws = _Laws(samples)
        self._residuals: dict[Key, Gaussian] = {}
        self.strength = self._fit()

    @classmethod
    def learn(cls, samples: Sequence[Sample]) -> CostModel:
        """Fit a model, and state its error from fits without the samples they predict."""
        return cls(samples, held_out_error(samples, cls))

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Array:
        """Return the seconds (N,) of calls in a mode and direction on a device, all at once.

        Raises KeyError for a product in a type that the device does not multiply.
        """
        known = [(call, self._laws.mode(call, mode, d), d) for call, mode, d, _ in asked]
        points = np.array([parts(*each) for each in asked]).reshape(-1, 3)
        found = self._laws.seconds(known, points)
        by_key: dict[Key, list[int]] = defaultdict(list)
        for i, (call, mode, direction) in enumerate(known):
            by_key[family(call.kind), mode, direction].append(i)
        for key, rows in by_key.items():
            if key in self._residuals:
                residual = self._residuals[key].at(np.array([features(*asked[i]) for i in rows]))
                found[rows] *= np.exp(self.strength * _clipped(residual))
        sums: Array = np.array([sum_s(call, direction, sheet) for call, _, direction, sheet in asked])
        return found + sums

    def _fit(self) -> float:
        """Fit every residual, and return their strength."""
        group = _grouping(self.samples)
        names = dict.fromkeys(group(s) for s in self.samples)
        others = {
            name: self._laws.without(np.array([group(s) == name for s in self.samples])) for name in names
        }
        held: list[_HeldOut] = []
        for key, places in _rows(self.samples, lambda sample: family(sample.call.kind)).items():
            some = [self.samples[i] for i in _some(places.tolist())]
            points, seconds = _points(some)
            known = [(s.call, s.mode, s.direction) for s in some]
            if len(some) > _FEW_SAMPLES:
                x = np.array([features(*asked(sample)) for sample in some])
                missed = np.log(seconds / self._laws.seconds(known, points))
                self._residuals[key] = Gaussian.fit(x, missed)
            of = np.array([group(s) for s in some])
            for name in dict.fromkeys(of.tolist()) if len(others) > 1 else ():
                rows = np.flatnonzero(of == name)
                by_law = others[name].seconds(known, points)
                residual = np.zeros(len(rows))
                if key in self._residuals:
                    residual = self._residuals[key].without(rows, np.log(seconds / by_law))
                step = (name, _precision(key[1]), key[2])
                held.append(_HeldOut(step, by_law[rows], residual, seconds[rows]))
        return _strength(held)

    def to_json(self) -> dict[str, Any]:
        """Return the samples and the stated error: a fit of the same samples gives the same model."""
        sheets = tuple({sample.sheet.name: sample.sheet for sample in self.samples}.values())
        places = {sheet.name: i for i, sheet in enumerate(sheets)}
        rows = tuple(
            (s.call, s.mode, s.direction, s.seconds, places[s.sheet.name], s.source) for s in self.samples
        )
        return _File(self.error, sheets, rows).to_json()

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> CostModel:
        """Fit the model again from its samples. Raises FormatError for a file that cannot be read."""
        file = _File.from_json(value, where)
        try:
            samples = [
                Sample(call, mode, direction, seconds, file.sheets[place], source)
                for call, mode, direction, seconds, place, source in file.samples
            ]
            return cls(samples, file.error)
        except (IndexError, KeyError) as error:  # a shape, a type or a data sheet that is not there
            raise FormatError(f"the samples of a cost model do not fit ({error!r}); learn it anew") from error

    def save(self, path: str | Path) -> Path:
        """Write the samples and the stated error to a file."""
        return write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote."""
        return cls.from_json(read_json(path), str(path))


class _Laws:
    """The laws of all kinds of some samples, and those of their families."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._points, self._seconds = _points(samples)
        self._of_family = _rows(samples, lambda sample: family(sample.call.kind))
        self._of_kind = _rows(samples, lambda sample: sample.call.kind)
        self._families = {key: self._fit(rows) for key, rows in self._of_family.items()}
        self._kinds = {key: self._fit(rows, self._start(key)) for key, rows in self._of_kind.items()}

    def without(self, left_out: npt.NDArray[np.bool_]) -> _Laws:
        """Return the laws of the other samples; only laws with samples left out (N,) are fitted again."""
        found = copy.copy(self)
        found._families, found._kinds = dict(self._families), dict(self._kinds)
        for laws, all_rows in ((found._families, self._of_family), (found._kinds, self._of_kind)):
            for key, rows in all_rows.items():
                if left_out[rows].all():
                    del laws[key]
                elif left_out[rows].any():
                    start = found._start(key) if laws is found._kinds else None
                    laws[key] = self._fit(rows[~left_out[rows]], start)
        return found

    def _fit(self, rows: npt.NDArray[np.intp], start: Law | None = None) -> Law:
        return Law.fit(self._points[rows], self._seconds[rows], start)

    def _start(self, key: Key) -> Law:
        return self._families[family(key[0]), key[1], key[2]]

    def seconds(self, known: Sequence[tuple[Call, str, Direction]], points: Array) -> Array:
        """Return the seconds (N,) by law of calls whose parts take `points` (N, 3) seconds at full speed."""
        laws = np.array([self._of(*each).parts for each in known]).reshape(-1, 3)
        found: Array = np.maximum((points * laws).sum(1), MIN_SAMPLE_S)
        return found

    def mode(self, call: Call, mode: str, direction: Direction) -> str:
        """Return the mode whose law is used: this one, or the measured one most like it."""
        name = family(call.kind)
        source, _, target = mode.partition(" ")
        for candidate in (
            mode,
            _SUBSTITUTE.get(mode, mode),
            f"{source} {_SUBSTITUTE.get(target, target)}",
            "fp32",
        ):
            if (name, candidate, direction) in self._families:
                return candidate
        same = [key[1] for key in self._families if key[0] == name and key[2] == direction]
        return same[0] if same else mode

    def _of(self, call: Call, mode: str, direction: Direction) -> Law:
        """Return the law of a kind, else of its family; where neither was measured, of memory passes."""
        for laws, name, of in (
            (self._kinds, call.kind, mode),
            (self._families, family(call.kind), mode),
            (self._families, family(""), "fp32"),
        ):
            if (name, of, direction) in laws:
                return laws[name, of, direction]
        return Law()


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """Samples of one group, precision and direction (`step`), predicted without that group.

    Seconds by law, log residual predicted, and seconds measured; all (N,).
    """

    step: tuple[str, str, Direction]
    by_law: Array
    residual: Array
    seconds: Array


def _strength(held: Sequence[_HeldOut]) -> float:
    """Return the least strength whose error on held-out sums is within one standard error of the best one's.

    A sum is that of a group, a precision and a direction: a part of a step. There are few of them, and the
    best strength is often best by chance; hence the rule of one standard error (Breiman et al. 1984, section
    3.4.3), here of paired differences of |error|. Returns 0 if fewer than two sums were held out.
    """
    steps: dict[tuple[str, str, Direction], list[_HeldOut]] = defaultdict(list)
    for part in held:
        steps[part.step].append(part)
    if len(steps) < 2:
        return 0.0
    errors = np.array([[_sum_error(members, s) for s in _STRENGTHS] for members in steps.values()])
    worse = errors - errors[:, [int(errors.mean(0).argmin())]]
    allowed = worse.std(0, ddof=1) / len(errors) ** 0.5
    return _STRENGTHS[int(np.argmax(worse.mean(0) <= allowed))]


def _sum_error(members: Sequence[_HeldOut], strength: float) -> float:
    """Return |predicted / measured - 1| of one sum."""
    guess = sum(float((p.by_law * np.exp(strength * _clipped(p.residual))).sum()) for p in members)
    return abs(guess / sum(float(p.seconds.sum()) for p in members) - 1)


def _grouping(samples: Sequence[Sample]) -> Callable[[Sample], str]:
    """Return the function from a sample to its held-out group: its profile, or a random part of the calls."""
    if len({sample.source for sample in samples}) >= _MIN_SOURCES:
        return lambda sample: sample.source
    fold = _folds(samples)
    return lambda sample: str(fold[sample.call])


def _folds(samples: Sequence[Sample]) -> dict[Call, int]:
    """Assign calls to folds at random, the same way every time."""
    distinct = list(dict.fromkeys(sample.call for sample in samples))
    random.Random(0).shuffle(distinct)
    return {call: i % FOLDS for i, call in enumerate(distinct)}


def _precision(mode: str) -> str:
    """Return the precision of a mode; of a cast it is that of its target."""
    return mode.split()[-1].split("_")[0]


def _clipped(residual: Array) -> Array:
    return np.clip(residual, -_MAX_LOG_RESIDUAL, _MAX_LOG_RESIDUAL)


class Priced(Protocol):
    """Anything that prices calls: a cost model, or a baseline."""

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Array:
        """Return the seconds (N,) of calls in a mode and direction on a device."""
        ...


def costs_of(model: Priced, asked: Sequence[tuple[Call, str]], sheet: DataSheet) -> list[Cost]:
    """Price calls in a mode on one device, forward and backward; 0 where there is no work.

    >>> costs_of(model, [(call, "int8")], datasheet("T4"))
    """
    wanted = [
        (i, d) for i, (call, mode) in enumerate(asked) for d in DIRECTIONS if has_direction(call, mode, d)
    ]
    found = {(i, d): 0.0 for i in range(len(asked)) for d in DIRECTIONS}
    if wanted:
        seconds = model.seconds([(*asked[i], d, sheet) for i, d in wanted])
        found |= {key: float(value) for key, value in zip(wanted, seconds, strict=True)}
    return [Cost(found[i, "forward"], found[i, "backward"]) for i in range(len(asked))]


Fit = Callable[[Sequence[Sample]], Priced]


def held_out_error(samples: Sequence[Sample], fit: Fit) -> StatedError | None:
    """Measure the errors of held-out predictions: of shapes held out in turn, then of whole profiles.

    Returns None if there are fewer than two shapes.
    """
    predicted = held_out_shapes(samples, fit)
    if predicted is None:
        return None
    errors = np.abs(predicted / np.array([sample.seconds for sample in samples]) - 1)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for sample, error in zip(samples, errors, strict=True):
        by_kind[sample.call.kind].append(float(error))
    sources = list(dict.fromkeys(sample.source for sample in samples))
    steps = [step_error(samples, source, fit) for source in sources] if len(sources) > 1 else []
    return StatedError(
        {kind: spread(found) for kind, found in by_kind.items()},
        spread(errors),
        float(np.median(steps)) if steps else None,
    )


def held_out_shapes(samples: Sequence[Sample], fit: Fit) -> Array | None:
    """Predict every sample (N,) by a model without any sample of its call; None for a single call."""
    fold = _folds(samples)
    if len(fold) < 2:
        return None
    predicted = np.zeros(len(samples))
    for held in range(min(FOLDS, len(fold))):
        model = fit([sample for sample in samples if fold[sample.call] != held])
        rows = [i for i, sample in enumerate(samples) if fold[sample.call] == held]
        predicted[rows] = model.seconds([asked(samples[i]) for i in rows])
    return predicted


def step_error(samples: Sequence[Sample], source: str, fit: Fit) -> float:
    """Return the error of the summed time of a source's samples, by a model of all other sources."""
    model = fit([sample for sample in samples if sample.source != source])
    mine = [sample for sample in samples if sample.source == source]
    return abs(float(model.seconds([asked(s) for s in mine]).sum()) / sum(s.seconds for s in mine) - 1)


def asked(sample: Sample) -> tuple[Call, str, Direction, DataSheet]:
    """Return the arguments under which a model predicts a sample."""
    return sample.call, sample.mode, sample.direction, sample.sheet


def spread(errors: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    found = np.array(list(errors))
    return float(np.median(found)), float(np.quantile(found, 0.95))


def _rows(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[Key, npt.NDArray[np.intp]]:
    """Return the indices of each kind's or family's samples, by mode and direction."""
    groups: dict[Key, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        groups[name(sample), sample.mode, sample.direction].append(i)
    return {key: np.array(rows) for key, rows in groups.items()}


def _some(places: list[int]) -> list[int]:
    """Return at most `_MAX_FITTED_SAMPLES` of the indices, the same ones every time."""
    return (
        places if len(places) <= _MAX_FITTED_SAMPLES else random.Random(0).sample(places, _MAX_FITTED_SAMPLES)
    )


def _points(samples: Sequence[Sample]) -> tuple[Array, Array]:
    """Return the seconds of each part at full speed (N, 3) and the seconds measured (N,).

    Both are without the sums of gradients: laws are fitted to them.
    """
    at_best = np.array([parts(*asked(sample)) for sample in samples])
    return at_best, np.array([without_sums(sample) for sample in samples])
