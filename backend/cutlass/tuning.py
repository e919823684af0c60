"""Choose the tile of a product by measurement, once per shape and GPU.

The choice is kept on disk. The file holds one JSON object per line, appended in one write: several ranks may
write at once. A truncated line is skipped, and its setting measured and written again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qsync.errors import UnsupportedError

_MAX_TRIALS = 24


class LaunchSetting(NamedTuple):
    """A launch setting of a product: its tile ("128x128x64/4"), and the slices of the inner dimension."""

    tile: str
    slices: int = 1


class Tuner:
    """Finds the fastest setting for each key, measured on its first request.

    >>> tuner = Tuner(Path("tiles-NVIDIA L4.jsonl"))
    >>> tuner.best("int8_nt 512x512x512", tiles=("128x128x64/4",), slices=(1, 2), measure=seconds)
    LaunchSetting(tile='128x128x64/4', slices=1)
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, LaunchSetting] = {} if path is None else dict(_read(path))

    def best(
        self,
        key: str,
        tiles: Sequence[str],
        slices: Sequence[int],
        measure: Callable[[LaunchSetting], float],
    ) -> LaunchSetting:
        """Return the stored setting for `key`, or the setting with the least `measure`.

        `measure` returns seconds, and may raise UnsupportedError for a setting that cannot run; if none can,
        the first such error is raised. Ties go to the first setting.
        """
        known = self._known.get(key)
        if known is not None and known.tile in tiles and known.slices in slices:
            return known
        setting, seconds = search(tiles, slices, measure)
        self._known[key] = setting
        if self.path is not None:
            _append(
                self.path, {"key": key, "tile": setting.tile, "slices": setting.slices, "seconds": seconds}
            )
        return setting


def search(
    tiles: Sequence[str], slices: Sequence[int], measure: Callable[[LaunchSetting], float]
) -> tuple[LaunchSetting, float]:
    """Find the setting with the least `measure`, and its seconds, by optuna.

    Measures all of at most 24 settings (a grid), else 24 that optuna's Parzen estimator proposes.
    """
    if len(tiles) * len(slices) == 1:
        setting = LaunchSetting(tiles[0], slices[0])
        return setting, measure(setting)
    import optuna  # half a second, paid only where something must be measured

    seconds: dict[LaunchSetting, float] = {}
    errors: list[UnsupportedError] = []

    def objective(trial: optuna.Trial) -> float:
        setting = LaunchSetting(
            trial.suggest_categorical("tile", tuple(tiles)),
            trial.suggest_categorical("slices", tuple(slices)),
        )
        if setting not in seconds:
            try:
                seconds[setting] = measure(setting)
            except UnsupportedError as error:
                errors.append(error)
                seconds[setting] = math.inf
        return seconds[setting]

    num_settings = len(tiles) * len(slices)
    space: dict[str, Sequence[str | int]] = {"tile": list(tiles), "slices": list(slices)}
    sampler = (
        optuna.samplers.GridSampler(space, seed=0)
        if num_settings <= _MAX_TRIALS
        else optuna.samplers.TPESampler(seed=0)
    )
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler)
        study.optimize(objective, n_trials=min(num_settings, _MAX_TRIALS))
    finally:
        optuna.logging.set_verbosity(verbosity)
    order = {LaunchSetting(t, s): i for i, (s, t) in enumerate((s, t) for s in slices for t in tiles)}
    best = min(seconds, key=lambda setting: (seconds[setting], order[setting]))
    if math.isinf(seconds[best]):
        raise errors[0]
    return best, seconds[best]


def _read(path: Path) -> list[tuple[str, LaunchSetting]]:
    """Read the stored settings; incomplete lines are skipped, later lines win."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    known = []
    for line in lines:
        try:
            entry = json.loads(line)
            known.append((str(entry["key"]), LaunchSetting(str(entry["tile"]), int(entry["slices"]))))
        except (ValueError, TypeError, KeyError):
            continue
    return known


def _append(path: Path, entry: Mapping[str, object]) -> None:
    """Append a line in one write, with a line break before it in case the last line is truncated."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, f"\n{json.dumps(entry)}\n".encode())
        finally:
            os.close(handle)
    except OSError:
        return  # measured again in the next process: slower to start, never wrong
