"""Versions of other libraries: those that work, and a sentence for the others."""

from __future__ import annotations

import pytest

from qsync.errors import UnsupportedError
from qsync.integrations import supported_versions
from qsync.integrations.supported_versions import check_version


@pytest.mark.parametrize(
    ("found", "works"),
    [("5.0.0", True), ("5.23.0", True), ("4.57.1", False), ("6.0.0.dev0", False), ("5.1.0rc1+local", True)],
)
def test_a_version_outside_of_the_range_is_named_with_it(monkeypatch, found, works):
    monkeypatch.setattr(supported_versions, "version", lambda package: found)
    if works:
        check_version("transformers")
        return
    with pytest.raises(UnsupportedError, match=rf"transformers>=5.0,<6, found {found}; install one of those"):
        check_version("transformers")


def test_a_library_that_is_missing_is_named_with_what_to_install(monkeypatch):
    def missing(package: str) -> str:
        raise supported_versions.PackageNotFoundError(package)

    monkeypatch.setattr(supported_versions, "version", missing)
    with pytest.raises(UnsupportedError, match="pip install 'lightning>=2.5,<3'"):
        check_version("lightning")
