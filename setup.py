"""One package, seven rooms: the top-level folders install as `qsync` and `qsync.<folder>`.

A top-level package called `backend` would be shadowed by any user's own `backend/` folder, so the mapping
below gives each folder its name under `qsync`.
"""

from setuptools import setup

ROOMS = ("backend", "predictor", "replayer", "allocator", "experiments")

PACKAGES = {"qsync": "qsync", **{f"qsync.{room}": room for room in ROOMS}}
PACKAGES["qsync.expansion"] = "qsync/expansion"
PACKAGES["qsync.expansion.derivation"] = "qsync/expansion/derivation"
# CUDA sources travel with the package: they are compiled where they run.
PACKAGES["qsync.backend.cutlass"] = "backend/cutlass"

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        "qsync.predictor": ["*.json"],
        "qsync.backend": ["*.h"],
        "qsync.backend.cutlass": ["*.cu", "*.h"],
    },
)
