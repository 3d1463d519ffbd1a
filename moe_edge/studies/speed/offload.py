"""Suite `offload`: offloaded runs beside what link, compute and memory allow.

A row's `ratio` is ours / bound, `bar` the ratio that is allowed and `limit_fraction`
ratio / bar: up to 1 the bar holds. Cases over an emulated link say so.
"""

from pathlib import Path

from moe_edge.studies.speed.offload_host import host_rows
from moe_edge.studies.speed.offload_links import PREDICTORS, link_rows
from moe_edge.studies.speed.offload_memory import (
    device_rows,
    large_source,
    process_rows,
)
from moe_edge.studies.speed.offload_rows import Sizes, standard_sizes, timed_models
from moe_edge.studies.speed.offload_smoe import smoe_rows

HOST_ROUNDS = 5  # of the rows without a link, for one of the others


def offload_models(work_dir: Path) -> list[tuple[str, Path]]:
    """Name and HF folder of the models that are run."""
    sizes = standard_sizes()
    large = large_source(work_dir, sizes)
    return [*timed_models(work_dir, sizes), ("olmoe_large", large)]


def offload_suite(
    repeats: int, work_dir: Path, sizes: Sizes | None = None
) -> list[dict]:
    """All rows: memory, host cost, links, SMoE.

    Args:
      repeats: measured rounds of whatever is timed.
      work_dir: of the random checkpoints, up to 4 GB.
      sizes: how much to do (None: `standard_sizes`).
    """
    sizes = sizes or standard_sizes()
    random, default = timed_models(work_dir, sizes)
    # Processes first: their memory is then not competed for by our own engines.
    rows = process_rows(work_dir, sizes)
    rows += device_rows(*random, sizes)
    # A small difference of short runs: more rounds.
    rows += host_rows(*random, sizes, HOST_ROUNDS * repeats)
    rows += link_rows(*random, sizes, repeats, PREDICTORS, forced=True)
    rows += link_rows(*default, sizes, repeats, ("none",))
    return rows + smoe_rows(sizes, repeats)
