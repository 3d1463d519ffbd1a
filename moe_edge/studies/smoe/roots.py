"""The root of launch/study.py: one study of offloading, written as a results entry."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from moe_edge.core.files import check_out_dir
from moe_edge.engine.load import check_checkpoint
from moe_edge.metrics.results import Entry
from moe_edge.studies.prompts import prompt_files
from moe_edge.studies.smoe import fig6, fig12, fig14, fig17, public_traces, ttft
from moe_edge.studies.smoe.settings import Settings, check_name, write_study

TRACES = "replay_public_traces"
STUDIES = {
    "smoe_fig14": fig14.run,
    "smoe_fig12": fig12.run,
    "smoe_fig6": fig6.run,
    "smoe_fig17": fig17.run,
    "smoe_ttft": ttft.run,
    TRACES: public_traces.run,
}
DEFAULT = Settings()


def run_study(
    *,
    name: str,
    out_dir: str,
    checkpoint: str = "default",
    data_dir: str | None = None,
    sources: Sequence[str] = DEFAULT.sources,
    budgets: Sequence[str] = DEFAULT.budgets,
    batches: Sequence[int] = DEFAULT.batches,
    rounds: int = DEFAULT.rounds,
    prompt_tokens: int = DEFAULT.prompt_tokens,
    new_tokens: int = DEFAULT.new_tokens,
    history: int = DEFAULT.history,
    a: float = DEFAULT.a,
    link_factor: float = DEFAULT.link_factor,
    link_latency_s: float = DEFAULT.link_latency_s,
    fidelity_rows: int = DEFAULT.fidelity_rows,
    horizon: int = DEFAULT.horizon,
    lengths: Sequence[int] = DEFAULT.lengths,
    traces: Sequence[str] = DEFAULT.traces,
    trace_experts: int = DEFAULT.trace_experts,
    slots_per_layer: Sequence[int] = DEFAULT.slots_per_layer,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict:
    """Runs a study and writes its entry.

    Args:
      name: one of STUDIES.
      out_dir: folder of the entry.
      checkpoint, ..., slots_per_layer: see `Settings`.
      overwrite: replace a non-empty out_dir.
      dry_run: check everything but the weights and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
    """
    given, started = locals(), time.time()
    check_name(name, STUDIES)
    fields = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{field: given[field] for field in fields})
    check_out_dir(out_dir, overwrite)
    if name == TRACES:
        public_traces.trace_paths(settings)
    elif dry_run:
        check_checkpoint(checkpoint)
    prompt_files(settings)
    if dry_run:
        return {"dry_run": True, "study": name, "out_dir": out_dir}
    model, found = STUDIES[name](settings)
    entry = Entry(model=model, started_s=started, **found.entry)
    print(f"{entry.question}\n{entry.answer}")
    for check, passed in entry.checks.items():
        print(f"{check}: {'yes' if passed else 'NO'}")
    return write_study(
        name,
        out_dir,
        entry,
        found,
        config_text=config_text,
        overwrite=overwrite,
    )
