"""SMoE, figure 11: the time of a token under whole systems, by workload.

Every system is what its paper describes, as far as one engine can be it: eviction,
prediction, prefetching and the host's part together. Its best configuration counts
(slots in one pool or as many for each layer, MoE-Infinity's horizon), by a first round
that is not reported. No measured prompt is among those that systems learn from. The
host is emulated as the link is: an expert takes a third of its load's time there, as
with the paper's largest model, or as long as the load.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from moe_edge.bench.cases import Case, count_history, past_sequences, prepare
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs, make_pool
from moe_edge.bench.settings import Budget, Margin, Positive
from moe_edge.bench.started import start_number
from moe_edge.bench.study import Study
from moe_edge.bench.timed_cases import Timed, TimedSettings, Timing, time_cases
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.generate import generate
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame, interval, median
from moe_edge.papers.smoe.studies import fig14
from moe_edge.papers.smoe.studies.layerwise import LayerwiseEngine

RESAMPLES = 2000  # of the workloads
PLANS = ("one_pool", "equal")
SMOE, OURS, LAYERWISE = "SMoE", "ours, lossless", "layer-wise (DeepSpeed)"


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
      rounds: the first one chooses configurations, the others are reported.
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


def workloads_of(settings: Fig11Settings) -> dict[str, Fig11Settings]:
    """By name, settings whose prompts come from that workload."""
    if settings.data_dir is None:
        return {"books": settings}
    return {
        name_of(source): dataclasses.replace(settings, sources=(source,))
        for source in settings.sources
    }


def name_of(source: str) -> str:
    """A workload's name."""
    return Path(source).name.split(".")[0]


def unseen_rounds(settings: Fig11Settings, tokenizer, seen: set) -> list[list[list]]:
    """Rounds of a workload's prompts, none of them among those seen; each start passes
    over those of the starts before.

    Raises:
      RequestError: its file does not hold so many.
    """
    widest = max(settings.batches)
    wanted, tokens = widest * settings.rounds, settings.prompt_tokens
    before = wanted * (start_number() or 0)
    most = before + wanted + len(seen)
    pool = make_pool(settings, tokenizer, most, tokens, at_most=True, before=0)
    rows = [row for row in pool.rows if tuple(row) not in seen][before:][:wanted]
    if len(rows) < wanted:
        raise RequestError(
            f"{settings.sources[0]} holds {len(rows)} prompts of {tokens} tokens that "
            f"nothing has learnt from, {wanted} are needed; lower history, rounds, "
            "starts or batches"
        )
    return [rows[n : n + widest] for n in range(0, wanted, widest)]


def measure(settings: Fig11Settings, rows: Rows) -> None:
    """Measures every system on every workload."""
    with (
        Bench(settings.checkpoint, settings=settings) as bench,
        contextlib.ExitStack() as closing,
    ):
        config = bench.config
        history = past_sequences(bench, settings)
        counts_LE = count_history(history, config.num_layers, config.moe.num_experts)
        groups = cases_of(settings, counts_LE)
        cases = list(
            {case.key: case for group in groups.values() for case in group}.values()
        )
        ready = prepare(bench, cases, settings, history)
        layerwise = LayerwiseEngine(bench.weights, bench.store, ready.link.again())
        closing.callback(layerwise.close)
        for batch in settings.batches:
            case = Case(LAYERWISE, "two layers", batch, studied())
            cases.append(case)
            groups |= {
                (LAYERWISE, loads, batch): [case] for loads in hosts_of(settings)
            }
            generate(layerwise, ready.rounds[0][:batch], settings.new_tokens)

        def num_compiled() -> int:
            return bench.num_compiled() + layerwise.num_compiled()

        engines = [*ready.engines, *[layerwise] * len(settings.batches)]
        seen, timings = set(map(tuple, ready.pool.rows)), {}
        works = {
            name: (one, unseen_rounds(one, bench.tokenizer, seen))
            for name, one in workloads_of(settings).items()
        }
        for name, (one, prompts) in works.items():
            at = dataclasses.replace(ready, engines=engines, rounds=prompts)
            timings[name] = time_cases(bench, cases, at, one, num_compiled, is_smoe)
        workload = ready.workload(settings) | {"workloads": list(timings)}
        rows.about |= {"model": bench.model, "workload": workload, "kind": ready.kind}
    tell(rows, timings, groups)


