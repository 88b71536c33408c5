"""How an extra of this package is installed: from the checkout where it runs from one, else by the package's name."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

_CHECKOUT = Path(__file__).parents[2]


def install(extra: str, checkout: Path = _CHECKOUT) -> str:
    """The command, as in pip install 'outpace[server]'."""
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    return f"pip install 'outpace[{extra}]'"
