"""MoE-Prism's serving at the paper's scale: goodput and throughput, simulated.

The same request loop and policies as live, over steps that cost what a device's
roofline says. Floors are spread evenly from an eighth of the model's K to all of it.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd

from moe_edge.bench.derived import spans
from moe_edge.bench.settings import Positive, StudySettings, known
from moe_edge.bench.shapes import shape_entry
from moe_edge.bench.study import Study
from moe_edge.core.checks import CapacityError
from moe_edge.engine.sizes import SlotSizes
from moe_edge.hardware.models import MODELS, model_shape
from moe_edge.hardware.presets import DEVICES, device
from moe_edge.hardware.roofline_steps import roofline_costs
from moe_edge.hardware.step_costs import StepCosts
from moe_edge.loadtest.computed import served_at
from moe_edge.loadtest.offered import (
    LoadOptions,
    Offered,
    in_whole_experts,
    offered_requests,
)
from moe_edge.metrics.frames import (
    HIGH,
    LOW,
    Estimate,
    Rows,
    Tables,
    frame,
    of_seeds,
)
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.serving_studies import (
    FIFO,
    OURS,
    PRISM,
    SYSTEMS,
    SystemName,
    check_systems,
)
from moe_edge.schedule.figures import summarise
from moe_edge.schedule.policy import get_scheduler
from moe_edge.serve.options import ServingOptions
from moe_edge.simulate.goodput import goodput

FIGURES = GOODPUT, AT_ONCE = "goodput", "at_once"  # at once: throughput
LOOP = "continuous, original"  # our loop without sub-experts
LEAST = 8  # the lowest floor is the model's K over this


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings(StudySettings):
    """Who serves what, on which device.

    Attributes:
      models: presets of `hardware.models`.
      gpu: preset of `hardware.presets` that holds them.
      systems: of figure 7, the first one is the base.
      sub_experts: parts of an expert in the refactored model.
      max_batches: rows that run at once.
      requests: offered, on average; rounds: how often, each time others.
      prompt_tokens, output_tokens: means, log-normal.
      max_context: tokens of the longest request.
      max_wait_s: of policies that wait for company.
      slo_ttft_ms, slo_tpot_ms: what in time means.
    """

    models: Sequence[Annotated[str, known("model preset", MODELS)]] = (
        *("olmoe_1b_7b", "deepseek_v2_lite"),
    )
    gpu: Annotated[str, known("gpu", DEVICES)] = "a100_40g"
    systems: Sequence[SystemName] = (FIFO, PRISM, LOOP, OURS, "elastic")
    sub_experts: int = 4
    max_batches: Sequence[int] = (8, 32, 128)
    requests: int = 400
    rounds: int = 5
    prompt_tokens: int = 256
    output_tokens: int = 128
    max_context: int = 2048
    max_wait_s: Positive = 1.0
    slo_ttft_ms: Positive = 500.0
    slo_tpot_ms: Positive = 20.0

    def __post_init__(self):
        super().__post_init__()
        check_systems(self.systems)


class Case(NamedTuple):
    """What a figure belongs to."""

    model: str
    batch: int
    system: str

    @property
    def label(self) -> str:
        return f"{self.model}, {self.batch} rows, {self.system}"


Values = Mapping[tuple[Case, str], Sequence[float]]  # (case, figure) -> one a round


def measure(settings: ScaleSettings, rows: Rows) -> None:
    """Serves the same requests by every system."""
    found = collections.defaultdict(list)
    for model in settings.models:
        for batch in settings.max_batches:
            costs = {
                parts: roofline_costs(
                    device(settings.gpu),
                    model_shape(model),
                    sub_experts=parts,
                    max_batch=batch,
                )
                for parts in (1, settings.sub_experts)
            }
            for number in range(settings.rounds):
                offered = offered_by(settings, model, number)
                for system in settings.systems:
                    case = Case(model, batch, system)
                    rates = figures(settings, case, costs, offered)
                    for name, rate in rates.items():
                        found[case, name].append(rate)
            print(f"{model}, {batch} rows: {settings.rounds} rounds", flush=True)
    tell_rates(rows, settings, found)
    rows.about |= {
        "seeds": list(range(settings.rounds)),
        "model": shape_entry(*map(model_shape, settings.models)),
        "workload": {
            "requests": settings.requests,
            "prompt_tokens": settings.prompt_tokens,
            "output_tokens": settings.output_tokens,
            "lengths": "log-normal",
            "arrivals": "Poisson",
            "floors": f"evenly from K / {LEAST} to K",
            "gpu": settings.gpu,
            "slo_ms": {"ttft": settings.slo_ttft_ms, "tpot": settings.slo_tpot_ms},
        },
        "kind": "simulated",
        "cost_model_source": "preset",
        "baselines": [
            system
            for system in settings.systems
            if SYSTEMS[system].policy in ("fifo", "full_batch")
        ],
    }


def offered_by(settings: ScaleSettings, model: str, seed: int) -> list[Offered]:
    """A round's requests, one a second; floors count sub-experts."""
    own = model_shape(model).top_k * settings.sub_experts
    load = LoadOptions(
        poisson=1.0,
        duration_s=float(settings.requests),
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        floors=",".join(f"{k}:1" for k in range(max(own // LEAST, 1), own + 1)),
        seed=seed,
    )
    return offered_requests(load, settings.max_context)


def figures(
    settings: ScaleSettings,
    case: Case,
    costs: Mapping[int, StepCosts],
    offered: Sequence[Offered],
) -> dict[str, float]:
    """Requests a second of a system: in time, and with all of them there at once.

    Args:
      costs: by sub-experts an expert.
    """
    system, subs = SYSTEMS[case.system], settings.sub_experts
    if system.model == ORIGINAL:
        offered, subs = in_whole_experts(offered, subs), 1
    policy = get_scheduler(
        system.policy,
        max_batch=case.batch,
        max_wait_s=settings.max_wait_s,
        own_k=model_shape(case.model).top_k * subs,
        costs=costs[subs],
    )
    options = ServingOptions(max_batch=case.batch)
    sizes = SlotSizes(**options.sizes(settings.max_context))

    def serve(rate: float):
        return served_at(rate, offered, policy, costs[subs], sizes)

    at_once = serve(math.inf)
    most = summarise(at_once)["throughput_req_s"]
    rate = goodput(
        serve,
        first_rate=most / 2,
        slo_ttft_s=settings.slo_ttft_ms / 1e3,
        slo_tpot_s=settings.slo_tpot_ms / 1e3,
    )
    if not 0 < rate < math.inf:
        raise CapacityError(
            f"{case.label}: no rate is served in time, goodput is {rate:g}; allow more "
            "than slo_ttft_ms and slo_tpot_ms, or take another gpu"
        )
    return {GOODPUT: rate, AT_ONCE: most}


def gain(found: Values, case: Case, base: str, name: str) -> Estimate:
    """A case's figure over that of another system in the same round, less 1."""
    mine, its = found[case, name], found[case._replace(system=base), name]
    return of_seeds((np.divide(mine, its) - 1).tolist())


def tell_rates(rows: Rows, settings: ScaleSettings, found: Values) -> None:
    """Adds all rates, their gains over the first system, and what sub-experts bring to
    our loop over models and batches."""
    cases = list(dict.fromkeys(case for case, _ in found))
    base = settings.systems[0]
    for case in cases:
        rates = {name: of_seeds(found[case, name]) for name in FIGURES}
        rows("rates", *case, **rates)
        if case.system != base:
            gains = {name: gain(found, case, base, name) for name in FIGURES}
            rows("gains", *case, base, **gains)
    if {OURS, LOOP} <= set(settings.systems):
        for case in (case for case in cases if case.system == OURS):
            rows("sub_experts", *case, LOOP, goodput=gain(found, case, LOOP, GOODPUT))


def over_cases(gains: pd.DataFrame, measure: str) -> pd.DataFrame:
    """By system how many `cases`, models and batches, there are; in how many of them
    rounds do not agree on a gain (`none`); and the range of the gains in the others."""
    is_none = (gains[measure + LOW] <= 0) & (gains[measure + HIGH] >= 0)
    by_system = is_none.groupby(gains.system, sort=False)
    counts = by_system.agg(cases="size", none="sum").reset_index()
    return counts.merge(spans(gains[~is_none], measure, "system"), how="left")


def derive(tables: Tables) -> dict[str, Any]:
    """What our loop, its sub-experts and MoE-Prism bring over models and batches."""
    gains = tables["gains"]
    found: dict[str, Any] = {
        "base": gains.over[0],
        "our_loop": over_cases(gains[gains.system == LOOP], GOODPUT),
        "scheduler": over_cases(gains[gains.system == PRISM], AT_ONCE),
    }
    if "sub_experts" in tables:
        found["parts_of_loop"] = over_cases(tables["sub_experts"], GOODPUT)
    return found


FRAMES = {
    "rates": frame("model batch system", "goodput:requests/s at_once:requests/s"),
    "gains": frame("model batch system over", "goodput at_once"),
    "sub_experts": frame("model batch system over", "goodput"),
}
STUDY = Study("moe_prism_goodput", ScaleSettings, measure, FRAMES, derive)
