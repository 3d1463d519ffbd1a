"""One style for all pictures, drawn without a display and written small."""

import contextlib
import io
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

COLOURS = 256  # most of a picture


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
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    write_png(drawn, path)


def write_png(drawn: io.BytesIO | Path, path: Path) -> None:
    """Writes a picture in 256 colours, a third of the bytes of true colour.

    Args:
      drawn: a PNG file, which may be `path` itself.
    """
    from PIL import Image  # matplotlib's

    with Image.open(drawn) as image:
        if image.mode == "P":
            found = image.copy()
        else:
            found = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        dots = image.info.get("dpi", ())
    found.save(path, optimize=True, **({"dpi": dots} if dots else {}))
