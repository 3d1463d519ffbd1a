"""What studies that are not on the driver yet take and give."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_edge.metrics.results import Entry, write_entry
from moe_edge.studies.cases import LIMITS
from moe_edge.studies.prompts import PromptSettings as Settings

__all__ = ("LIMITS", "Findings", "Settings", "claim", "write_study")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What a study found: parts of a results entry.

    Attributes:
      entry: arguments of `results.Entry`.
      plot: draws the picture.
      summary: for the last line of the script.
      files: further files of the entry, text by name.
    """

    entry: dict[str, Any]
    plot: Callable[[Path], None]
    summary: dict[str, Any]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


def claim(source: str, paper: Mapping[str, Any], ours: Mapping[str, Any], why: str):
    """`paper_claim` of an entry: the paper's numbers, ours, and why they differ."""
    known = {"source": source, "paper": dict(paper), "ours": dict(ours)}
    return known | {"why_they_differ": why}


def write_study(
    name: str,
    out_dir: str,
    entry: Entry,
    found: Findings,
    *,
    config_text: Callable[[], str],
    overwrite: bool,
    pictures: Mapping[str, Callable[[Path], None]] | None = None,
) -> dict[str, Any]:
    """Writes a study's entry; returns what its script prints last."""
    write_entry(
        out_dir,
        entry,
        plot=found.plot,
        config_text=config_text(),
        overwrite=overwrite,
        files=found.files,
        pictures=pictures,
    )
    return {
        "study": name,
        **found.summary,
        "checks": dict(entry.checks),
        "seconds": time.time() - entry.started_s,
        "out_dir": out_dir,
    }
