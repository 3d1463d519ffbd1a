"""Prism, figures 2 and 3: how usage of experts differs by domain and by layer.

From counts of real models (`place/statistics.py` has the schema). Beside them stand the
narrow tasks that the simulations of placement assume, measured alike.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.frames import Rows, Tables, frame
from moe_edge.papers.prism.prism import layer_entropy
from moe_edge.place.statistics import read_counts, read_statistics
from moe_edge.workload.routing_model import BIGBENCH, SOURCES, RoutingModel

MEASURED = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternSettings(StudySettings):
    """What is read.

    Attributes:
      data_dir: where `counts` is looked up.
      counts: JSON lines of counts by model, domain and layer.
    """

    data_dir: str | None = None
    counts: str = "routing/expert_counts.jsonl"


class Usage(NamedTuple):
    """Shares of calls.

    Attributes:
      share_NLE: float64, each expert's share of a layer's calls in each domain.
      domains, layers: names of the first two axes.
    """

    share_NLE: np.ndarray
    domains: list[str]
    layers: list[int]

    @property
    def favourites(self) -> int:
        """How many experts are a quarter, at least one."""
        return max(1, self.share_NLE.shape[2] // 4)

    def caught_NML(self) -> np.ndarray:
        """Share of the calls of domain M that domain N's most used quarter gets."""
        order_NLE = np.argsort(-self.share_NLE, axis=2)[..., : self.favourites]
        found = [
            [np.take_along_axis(asked_LE, order_LE, 1).sum(1) for asked_LE in self[0]]
            for order_LE in order_NLE
        ]
        return np.array(found)

    def apart_L(self) -> np.ndarray:
        """Total variation between two domains: the mean over pairs, by layer."""
        pairs = itertools.combinations(self.share_NLE, 2)
        return np.mean([np.abs(a - b).sum(1) / 2 for a, b in pairs], axis=0)

    def entropy_NL(self) -> np.ndarray:
        """As a share of what equal usage would have."""
        return layer_entropy(self.share_NLE) / np.log2(self.share_NLE.shape[2])


def read_usage(path: Path) -> dict[str, Usage]:
    """By model, from rows that count all chosen experts (the largest `top_k`)."""
    rows = read_counts(path)
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        domains = list(dict.fromkeys(row["domain"] for row in mine))
        top_k = max(row["top_k"] for row in mine)
        counted = read_statistics(path, domains, model, top_k)
        usage = Usage(counted.frequency_NLE, domains, list(counted.layers))
        if len(domains) < 2 or usage.share_NLE.shape[2] < 2:
            raise ConfigError(
                f"{path} has {len(domains)} domains of {usage.share_NLE.shape[2]} "
                f"experts of {counted.model}, expected two domains and experts at least"
            )
        found[counted.model] = usage
    return found


def assumed_usage(model: str) -> Usage | None:
    """The narrow tasks of simulations, all layers of the model they were fitted to."""
    for source in SOURCES:
        if source in model.lower():
            generator = RoutingModel.load(source)
            share_NLE = np.array([generator.frequencies(task) for task in BIGBENCH])
            return Usage(share_NLE, list(BIGBENCH), list(range(generator.num_layers)))
    return None


def measure(settings: PatternSettings, rows: Rows) -> None:
    """Reads the counts; nothing is run."""
    path = Path(find_file(settings.counts, settings.data_dir))
    measured = read_usage(path)
    for model, usage in measured.items():
        rows("usage", MEASURED, model, **facts_of(usage))
        tell_domains(rows, model, usage)
    for model in measured:
        if (usage := assumed_usage(model)) is not None:
            rows("usage", "assumed tasks", model, **facts_of(usage))
    rows.about |= {
        "model": {
            "name": ", ".join(measured),
            "params": 0,
            "weights": "none: recorded counts of their routers",
        },
        "workload": {"counts": path.name, "sha256": sha256_of(path)},
    }


def facts_of(usage: Usage) -> dict[str, float]:
    """Means over domains and layers, and extremes."""
    caught_NML, same = usage.caught_NML(), np.eye(len(usage.domains), dtype=bool)
    entropy_NL = usage.entropy_NL()
    return {
        "own": float(caught_NML[same].mean()),
        "another": float(caught_NML[~same].mean()),
        "apart": float(usage.apart_L().mean()),
        "least_entropy": float(entropy_NL.min()),
        "most_entropy": float(entropy_NL.max()),
    }


def tell_domains(rows: Rows, model: str, usage: Usage) -> None:
    """Adds shares of experts in the first layer, most used in the first domain first,
    and how evenly each layer is used."""
    order_E = np.argsort(-usage.share_NLE[0, 0])
    for domain, share_LE in zip(usage.domains, usage.share_NLE, strict=True):
        for place, share in enumerate(share_LE[0, order_E], 1):
            rows("experts", model, usage.layers[0], domain, place, share=share)
    for domain, entropy_L in zip(usage.domains, usage.entropy_NL(), strict=True):
        for layer, entropy in zip(usage.layers, entropy_L, strict=True):
            rows("layers", model, domain, layer, entropy=entropy)


def derive(tables: Tables) -> dict[str, Any]:
    """What is measured, and how many layers were counted."""
    usage, layers = tables["usage"], tables["layers"]
    counted = layers.groupby("model", sort=False).layer.nunique().reset_index()
    return {"measured": usage[usage.kind == MEASURED], "counted": counted}


FRAMES = {
    "usage": frame("kind model", "own another apart least_entropy most_entropy"),
    "experts": frame("model layer domain place", "share"),
    "layers": frame("model domain layer", "entropy"),
}
STUDY = Study(
    "prism_fig2",
    PatternSettings,
    measure,
    FRAMES,
    derive,
    check=lambda settings: find_file(settings.counts, settings.data_dir),
)
