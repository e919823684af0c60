"""Six top-level folders install as one package: `qsync/` as `qsync`, the others as `qsync.<folder>`.

A top-level package called `backend` would be shadowed by any user's own `backend/` folder, so the mapping
below gives each folder its name under `qsync`. Every folder below with an `__init__.py` is a package.
"""

from pathlib import Path

from setuptools import setup

TOP_LEVEL_FOLDERS = ("backend", "predictor", "replayer", "allocator", "experiments")


def packages() -> dict[str, str]:
    """Return every package by its dotted name, with the folder that holds it."""
    root, found = Path(__file__).parent, {}
    for top in ("qsync", *TOP_LEVEL_FOLDERS):
        for path in sorted((root / top).rglob("__init__.py")):
            folder = path.parent.relative_to(root)
            parts = folder.parts if top == "qsync" else ("qsync", *folder.parts)
            found[".".join(parts)] = str(folder)
    return found


if __name__ == "__main__":
    setup(
        packages=list(packages()),
        package_dir=packages(),
        # CUDA sources travel with the package: they are compiled where they run.
        package_data={"": ["*.json", "*.h", "*.cu", "py.typed"]},
    )
