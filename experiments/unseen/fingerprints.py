"""Show a folder of fingerprints (`qsync doctor --report`) by processor: what predictions and timings miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from qsync.errors import QSyncError
from qsync.experiments.harness import Experiment, Page, milliseconds, table_of
from qsync.records.fingerprint import Fingerprint, Gap, SmallModel

LARGE = 0.2  # relative difference of an operator in a step and alone that is listed
_CAUSES = ("layout", "caches", "pages", "clock")
Named = Mapping[str, Fingerprint]  # file -> fingerprint


def show_all(folder: Path, out: Path, fresh: bool, page: Page | None) -> None:
    """Print a folder's fingerprints, and write them with their tables into `out` and a page's part."""
    found = read(folder)
    experiment = Experiment("fingerprints", out, fresh=fresh)
    for name, fingerprint in found.items():
        experiment.keep(f"fingerprint {name}", fingerprint.to_json())
    figures = {"fingerprints": {name: one.to_json() for name, one in found.items()}}
    part = page and replace(page, marker="fingerprints")
    experiment.finish(figures, tables=tables(found), page=part)


def read(folder: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints of a folder by file; raise QSyncError for a folder without any.

    Raises FormatError for a JSON file that is no fingerprint.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise QSyncError(
            f"--reports {folder} is no folder with JSON files; write one into it with qsync doctor --report"
        )
    return {path.stem: Fingerprint.load(path) for path in paths}


def tables(found: Named) -> list[Table]:
    """Return for each processor a table of its models, and one of operators that differ in a step."""
    processors = dict.fromkeys(one.processor for one in found.values())
    return [table for name in processors for table in _of_processor(name, found)]


def _of_processor(processor: str, found: Named) -> Iterator[Table]:
    own = {name: one for name, one in found.items() if one.processor == processor}
    models = [(name, one, model) for name, one in own.items() for model in one.models]
    headings = ("model", "report", "steps", "error of steps", "of memory", "running processes")
    rows = [(model.name, name, *_measured(one, model)) for name, one, model in models]
    yield table_of(f"Predictions of small models on {processor} (measured)", headings, rows, left=2)
    gaps = [(model.name, gap) for *_, model in models for gap in model.gaps if abs(gap.ratio - 1.0) > LARGE]
    compared = sum(len(model.gaps) for *_, model in models)
    title = (
        f"Operators whose CPU seconds in a step differ by more than {LARGE:.0%} from those alone, on "
        f"{processor}: {len(gaps)} of {compared} (measured)"
    )
    compares = "operators", "model", "precision", "times", "in a step", "alone", "ratio"
    yield table_of(
        title,
        (*compares, *_CAUSES, "explained"),
        [(gap.operators, name, *_difference(gap)) for name, gap in gaps],
        left=3,
    )


def _measured(one: Fingerprint, model: SmallModel) -> Sequence[str]:
    steps = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in model.step_s.items())
    errors = (
        ", ".join(f"{error:+.1%}" for error in errors) for errors in (model.step_errors, model.memory_errors)
    )
    return steps, *errors, f"{one.load_average:.1f}"


def _difference(gap: Gap) -> Sequence[str]:
    of_causes = (f"{1e3 * gap.causes.get(cause, 0.0):+.2f}" for cause in _CAUSES)
    seconds = milliseconds(gap.in_step_s), milliseconds(gap.alone_s)
    return gap.precision, str(gap.count), *seconds, f"{gap.ratio:.2f}", *of_causes, f"{gap.explained:.0%}"
