"""One package, seven rooms: the top-level folders install as `qsync` and `qsync.<folder>`.

A top-level package called `backend` would be shadowed by any user's own `backend/` folder, so the mapping
below gives each folder its name under `qsync`.
"""

from setuptools import setup

ROOMS = ("backend", "predictor", "replayer", "allocator", "experiments")

setup(
    packages=["qsync", *(f"qsync.{room}" for room in ROOMS)],
    package_dir={"qsync": "qsync", **{f"qsync.{room}": room for room in ROOMS}},
)
