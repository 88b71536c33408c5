"""The style and the saving of the plots that commands write; matplotlib is imported for the first one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, PALE = "#333333", "#c4c8ce"
STYLE = {
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{f"{of}.color": INK for of in ("text", "xtick", "ytick")},
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    "font.size": 9,
    "grid.color": PALE,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
}


@contextmanager
def figure_for(file: Path, width: float, height: float, title: str = "") -> Iterator[Figure]:
    """Yield a figure, with sizes in inches, to be written in the format of the file's suffix when the block ends.

    UserError without matplotlib or if writing fails.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the plot needs `pip install matplotlib`; all else is written") from None
    with rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left")
        yield figure
        try:
            figure.savefig(file, dpi=120)
        except (OSError, ValueError) as error:
            raise UserError(f"the plot cannot be written to {file} ({error})") from error
