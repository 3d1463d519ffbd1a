"""A table of `compare` as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.figures import picture
from moe_edge.core.files import check_out_file
from moe_edge.public.options import PLUG_INS

if TYPE_CHECKING:
    import pandas

_RATES = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")
_NEEDED = ("budget", *PLUG_INS, "hit_ratio", *_RATES)


def plot(table: "pandas.DataFrame", path: str | Path = "compare.png") -> Path:
    """Draws a table of `compare` into a PNG file: tokens a second of every case.

    >>> budgets = ["10%", "25%"]
    >>> table = me.compare(model, budgets=budgets, rounds=1, max_new_tokens=4)
    >>> me.plot(table, folder / "compare.png").name
    'compare.png'

    Args:
      table: of `compare`; it may lack rows.
      path: of the file, whose name ends in .png; one that is there is replaced.
    Returns:
      the path of the file.
    Raises:
      ConfigError: no table of `compare`, or another ending.
      OutputError: the file cannot be written.
    """
    path = Path(path)
    if lacks := [name for name in _NEEDED if name not in getattr(table, "columns", ())]:
        raise ConfigError(
            f"table is {table!r:.60}, expected one of compare; it lacks "
            f"{', '.join(lacks)}"
        )
    if not len(table):
        raise ConfigError("table has no rows; compare gives one a case")
    if path.suffix != ".png":
        raise ConfigError(f"path is {str(path)!r}, expected a name that ends in .png")
    check_out_file(path)
    labels = _labels(table)
    rate = table["tokens_per_s"].to_numpy(float)
    low, high = (
        table[f"tokens_per_s_{end}"].to_numpy(float) for end in ("low", "high")
    )
    size = (7.0, 1.0 + 0.4 * len(labels))
    with picture(path, "Decoding, tokens a second", figsize=size) as (_, axes):
        places = np.arange(len(labels))  # cases may have the same label
        axes.barh(places, rate, xerr=np.stack([rate - low, high - rate]), capsize=3)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s (median of the rounds; whiskers: least and most)")
    return path


def _labels(table: "pandas.DataFrame") -> list[str]:
    """Budget, policies that differ between cases, and the hit ratio."""
    names = [name for name in PLUG_INS if len({*table[name]} - {""}) > 1]
    names = names or ["eviction"]
    labels = []
    for _, row in table.iterrows():
        ratio = row["hit_ratio"]
        known = ratio is not None and not np.isnan(ratio)
        hits = f"({ratio:.0%} hits)" if known else ""
        parts = row["budget"], *(row[name] for name in names), hits
        labels.append(" ".join(part for part in parts if part))
    return labels
