"""Prism, figures 2 and 3: how usage of experts differs by domain and by layer.

From counts of real models (`place/statistics.py` has the schema). Beside them stand the
narrow tasks that the simulations of placement assume, measured alike.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.prism.prism import layer_entropy
from moe_edge.place.statistics import read_counts, read_statistics
from moe_edge.workload.routing_model import (
    BIGBENCH,
    SOURCES,
    TASK_SKEW,
    RoutingModel,
)


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


def measure(settings: PatternSettings) -> Findings:
    """Reads the counts; nothing is run."""
    path = Path(find_file(settings.counts, settings.data_dir))
    measured = read_usage(path)
    assumed = {
        model: usage
        for model in measured
        if (usage := assumed_usage(model)) is not None
    }
    rows, details, shown, ours = [], [], [], {}
    for kind, by_model in (("measured", measured), ("assumed tasks", assumed)):
        for model, usage in by_model.items():
            facts = facts_of(usage)
            own, other = (
                f"{facts[f]:.0%}" for f in ("own quarter", "quarter of another")
            )
            if kind == "measured":
                shown.append(f"{model} {own} and {other}")
            ours[f"{model}, {kind}"] = {k: round(v, 3) for k, v in facts.items()}
            for name, value in facts.items():
                rows.append(metric(kind, f"{name}, {model}", value, "1"))
            details.append(
                f"{model}, {kind}: a domain's most used quarter gets {own} of its "
                f"calls and {other} of another domain's; entropy is "
                f"{facts['least entropy']:.2f}-{facts['most entropy']:.2f} of the "
                "largest, by domain and layer."
            )
    return Findings(
        answer="A domain's most used quarter of experts gets, of its own and of "
        f"another domain's calls: {'; '.join(shown)}.",
        details=details,
        model={
            "name": ", ".join(measured),
            "params": 0,
            "weights": "none: recorded counts of their routers",
        },
        workload={"counts": path.name, "sha256": sha256_of(path)},
        metrics=rows,
        limits=[
            "Domains of text, not tasks: no counts of narrow tasks could be had. What "
            f"simulations assume of tasks (`TASK_SKEW` {TASK_SKEW} in "
            "workload/routing_model.py) stands beside them.",
            "Counted layers: "
            + "; ".join(f"{len(u.layers)} of {m}" for m, u in measured.items())
            + ". The assumed tasks are of all layers.",
        ],
        kind="measured",
        ours=ours,
        plot=lambda out: plot_domains(out, measured),
        pictures={"layers.png": lambda out: plot_layers(out, measured)},
        summary={"usage": ours},
    )


def facts_of(usage: Usage) -> dict[str, float]:
    """Means over domains and layers, and extremes."""
    caught_NML, same = usage.caught_NML(), np.eye(len(usage.domains), dtype=bool)
    entropy_NL = usage.entropy_NL()
    return {
        "own quarter": float(caught_NML[same].mean()),
        "quarter of another": float(caught_NML[~same].mean()),
        "total variation of domains": float(usage.apart_L().mean()),
        "least entropy": float(entropy_NL.min()),
        "most entropy": float(entropy_NL.max()),
    }


def plot_domains(path: Path, found: Mapping[str, Usage]) -> None:
    """Figure 2: shares of experts in the first layer, a line a domain."""
    panels = []
    for model, usage in found.items():
        order_E = np.argsort(-usage.share_NLE[0, 0])
        panels.append(
            Panel(
                f"{model}, layer {usage.layers[0]}",
                "share of calls",
                list(range(1, len(order_E) + 1)),
                {
                    domain: share_LE[0, order_E]
                    for domain, share_LE in zip(
                        usage.domains, usage.share_NLE, strict=True
                    )
                },
                x_label=f"experts, most used in {usage.domains[0]} first",
            )
        )
    draw_panels(path, panels, title="Usage of experts by domain (measured)")


def plot_layers(path: Path, found: Mapping[str, Usage]) -> None:
    """Figure 3: entropy by layer, a line a domain."""
    panels = [
        Panel(
            model,
            "entropy over the largest",
            usage.layers,
            dict(zip(usage.domains, usage.entropy_NL(), strict=True)),
            x_label="layer",
        )
        for model, usage in found.items()
    ]
    draw_panels(path, panels, title="Evenness of usage by layer (measured)")


STUDY = Study(
    name="prism_fig2",
    question="How does usage of experts differ by domain and layer (Prism, figures 2 "
    "and 3)?",
    settings=PatternSettings,
    measure=measure,
    check=lambda settings: find_file(settings.counts, settings.data_dir),
    claim=Claim(
        source="Prism, section II-A, figures 2 and 3: Mixtral, BIG-bench tasks",
        paper={
            "figure 2": "arithmetic uses expert 0 most, ASCII recognition expert 3",
            "figure 3": "layer 0 skewed, layer 1 nearly uniform",
        },
        why="The paper counts narrow tasks and gives no numbers; these are domains of "
        "text, more even than the tasks that we assume.",
        not_comparable="Other tasks, and figures without numbers.",
    ),
)