def tell(
    rows: Rows,
    timings: Mapping[str, Timing],
    groups: Mapping[tuple[str, float | None, int], Sequence[Case]],
) -> None:
    """Adds the best configuration of every system, and SMoE beside the best of others.

    The first round chooses the configuration, the others are reported.

    Args:
      timings: by workload.
      groups: configurations by (system, host, batch).
    """
    best: dict[tuple[str, str, float | None, int], Timed] = {}
    for work, timing in timings.items():
        for name, holds in timing.checks().items():
            rows.checks[f"{name} ({work})"] = holds
        for (system, loads, batch), cases in groups.items():
            case = min(cases, key=lambda case: timing[case.key].tpot_s[0])
            one = best[work, system, loads, batch] = timing[case.key]
            more = {"tpot_ms": median(one.tpot_s[1:], scale=1e3)}
            if system == SMOE and one.fidelity is not None:
                more["agreement"] = one.fidelity.agreement
            rows("systems", work, system, host_name(loads), batch, **more)
    names = list(dict.fromkeys(system for system, _, _ in groups))
    for loads, batch in dict.fromkeys(key[1:] for key in groups):
        of = {
            (w, name): one
            for (w, name, *at), one in best.items()
            if at == [loads, batch]
        }
        for kind, left_out in (("other", (SMOE, OURS)), ("lossless", (SMOE,))):
            rivals = [name for name in names if name not in left_out]
            ratio_WR, found = against(of, timings, rivals)
            at = kind, host_name(loads), batch, ", ".join(found)
            rows("against", *at, change=change_of(ratio_WR))
    rows.about["baselines"] = [name for name in names if name != SMOE]


def against(
    of: Mapping[tuple[str, str], Timed], works: Iterable[str], rivals: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """TPOT over that of the best rival, float64 [workloads, rounds], and which these
    are."""
    ratios_WR, found = [], set()
    for work in works:
        best = min(rivals, key=lambda name: of[work, name].tpot_s[0])
        found.add(best)
        mine, its = (of[work, name].tpot_s[1:] for name in (SMOE, best))
        ratios_WR.append(np.divide(mine, its))
    return np.array(ratios_WR), sorted(found)


def change_of(ratio_WR: np.ndarray) -> Estimate:
    """The mean over workloads: median and range of the rounds. A single round, not of a
    start, has an interval over the workloads, whose prompts differ."""
    workloads, rounds = ratio_WR.shape
    if rounds > 1 or workloads == 1 or start_number() is not None:
        return median(ratio_WR.mean(axis=0) - 1)
    rng = np.random.default_rng(0)
    drawn = ratio_WR[rng.integers(workloads, size=(RESAMPLES, workloads)), 0]
    bounds = np.percentile(drawn.mean(axis=1), (2.5, 97.5))
    return interval(ratio_WR.mean() - 1, bounds - 1, workloads)


def derive(tables: Tables) -> dict[str, Any]:
    """Changes; those that rounds do not agree on are no difference."""
    found, systems = tables["against"], tables["systems"]
    found["none"] = (found.change_low <= 0) & (found.change_high >= 0)
    agreed = systems.agreement.dropna()
    return {"changes": found, "agreed": [agreed.min(), agreed.max()]}


def check(settings: Fig11Settings) -> None:
    """As `check_inputs`; also refuses files of one name."""
    check_inputs(settings)
    names = [name_of(source) for source in settings.sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"sources {names} are workloads by name; name each file once")


FRAMES = {
    "systems": frame("workload system host batch", "tpot_ms agreement"),
    "against": frame("kind host batch rivals", "change"),
}
STUDY = Study(
    "smoe_fig11",
    Fig11Settings,
    measure,
    FRAMES,
    derive,
    check=check,
    inline=True,
    start={"rounds": 2},
)
