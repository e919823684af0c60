"""The versions of other libraries that the integrations are tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from qsync.errors import UnsupportedError

# First supported version, and the first untested one.
_RANGES = {"transformers": ("5.0", "6"), "accelerate": ("1.15", "2"), "lightning": ("2.5", "3")}


def check_version(package: str) -> None:
    """Raise UnsupportedError unless an installed library has a supported version."""
    first, last = _RANGES[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UnsupportedError(
            f"{package} is not installed: pip install '{package}>={first},<{last}'"
        ) from None
    if not _numbers(first) <= _numbers(found) < _numbers(last):
        raise UnsupportedError(
            f"qsync works with {package}>={first},<{last}, found {found}; install one of those versions"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return a version's numbers without pre-release marks."""
    parts = text.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
