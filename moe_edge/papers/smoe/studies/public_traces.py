"""Replay of the public route traces: every cache policy that needs no more than ids."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Findings, Study
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.simulate.replay.hits import replay
from moe_edge.simulate.replay.lookups import known_policies, policy_of, slots_for
from moe_edge.simulate.replay.predict import (
    known_predictors,
    predictor_of,
    replay_predictor,
)
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import Trace

# Decode hit ratios at 13, 32 and 64 slots a layer, computed once by another program
# (interfaces.md, cache semantics).
KNOWN_SLOTS = (13, 32, 64)
KNOWN = {
    "trace_qwen3_30b_a3b": {
        "lru": (0.546, 0.817, 0.958),
        "lfu": (0.580, 0.821, 0.958),
        "belady": (0.698, 0.912, 0.969),
    },
    "trace_gemma4_26b_a4b": {
        "lru": (0.545, 0.795, 0.951),
        "lfu": (0.590, 0.815, 0.952),
        "belady": (0.696, 0.900, 0.963),
    },
}
TOLERANCE = 0.005
BOUNDS = ("belady", "static_oracle")  # know the future
Ratios = dict[str, dict[int, float]]  # by policy and slots a layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSettings(StudySettings):
    """What is replayed.

    Attributes:
      data_dir: where `traces` are looked up.
      traces: public route traces, of models with `trace_experts` experts a layer.
      slots_per_layer: cache sizes.
    """

    data_dir: str | None = None
    traces: Sequence[str] = (
        "routing/trace_qwen3_30b_a3b.csv.gz",
        "routing/trace_gemma4_26b_a4b.csv.gz",
    )
    trace_experts: int = 128
    slots_per_layer: Sequence[int] = KNOWN_SLOTS


def stem(path: str | Path) -> str:
    """The name of a trace without its endings."""
    return Path(path).name.split(".")[0]


def trace_paths(settings: TraceSettings) -> list[Path]:
    """The traces' files. Raises OSError for one that does not exist."""
    return [Path(find_file(name, settings.data_dir)) for name in settings.traces]


def replay_all(trace: Trace, sizes) -> Ratios:
    """Decode hit ratio of every policy whose needs the trace holds."""
    return {
        name: {
            size: replay(
                trace, policy_of(name, trace), slots_for(name, trace, size)
            ).hit_ratio
            for size in sizes
        }
        for name in known_policies(trace)
    }


def recall_all(trace: Trace) -> dict[str, tuple[float, float]]:
    """(recall, precision) one layer ahead of every predictor that can be replayed."""
    found = {}
    for name in known_predictors(trace):
        result = replay_predictor(trace, predictor_of(name, trace))
        found[name] = float(result.recall_A[0]), float(result.precision_A[0])
    return found


def worst_difference(name: str, ratios: Ratios) -> float | None:
    """Largest distance from the known numbers; None where none are known."""
    found = [
        abs(ratios[policy][size] - value)
        for policy, values in KNOWN.get(name, {}).items()
        for size, value in zip(KNOWN_SLOTS, values, strict=True)
        if size in ratios.get(policy, {})
    ]
    return max(found, default=None)


def run(settings: TraceSettings) -> Findings:
    """Replays all traces."""
    ratios, recalls = {}, {}
    paths = trace_paths(settings)
    for path in paths:
        trace = read_trace(path, settings.trace_experts)
        ratios[stem(path)] = replay_all(trace, settings.slots_per_layer)
        recalls[stem(path)] = recall_all(trace)
    return findings(ratios, recalls, paths, settings)


def findings(
    ratios: dict[str, Ratios],
    recalls: dict[str, dict[str, tuple[float, float]]],
    paths: list[Path],
    settings: TraceSettings,
) -> Findings:
    """The entry from the replayed ratios."""
    rows, checks, gaps, details = [], {}, [], []
    for name, by_policy in ratios.items():
        for policy, by_size in by_policy.items():
            for size, value in by_size.items():
                row = f"decode hit ratio, {size} slots a layer, {name}"
                rows.append(metric(policy, row, value, "1"))
        for predictor, pair in recalls[name].items():
            for measure, value in zip(("recall", "precision"), pair, strict=True):
                if np.isfinite(value):
                    row = f"{measure} one layer ahead, {name}"
                    rows.append(metric(f"predictor {predictor}", row, value, "1"))
        if (worst := worst_difference(name, by_policy)) is not None:
            gaps.append(worst)
            check = f"{name}: LRU, LFU, Belady within {TOLERANCE} of interfaces.md"
            checks[check] = worst <= TOLERANCE
        for size in settings.slots_per_layer:
            real = {p: v[size] for p, v in by_policy.items() if p not in BOUNDS}
            best = max(real, key=real.get)
            details.append(
                f"{name}, {size} slots: best policy that needs no future {best} "
                f"{real[best]:.3f}, LRU {by_policy['lru'][size]:.3f}, Belady "
                f"{by_policy['belady'][size]:.3f}."
            )
    distance = f"within {max(gaps):.4f}" if gaps else "nowhere: none are known"
    sources = {stem(p): {"file": p.name, "sha256": sha256_of(p)} for p in paths}
    sizes = list(settings.slots_per_layer)
    replayed = {"hit_ratio": ratios, "prediction": recalls}
    return Findings(
        answer=f"The known LRU, LFU and Belady ratios are met {distance}.",
        details=details,
        model={
            "name": ", ".join(ratios),
            "params": 0,
            "weights": "none: recorded routing",
        },
        workload=sources | {"slots_per_layer": sizes},
        metrics=rows,
        limits=[
            "One generation of one prompt a model: unit goldens, no ranking of "
            "policies.",
            "The traces hold chosen experts only: policies that need all scores "
            "(smoe_score, hybrimoe) and predictors that need hidden states are not "
            "replayed.",
            "Hit ratios, not times: no transfer is modelled.",
        ],
        kind="simulated",
        baselines=["lru", "lfu", *BOUNDS],
        checks=checks,
        plot=lambda path: plot(path, ratios, sorted(sizes)),
        summary={"hit_ratio": ratios},
        files={"replay.json": json.dumps(replayed, indent=1) + "\n"},
    )


def plot(path: Path, ratios: dict[str, Ratios], sizes: list[int]) -> None:
    """Hit ratio against slots, a panel a trace."""
    panels = [
        Panel(
            name,
            "decode hit ratio",
            sizes,
            {p: [by_size[size] for size in sizes] for p, by_size in by_policy.items()},
            x_label="slots a layer",
        )
        for name, by_policy in ratios.items()
    ]
    draw_panels(path, panels, title="Cache policies on public route traces (replay)")


STUDY = Study(
    name="replay_public_traces",
    question="Which experts of two public route traces does each cache policy keep?",
    settings=TraceSettings,
    measure=run,
    check=trace_paths,
)
