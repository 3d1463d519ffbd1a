"""SMoE, figure 11: its size, the systems that it compares, and their cases.

Every system is what its paper describes, as far as one engine can be it: eviction,
prediction, prefetching and the host's part together. The host is emulated as the link
is: an expert takes a third of its load's time there, as with the paper's largest model,
or as long as the load.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from moe_edge.bench.cases import Case
from moe_edge.bench.offloading import studied
from moe_edge.bench.settings import Budget, Margin, Positive
from moe_edge.bench.timed_cases import TimedSettings
from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.papers.smoe.studies import fig14

SMOE, OURS, LAYERWISE = "SMoE", "ours, lossless", "layer-wise (DeepSpeed)"
PLANS = ("one_pool", "equal")


def check_rounds(name: str, value: int) -> None:
    """Raises ConfigError for less than one round that is reported."""
    if value < 2:
        raise ConfigError(f"{name} is {value}, expected 2 or more: the first chooses")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fig11Settings(TimedSettings):
    """The size of figure 11; `TimedSettings` names the rest.

    Attributes:
      sources: the workloads, a file each; without `data_dir` there is one, of books.
      device_memory: of the experts.
      a: SMoE's margin, for routing and for what is prefetched.
      host_loads: what an expert takes on the emulated host, in times of its load; next
        to the machine's own link, the host is the machine's own.
      horizons: layers that MoE-Infinity looks ahead.
      layerwise: whether layer-wise offload is measured; else the loads of its step are
        added up, which over a slow link would take most of the study.
      rounds: the first one chooses configurations, the others are reported.
      choose_once: whether the first round of the first workload chooses for all; other
        configurations are run once then.
    """

    sources: Sequence[str] = (
        "mcq/mmlu.jsonl",
        "mcq/wic.jsonl",
        "mcq/boolq.jsonl",
        "prompts/gaokao_english_reading.jsonl",
        "prompts/gsm8k.jsonl",
    )
    device_memory: Budget = "25%"
    rounds: Annotated[int, check_rounds] = 4
    a: Margin = 0.2
    host_loads: Sequence[Positive] = (1 / 3, 1.0)
    horizons: Sequence[int] = (1, 3)
    layerwise: bool = True
    choose_once: bool = False
    history: int = 200
    fidelity_rows: int = 8


def systems(
    a: float, counts_LE: np.ndarray, horizons: Sequence[int]
) -> dict[str, list[OffloadOptions]]:
    """The configurations of every system; of layer-wise offload there are none here."""
    static = fig14.bases(counts_LE)[fig14.STEPS[0]]
    hybrid = studied(eviction="hybrimoe", predictor="stale_gate", assist="two_front")
    ours = [
        studied(eviction=eviction, predictor=predictor, assist="two_pointer")
        for eviction in ("lfu", "successor")
        for predictor in ("none", "smoe_partial")
    ]
    matrices = [
        studied(eviction="moe_infinity", predictor="moe_infinity", horizon=horizon)
        for horizon in horizons
    ]
    return {
        "MoE-Infinity": with_plans(matrices),
        "HybriMoE": with_plans([hybrid]),
        "llama.cpp": with_plans([dataclasses.replace(static, assist="all")]),
        "static + Fiddler": with_plans([dataclasses.replace(static, assist="fiddler")]),
        OURS: with_plans(ours),
        SMOE: with_plans([fig14.smoe_steps(a)["+BA"]]),
    }


def with_plans(options: Sequence[OffloadOptions]) -> list[OffloadOptions]:
    """Each with either plan of its slots."""
    return [
        dataclasses.replace(one, slot_plan=plan)
        for one, plan in itertools.product(options, PLANS)
    ]


def hosts_of(settings: Fig11Settings) -> Sequence[float | None]:
    """`Case.host_loads` of the hosts that are compared; None: the machine's own."""
    return (None,) if settings.link_factor is None else settings.host_loads


def host_name(loads: float | None) -> str:
    """How tables name a host."""
    return "own" if loads is None else f"{loads:.2g}"


def cases_of(
    settings: Fig11Settings, counts_LE: np.ndarray
) -> dict[tuple[str, float | None, int], list[Case]]:
    """Configurations by (system, host, batch); one without a host is in either's."""
    found: dict[tuple[str, float | None, int], list[Case]] = {}
    named = systems(settings.a, counts_LE, settings.horizons)
    for batch, (system, variants) in itertools.product(settings.batches, named.items()):
        for loads in hosts_of(settings):
            found[system, loads, batch] = [
                Case(
                    f"{system}, {number}"
                    + (f", host {host_name(loads)}" if options.assist else ""),
                    settings.device_memory,
                    batch,
                    options,
                    loads if options.assist else None,
                )
                for number, options in enumerate(variants, 1)
            ]
    return found


def is_smoe(case: Case) -> bool:
    """Whether a case may substitute: the others' host only sums in another order."""
    return not case.options.lossless
