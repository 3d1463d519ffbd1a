"""A table of `compare` as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_edge.core.figures import picture
from moe_edge.public.options import PLUG_INS

if TYPE_CHECKING:
    import pandas


def plot(table: "pandas.DataFrame", path: str | Path = "compare.png") -> Path:
    """Draws a table of `compare` into a PNG file: tokens a second of every case.

    Returns:
      the path of the file.
    """
    path, labels = Path(path), _labels(table)
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
    names = [name for name in PLUG_INS if table[name].nunique() > 2] or ["eviction"]
    labels = []
    for _, row in table.iterrows():
        ratio = row["hit_ratio"]
        known = ratio is not None and not np.isnan(ratio)
        hits = f"({ratio:.0%} hits)" if known else ""
        parts = row["budget"], *(row[name] for name in names), hits
        labels.append(" ".join(part for part in parts if part))
    return labels
