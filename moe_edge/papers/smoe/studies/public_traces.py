"""Replay of the public route traces: every cache policy that needs no more than ids."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_edge.bench.derived import best, wide
from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Study
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.frames import Rows, Tables, frame
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
Recalls = dict[str, tuple[float, float]]  # recall and precision by predictor


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


def recall_all(trace: Trace) -> Recalls:
    """(recall, precision) one layer ahead of every predictor that can be replayed."""
    found = {}
    for name in known_predictors(trace):
        result = replay_predictor(trace, predictor_of(name, trace))
        found[name] = float(result.recall_A[0]), float(result.precision_A[0])
    return found


def measure(settings: TraceSettings, rows: Rows) -> None:
    """Replays all traces."""
    paths, sources = trace_paths(settings), {}
    for path in paths:
        name = stem(path)
        trace = read_trace(path, settings.trace_experts)
        tell(rows, name, replay_all(trace, settings.slots_per_layer), recall_all(trace))
        sources[name] = {"file": path.name, "sha256": sha256_of(path)}
    rows.about |= {
        "model": {
            "name": ", ".join(sources),
            "params": 0,
            "weights": "none: recorded routing",
        },
        "workload": sources | {"slots_per_layer": list(settings.slots_per_layer)},
        "kind": "simulated",
        "baselines": ["lru", "lfu", *BOUNDS],
    }


def tell(rows: Rows, name: str, ratios: Ratios, recalls: Recalls) -> None:
    """Adds what was replayed of a trace."""
    for policy, by_size in ratios.items():
        for size, value in by_size.items():
            rows("ratios", name, policy, size, hit_ratio=value)
    for predictor, pair in recalls.items():
        both = dict(zip(("recall", "precision"), pair, strict=True))
        both = {key: value for key, value in both.items() if np.isfinite(value)}
        rows("ahead", name, predictor, **both)


def known() -> pd.DataFrame:
    """The known ratios, in column `known`."""
    lines = [
        (trace, policy, size, value)
        for trace, by_policy in KNOWN.items()
        for policy, values in by_policy.items()
        for size, value in zip(KNOWN_SLOTS, values, strict=True)
    ]
    return pd.DataFrame(lines, columns=["trace", "policy", "slots", "known"])


def derive(tables: Tables) -> dict[str, Any]:
    """How far the known ratios are met, and the best policy that needs no future."""
    ratios = tables["ratios"]
    both = ratios.merge(known())
    gaps = (both.hit_ratio - both.known).abs().groupby(both.trace, sort=False).max()
    most = best(ratios[~ratios.policy.isin(BOUNDS)], "hit_ratio", "trace slots")
    others = wide(ratios, "hit_ratio", "policy", "trace slots")[["lru", "belady"]]
    checks = {
        f"{trace}: LRU, LFU, Belady within {TOLERANCE} of interfaces.md": gap
        <= TOLERANCE
        for trace, gap in gaps.items()
    }
    return {
        "best": most.merge(others.reset_index()),
        "gap": gaps.max(),
        "checks": checks,
    }


FRAMES = {
    "ratios": frame("trace policy slots", "hit_ratio"),
    "ahead": frame("trace predictor", "recall precision"),
}
STUDY = Study(
    "replay_public_traces", TraceSettings, measure, FRAMES, derive, check=trace_paths
)
