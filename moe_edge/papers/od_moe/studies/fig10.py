"""OD-MoE, figure 10: how often to align the KV cache, at the paper's scale.

Simulated: the timing model with the paper's test bed as its parts. The recall is that
of our default model, its misses scaled to the paper's; the model is first held against
our live runs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.registry import later
from moe_edge.bench.settings import FromZero, Positive, known
from moe_edge.bench.study import Study
from moe_edge.hardware.presets import DEVICES
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame
from moe_edge.papers.od_moe.cluster.groups import longest_load_s
from moe_edge.papers.od_moe.cluster.timing import Timing
from moe_edge.papers.od_moe.shadow.predictor import Shadow
from moe_edge.papers.od_moe.studies.held import (
    CLOSE,
    LiveEntry,
    LiveModel,
    checks_of,
    missed_ratio,
)
from moe_edge.papers.od_moe.studies.paper_scale import (
    CACHED_TOKENS_PER_S,
    GROUPS,
    MBPS,
    SHAPE,
    TEST_BED,
    VALUE_BYTES,
    parts_of,
    scaled_recall,
)
from moe_edge.papers.od_moe.studies.studies import Precision, RecallSettings

PAPER_KV = {"rtx_3090": 1, "rtx_3080": 4}  # best periods
PAPER_SPEED = 3.65  # tokens/s with T1_KV1, table 2, 16 tokens in, 256 out
LATE, EARLY = "late", "speculative"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig10Settings(RecallSettings):
    """`RecallSettings` names the rest, of the runs that the recall comes from.

    Attributes:
      precision: of the shadow.
      kv_periods: of the KV cache; tokens are aligned at every step.
      gpus: of the workers.
      align_costs_s: what aligning the KV cache takes beside its bytes' time on the
        network, each time; the paper does not say.
      shadow_share: a token's time of the shadow over the cached model's; likewise.
      steps: decode steps of a text.
      live: the entry of live runs that the model is held against.
      live_workers, live_groups: of them.
    """

    rounds: int = 12
    precision: Precision = "int8"
    kv_periods: Sequence[int] = (1, 2, 4, 8, 16, 32)
    gpus: Sequence[Annotated[str, known("gpus", DEVICES)]] = ("rtx_3090", "rtx_3080")
    align_costs_s: Sequence[FromZero] = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05)
    shadow_share: Positive = 0.5
    steps: int = 256
    live: str = "results/od_moe_fig8"
    live_workers: int = 4
    live_groups: int = 2


def check(settings: Fig10Settings) -> None:
    """Refuses inputs that cannot be read, before weights are."""
    check_inputs(settings)
    LiveEntry.read(settings.live)


Speeds = Mapping[tuple[str, str, float], Mapping[int, float]]


def speeds_of(settings: Fig10Settings, recall: Mapping[int, float]) -> Speeds:
    """Tokens a second by (GPU, departure, cost of an alignment), then by KV period."""
    found = {}
    for name in settings.gpus:
        parts = parts_of(name, settings.shadow_share)
        cases = [(LATE, cost_s) for cost_s in settings.align_costs_s]
        for departure, cost_s in [*cases, (EARLY, 0.0)]:  # its patches delay nothing
            found[name, departure, cost_s] = {
                period: 1
                / Timing(
                    **parts,
                    departure=departure,
                    kv_period=period,
                    align_s=cost_s,
                    missed_ratio=missed_ratio(recall[period], SHAPE.top_k),
                ).token_s(settings.steps)
                for period in settings.kv_periods
            }
    return found


def measure(settings: Fig10Settings, rows: Rows) -> None:
    """Measures the recall, and models the rest."""
    runs = later("papers.od_moe.studies.recorded.Runs")(settings)
    found = {
        period: runs.recall(Shadow(settings.precision, 1, period))
        for period in settings.kv_periods
    }
    live = LiveModel(
        len(runs.config.moe_layers),
        runs.config.moe.top_k,
        settings.live_workers,
        settings.live_groups,
    )
    held = LiveEntry.read(settings.live).over_measured(live)
    tell(rows, settings, {n: one.estimate for n, one in found.items()}, held)
    modelled = f"{SHAPE.name} of {VALUE_BYTES} bytes a value, {SHAPE.source}"
    rows.about |= {
        "model": runs.model,
        "workload": runs.workload
        | {
            "modelled": modelled,
            "network_mbps": MBPS,
            "cached_tokens_per_s": CACHED_TOKENS_PER_S,
            "shadow_share": settings.shadow_share,
        },
        "kind": "simulated",
        "cost_model_source": "preset",
    }


def tell(
    rows: Rows,
    settings: Fig10Settings,
    recall: Mapping[int, Estimate],
    held: Mapping[str, float],
) -> None:
    """Adds what is modelled from the recall by KV period, and what went into it;
    `held`: modelled over measured of the live cases."""
    scaled = scaled_recall(
        {n: one.value for n, one in recall.items()}, settings.precision
    )
    for period, one in recall.items():
        rows("recall", period, recall=one, scaled=scaled[period])
    for (gpu, departure, cost_s), by_kv in speeds_of(settings, scaled).items():
        for period, speed in by_kv.items():
            rows("speeds", gpu, departure, 1e3 * cost_s, period, tokens_per_s=speed)
    for gpu in settings.gpus:
        parts = parts_of(gpu, settings.shadow_share)
        times_s = {name: parts[f"{name}_s"] for name in ("main", "worker", "load")}
        times_s["maxload"] = longest_load_s(parts["main_s"], parts["worker_s"], GROUPS)
        rows("parts", gpu, **{f"{name}_ms": 1e3 * s for name, s in times_s.items()})
    for case, ratio in held.items():
        rows("held", case, over_measured=ratio)


def derive(tables: Tables) -> dict[str, Any]:
    """The fastest KV period of each GPU, and from which overhead on it is the
    paper's."""
    speeds, held = tables["speeds"], tables["held"]
    best = speeds.loc[
        speeds.groupby(
            ["gpu", "departure", "cost_ms"], sort=False
        ).tokens_per_s.idxmax()
    ]
    late = best[best.departure == LATE].sort_values("cost_ms", kind="stable")
    first = late.groupby("gpu", sort=False).first().reset_index()
    last = first.iloc[-1]
    of_last = late[late.gpu == last.gpu]
    turns = of_last[of_last.kv >= PAPER_KV.get(last.gpu, 4)]
    early = best[(best.gpu == last.gpu) & (best.departure == EARLY)]
    at_bed = (speeds.gpu == TEST_BED) & (speeds.departure == LATE) & (speeds.kv == 1)
    near = speeds[at_bed & (speeds.cost_ms == speeds.cost_ms.min())].tokens_per_s
    checks = checks_of(held.set_index("case").over_measured.to_dict())
    found: dict[str, Any] = {
        "best": first,
        "fastest": last.to_dict(),
        "early": early.tokens_per_s.max(),
        "most_ms": of_last.cost_ms.max(),
        "ends": [
            held.loc[held.over_measured.idxmin()].to_dict(),
            held.loc[held.over_measured.idxmax()].to_dict(),
        ],
        "lines": speeds.assign(
            line=speeds.departure + speeds.cost_ms.map(", {:g} ms".format)
        ),
        "checks": checks,
    }
    if len(turns):
        found["turn"] = turns.iloc[0].to_dict()
    if len(near):
        found["near"] = near.iloc[0]
        name = f"tokens/s with T1_KV1, {TEST_BED}: within {100 * CLOSE:.0f} % of the "
        checks[name + "paper's"] = bool(abs(near.iloc[0] / PAPER_SPEED - 1) <= CLOSE)
    return found


FRAMES = {
    "speeds": frame("gpu departure cost_ms kv", "tokens_per_s:tokens/s"),
    "held": frame("case", "over_measured"),
    "recall": frame("kv", "recall scaled"),
    "parts": frame("gpu", "main_ms worker_ms load_ms maxload_ms"),
}
STUDY = Study("od_moe_fig10", Fig10Settings, measure, FRAMES, derive, check=check)
