"""Install six top-level folders as one package: `qsync/` as `qsync`, the others as `qsync.<folder>`.

A top-level package called `backend` would be shadowed by any user's own `backend/` folder. Links make the
tree that is installed: `src/qsync` is `qsync/`, and in it each of the other folders has its name. An editable
install is then a path to `src/`, which Python searches for packages before it takes a folder without
`__init__.py`, as a clone's is, for one.
"""

from setuptools import find_packages, setup

if __name__ == "__main__":
    setup(
        packages=find_packages("src"),
        package_dir={"": "src"},
        # CUDA sources travel with the package: they are compiled where they run.
        package_data={"": ["*.json", "*.h", "*.cu", "py.typed"]},
    )
