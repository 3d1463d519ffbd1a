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
def picture(path: Path, title: str = "", **options) -> Iterator[tuple[Any, Any]]:
    """Figure and axes in our style, written to a PNG file at the end.

    Args:
      path: of the file.
      title: of the picture.
      **options: of `plt.subplots`.
    """
    import matplotlib  # takes a second, which a refused value need not wait for

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(layout="constrained", **options)
        yield figure, axes
        if title:
            figure.suptitle(title)
        figure.savefig(path)
        plt.close(figure)
