"""The root of launch/study_prism.py: one study of placement on a cluster (Prism)."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from moe_edge.core.checks import check_known
from moe_edge.core.files import check_out_dir
from moe_edge.hardware.models import model_shape
from moe_edge.metrics.results import Entry
from moe_edge.simulate.cluster.build import WORKLOADS
from moe_edge.studies.prism import fig5, fig6, fig7, fig8, sensitivity, table2
from moe_edge.studies.prism.settings import PrismSettings
from moe_edge.studies.smoe.settings import write_study

STUDIES = {
    "prism_table2": table2.run,
    "prism_fig5": fig5.run,
    "prism_fig6": fig6.run,
    "prism_fig7": fig7.run,
    "prism_fig8": fig8.run,
    "prism_sensitivity": sensitivity.run,
}
DEFAULT = PrismSettings()


def run_prism_study(
    *,
    name: str,
    out_dir: str,
    seed: int = DEFAULT.seed,
    seeds: int = DEFAULT.seeds,
    requests_per_server: int = DEFAULT.requests_per_server,
    model: str = DEFAULT.model,
    workload: str = DEFAULT.workload,
    interval_s: float = DEFAULT.interval_s,
    methods: Sequence[str] = DEFAULT.methods,
    period_s: float = DEFAULT.period_s,
    keep: float = DEFAULT.keep,
    hysteresis: float = DEFAULT.hysteresis,
    keeps: Sequence[float] = DEFAULT.keeps,
    hystereses: Sequence[float] = DEFAULT.hystereses,
    window_s: float = DEFAULT.window_s,
    gpus: Sequence[int] = DEFAULT.gpus,
    intervals: Sequence[float] = DEFAULT.intervals,
    mbps: Sequence[float] = DEFAULT.mbps,
    tokens: Sequence[int] = DEFAULT.tokens,
    remote_shares: Sequence[float] = DEFAULT.remote_shares,
    skews: Sequence[float] = DEFAULT.skews,
    memory_shares: Sequence[float] = DEFAULT.memory_shares,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Runs a study in computed time and writes its entry.

    Args:
      name: one of STUDIES.
      out_dir: folder of the entry.
      seed, ..., memory_shares: see `PrismSettings`.
      overwrite: replace a non-empty out_dir.
      dry_run: check the settings and stop.
      config_text: gives the config to store.
    Raises:
      ConfigError: bad settings; CapacityError: too little memory for a model.
      OutputError: `out_dir` cannot be written.
    """
    given, started_s = locals(), time.time()
    check_known("study", name, STUDIES)
    fields = [field.name for field in dataclasses.fields(PrismSettings)]
    settings = PrismSettings(**{field: given[field] for field in fields})
    model_shape(settings.model)
    check_known("workload", settings.workload, WORKLOADS)
    check_out_dir(out_dir, overwrite)
    if dry_run:
        return {"dry_run": True, "study": name, "out_dir": out_dir}
    shape, found = STUDIES[name](settings)
    entry = Entry(
        model=shape,
        kind="simulated",
        cost_model_source="preset",
        seeds=settings.all_seeds,
        started_s=started_s,
        **found.entry,
    )
    print(f"{entry.question}\n{entry.answer}")
    return write_study(
        name,
        out_dir,
        entry,
        found,
        config_text=config_text,
        overwrite=overwrite,
        pictures=found.pictures,
    )
