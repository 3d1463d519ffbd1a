"""One style for all pictures, drawn without a display."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "savefig.dpi": 150,
}


@contextlib.contextmanager
def picture(
    path: Path,
    title: str = "",
    *,
    figsize: tuple[float, float] | None = None,
    **options,
) -> Iterator[tuple[Any, Any]]:
    """Figure and axes in our style, written to a PNG file at the end.

    Without pyplot, whose settings (a notebook's) are the caller's.

    Args:
      path: of the file.
      title: of the picture.
      figsize: width and height in inches.
      **options: of `Figure.subplots`.
    """
    import matplotlib  # takes a second, which a refused value need not wait for
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure, figure.subplots(**options)
        if title:
            figure.suptitle(title)
        figure.savefig(path)
