"""A learned model of the time of an operator, at a shape or on a device that was never profiled.

    t = law(kind, mode, direction) + sums

The law is a linear fit: a launch, products at a fraction of their peak, bytes at a fraction of the bandwidth
(`roofline_law`). Sums are the additions of gradients by autograd. All costs are relative to the roofline. The
model assumes that an unmeasured device reaches the same fractions of its peaks as the device of its samples.
Such a price is an assumption, not a measurement, and is called simulated.

The model states its own error, on held-out shapes and on held-out profiles.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsync.errors import CalibrationError, FormatError
from qsync.operators.precision import Precision
from qsync.predictor.cost_model.op_calls import Call, Direction, family, has_direction, parts, sum_s
from qsync.predictor.cost_model.roofline_law import Array, Law
from qsync.predictor.cost_model.samples import DIRECTIONS, MIN_SAMPLE_S, Sample, without_sums
from qsync.records.datasheets import DataSheet
from qsync.records.json_files import read_json, write_json
from qsync.records.profiles import Cost
from qsync.records.record_json import Count, FileRecord, Number

FOLDS = 5  # of cross-validation by shape
# Unmeasured mode -> measured mode whose fractions of peak replace it.
_SUBSTITUTE = {str(p): p.facts.priced_like for p in Precision if p.facts.priced_like}

Key = tuple[str, str, Direction]


@dataclass(frozen=True, slots=True)
class StatedError:
    """Relative errors |predicted / measured - 1| on held-out data: median and 95th percentile.

    `by_kind` and `overall` are errors of single operators, forward or backward, at held-out shapes. `step` is
    the error of the summed time of a held-out profile; None if there was only one profile.
    """

    by_kind: Mapping[str, tuple[Number, Number]]
    overall: tuple[Number, Number]
    step: Number | None = None

    def of(self, kind: str) -> float:
        """Return the median error of one kind, or of all kinds if that kind has no samples."""
        return self.by_kind.get(kind, self.overall)[0]


@dataclass(frozen=True, slots=True)
class _File(FileRecord):
    """The file of a cost model: error, data sheets, and samples that refer to sheets by index."""

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
        points, seconds = _points(samples)
        self._families = {
            key: Law.fit(points[rows], seconds[rows])
            for key, rows in _rows(samples, lambda sample: family(sample.call.kind)).items()
        }
        self._kinds = {
            key: Law.fit(points[rows], seconds[rows], self._families[family(key[0]), key[1], key[2]])
            for key, rows in _rows(samples, lambda sample: sample.call.kind).items()
        }

    @classmethod
    def learn(cls, samples: Sequence[Sample]) -> CostModel:
        """Fit a model, and state its error by cross-validation."""
        return cls(samples, held_out_error(samples, cls))

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Array:
        """Return the seconds (N,) of N calls, each in a mode and direction on a device.

        Raises KeyError for a product in a type that the device does not multiply.
        """
        laws = np.array(
            [self._law_of(call, self._mode(call, mode, d), d).parts for call, mode, d, _ in asked]
        )
        points = np.array([parts(*each) for each in asked]).reshape(-1, 3)
        by_law: Array = np.maximum((points * laws.reshape(-1, 3)).sum(1), MIN_SAMPLE_S)
        sums: Array = np.array([sum_s(call, direction, sheet) for call, _, direction, sheet in asked])
        return by_law + sums

    def _mode(self, call: Call, mode: str, direction: Direction) -> str:
        """Return the mode whose law prices a call: its own, or the most similar measured mode."""
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

    def _law_of(self, call: Call, mode: str, direction: Direction) -> Law:
        """Return the law of a kind, else of its family, else of memory-bound operators."""
        for laws, name, of in (
            (self._kinds, call.kind, mode),
            (self._families, family(call.kind), mode),
            (self._families, family(""), "fp32"),
        ):
            if (name, of, direction) in laws:
                return laws[name, of, direction]
        return Law()

    def to_json(self) -> dict[str, Any]:
        """Return the samples and the stated error; a fit of the same samples gives the same model."""
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
        except (IndexError, KeyError) as error:  # an unknown shape, type or data sheet
            raise FormatError(f"the samples of a cost model do not fit ({error!r}); learn it anew") from error

    def save(self, path: str | Path) -> Path:
        """Write the samples and the stated error to a file."""
        return write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a cost model from the file that `save` wrote."""
        return cls.from_json(read_json(path), str(path))


def _folds(samples: Sequence[Sample]) -> dict[Call, int]:
    """Assign calls to cross-validation folds at random, with a fixed seed."""
    distinct = list(dict.fromkeys(sample.call for sample in samples))
    random.Random(0).shuffle(distinct)
    return {call: i % FOLDS for i, call in enumerate(distinct)}


class Priced(Protocol):
    """Anything that prices calls: a cost model, or a baseline."""

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Array:
        """Return the seconds (N,) of calls in a mode and direction on a device."""
        ...


def costs_of(model: Priced, asked: Sequence[tuple[Call, str]], sheet: DataSheet) -> list[Cost]:
    """Price calls, each in a mode, on one device; 0 for a direction without work.

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
    """Return the errors of held-out predictions, of shapes and of whole profiles.

    Returns None if the samples have fewer than two calls.
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
    """Predict all samples (N,) by models fitted without their calls; None for a single call."""
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
    """Return the relative error of a source's summed time, predicted by a model of the other sources."""
    model = fit([sample for sample in samples if sample.source != source])
    mine = [sample for sample in samples if sample.source == source]
    return abs(float(model.seconds([asked(s) for s in mine]).sum()) / sum(s.seconds for s in mine) - 1)


def asked(sample: Sample) -> tuple[Call, str, Direction, DataSheet]:
    """Return the arguments under which a model predicts a sample."""
    return sample.call, sample.mode, sample.direction, sample.sheet


def spread(errors: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile of errors."""
    found = np.array(list(errors))
    return float(np.median(found)), float(np.quantile(found, 0.95))


def _rows(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[Key, npt.NDArray[np.intp]]:
    """Return the sample indices by (name, mode, direction); `name` maps a sample to kind or family."""
    groups: dict[Key, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        groups[name(sample), sample.mode, sample.direction].append(i)
    return {key: np.array(rows) for key, rows in groups.items()}


def _points(samples: Sequence[Sample]) -> tuple[Array, Array]:
    """Return each sample's seconds of each part at peak speed (N, 3), and its measured seconds (N,).

    Both exclude the additions of gradients. Laws are fitted to these points.
    """
    at_best = np.array([parts(*asked(sample)) for sample in samples])
    return at_best, np.array([without_sums(sample) for sample in samples])
