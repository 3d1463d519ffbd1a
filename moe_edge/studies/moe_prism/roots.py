"""The root of launch/study_elastic.py: one study of refactored models."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.core.checks import check_known
from moe_edge.core.files import check_out_dir
from moe_edge.evaluate.texts import find_path, read_text
from moe_edge.metrics.results import Entry
from moe_edge.studies.moe_prism import fig8, fig10, quality, table3
from moe_edge.studies.moe_prism.models import check_models, make_models, provenance
from moe_edge.studies.moe_prism.settings import ElasticSettings
from moe_edge.studies.smoe.settings import write_study

STUDIES = {
    "moe_prism_table2": quality.run,
    "moe_prism_fig9": quality.run,
    "moe_prism_table3": table3.run,
    "moe_prism_fig8": fig8.run,
    "moe_prism_fig10": fig10.run,
}
DEFAULT = ElasticSettings()


def run_elastic(
    *,
    name: str,
    out_dir: str,
    checkpoint: str = "default",
    lg: str | None = None,
    lg_ft: str | None = None,
    cg: str | None = None,
    make: Sequence[str] = (),
    work_dir: str = DEFAULT.work_dir,
    calibration: Sequence[str] = DEFAULT.calibration,
    calibration_tokens: int = DEFAULT.calibration_tokens,
    fine_tuning: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    texts: Sequence[str] = DEFAULT.texts,
    max_tokens: int = DEFAULT.max_tokens,
    k_values: Sequence[int] = DEFAULT.k_values,
    sets: Sequence[str] = DEFAULT.sets,
    limit: int = DEFAULT.limit,
    question_tokens: int = DEFAULT.question_tokens,
    batches: Sequence[int] = DEFAULT.batches,
    rounds: int = DEFAULT.rounds,
    prompt_tokens: int = DEFAULT.prompt_tokens,
    new_tokens: int = DEFAULT.new_tokens,
    budgets: Sequence[str] = DEFAULT.budgets,
    link_factor: float = DEFAULT.link_factor,
    link_latency_s: float = DEFAULT.link_latency_s,
    sources: Sequence[str] = DEFAULT.sources,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict:
    """Runs a study and writes its entry.

    Args:
      name: one of STUDIES.
      out_dir: folder of the entry.
      checkpoint, ..., sources: see `ElasticSettings`.
      overwrite: replace a non-empty out_dir.
      dry_run: check everything but the weights and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
      OSError: a file cannot be read.
    """
    given, started = locals(), time.time()
    check_known("study", name, STUDIES)
    fields = [field.name for field in dataclasses.fields(ElasticSettings)]
    given["fine_tuning"] = fine_tuning or {}
    settings = ElasticSettings(**{field: given[field] for field in fields})
    check_out_dir(out_dir, overwrite)
    if not make:
        check_models(settings)
    for file in settings.texts:
        read_text(find_path(file, data_dir))
    if dry_run:
        return {"dry_run": True, "study": name, "out_dir": out_dir}
    settings = make_models(settings)
    check_models(settings)
    model, found = STUDIES[name](settings)
    made = {"refactored": provenance(settings)}
    parts = found.entry | {"workload": found.entry["workload"] | made}
    entry = Entry(model=model, started_s=started, **parts)
    print(f"{entry.question}\n{entry.answer}")
    return write_study(
        name,
        out_dir,
        entry,
        found,
        config_text=config_text,
        overwrite=overwrite,
    )
