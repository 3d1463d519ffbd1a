"""Suite `cluster`: what calls, start-up, migration and losses cost among processes.

Every figure is of real processes on this machine. Parts that need an emulated network
are left out, with a line that says why, where it cannot be made.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Steps, known
from moe_edge.bench.speed import Models, Rows, SuiteSettings, speed_study
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.core.checks import MoeEdgeError
from moe_edge.studies.speed.models import olmoe_config, write_random

# Part -> what measures it, later: it loads JAX or starts processes.
PARTS: Mapping[str, Callable[..., Rows]] = {
    "calls": later("studies.speed.cluster_calls.call_rows"),
    "local": later("studies.speed.cluster_local.local_rows"),
    "block": later("studies.speed.cluster_calls.block_rows"),
    "bytes": later("studies.speed.cluster_live.bytes_rows"),
    "migration": later("studies.speed.cluster_live.migration_rows"),
    "losses": later("studies.speed.cluster_live.loss_rows"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings(SuiteSettings):
    """How much suite `cluster` does; `SuiteSettings` names the rest.

    Attributes:
      parts: what is measured: calls, local, block, bytes, migration, losses.
      hf_config: of the random model beside the default one, of width 768.
      calls: a round, each followed by bare TCP of the same bytes.
      local_steps: decode steps a round, with everything local.
      fetches: blocks a round.
      link_mbps: of the emulated network.
      requests_per_server, new_tokens: of live runs.
      period_s: between decisions on migration.
    """

    parts: Sequence[Annotated[str, known("part", PARTS)]] = tuple(PARTS)
    hf_config: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: olmoe_config(1, "float32", experts=16)
    )
    calls: int = 200
    local_steps: int = 24
    fetches: int = 20
    link_mbps: int = 500
    requests_per_server: int = 8
    new_tokens: Steps = 48
    period_s: float = 1.5


def cluster_models(settings: ClusterSettings, work_dir: Path) -> Models:
    """Name and HF folder of the models that are run."""
    width = settings.hf_config["hidden_size"]
    folder = write_random(work_dir / f"olmoe_1_layer_{width}", settings.hf_config)
    return [("default", DEFAULT_MODEL), (f"random, D = {width}", folder)]


def cluster_rows(settings: ClusterSettings, work_dir: Path) -> Rows:
    """All rows; a part that cannot be measured here says so in a line."""
    rows = []
    for part in settings.parts:
        try:
            rows += PARTS[part](settings, work_dir, cluster_models(settings, work_dir))
        except MoeEdgeError as error:
            print(f"not measured: {part}: {' '.join(str(error).split())}", flush=True)
    return rows


STUDY = speed_study(
    "cluster",
    "What do calls, start-up, migration and losses cost in a live cluster?",
    cluster_rows,
    cluster_models,
    settings=ClusterSettings,
    limit="All processes share the cores of one machine. Links are emulated by tc "
    "where a rate is named, else loopback.",
)
