"""Imports the native kernels (the package outpace-kernels) and checks their version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from outpace.core.errors import UserError

__all__ = ["INSTALL", "VERSION", "check_version", "kernels"]

VERSION = "0.2.0"  # required exactly, because the interface of the kernels changes with every release
INSTALL = (
    "run `pip install ./kernels` in a checkout of outpace, with a C++20 compiler, or"
    " `pip install --find-links FOLDER outpace-kernels` where FOLDER holds a wheel of them"
)

try:
    import outpace_kernels as kernels
except ImportError as error:
    raise UserError(f"outpace needs its native kernels ({error}): {INSTALL}") from error


def check_version() -> None:
    """Raise UserError if the installed kernels have another version."""
    try:
        found = version("outpace-kernels")
    except PackageNotFoundError:  # importable, but not installed as a package
        found = "unknown"
    if found != VERSION:
        raise UserError(f"the native kernels are of version {found}, this release needs {VERSION}: {INSTALL}")


check_version()
