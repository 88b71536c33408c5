"""Prints the versions of outpace and of its kernels, and checks that they equal a release's tag.

python tests/versions.py          # prints them
python tests/versions.py 0.2.0    # fails unless all are this one and the changelog has its entry
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "outpace/__init__.py": r'^__version__ = "(.+)"$',
    "kernels/pyproject.toml": r'^version = "(.+)"$',
}


def versions() -> dict[str, str]:
    """By file."""
    found = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def is_dated(version: str) -> bool:
    """Whether the changelog has an entry of this version with its date."""
    return f"## [{version}] - 20" in (ROOT / "CHANGELOG.md").read_text()


def main() -> None:
    found = versions()
    print("\n".join(f"{version} {name}" for name, version in found.items()))
    for wanted in sys.argv[1:]:
        if set(found.values()) != {wanted}:
            sys.exit(f"not all are {wanted}")
        if not is_dated(wanted):
            sys.exit(f"CHANGELOG.md has no dated entry of {wanted}")


if __name__ == "__main__":
    main()
