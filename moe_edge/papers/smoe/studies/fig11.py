"""SMoE, figure 11: the time of a token under whole systems, by workload.

The best configuration of a system counts (slots in one pool or as many for each layer,
MoE-Infinity's horizon), by a first round that is not reported. No measured prompt is
among those that systems learn from.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_edge.bench.cases import Case, Ready, count_history, past_sequences, prepare
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.started import start_number
from moe_edge.bench.study import Study
from moe_edge.bench.timed_cases import Timed, Timing, time_cases
from moe_edge.core.checks import ConfigError
from moe_edge.engine.generate import generate
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame, interval, median
from moe_edge.papers.smoe.studies.layerwise import LayerwiseEngine
from moe_edge.papers.smoe.studies.systems import (
    LAYERWISE,
    OURS,
    SMOE,
    Fig11Settings,
    cases_of,
    host_name,
    hosts_of,
    is_smoe,
)
from moe_edge.papers.smoe.studies.workloads import (
    check_workloads,
    name_of,
    rounds_of,
)

RESAMPLES = 2000  # of the workloads


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
        engines, added = list(ready.engines), list[LayerwiseEngine]()
        if settings.layerwise:
            layerwise = LayerwiseEngine(bench.weights, bench.store, ready.link.again())
            closing.callback(layerwise.close)
            added.append(layerwise)
            for batch in settings.batches:
                case = Case(LAYERWISE, "two layers", batch, studied())
                cases.append(case)
                engines.append(layerwise)
                groups |= {
                    (LAYERWISE, loads, batch): [case] for loads in hosts_of(settings)
                }
                generate(layerwise, ready.rounds[0][:batch], settings.new_tokens)

        def num_compiled() -> int:
            more = sum(engine.num_compiled() for engine in added)
            return bench.num_compiled() + more

        works, timings = rounds_of(settings, bench.tokenizer), {}
        first: Timing | None = None
        for name, (one, prompts) in works.items():
            at = dataclasses.replace(ready, engines=engines, rounds=prompts)
            if settings.choose_once and first is None:
                at = dataclasses.replace(at, rounds=prompts[:1])
                first = time_cases(bench, cases, at, one, num_compiled, no_case)
                groups = {key: [fastest(first, of)] for key, of in groups.items()}
                chosen = {case.key for (case,) in groups.values()}
                kept = [n for n, case in enumerate(cases) if case.key in chosen]
                cases, engines = [cases[n] for n in kept], [engines[n] for n in kept]
            if first is not None:
                at = dataclasses.replace(at, engines=engines, rounds=prompts[1:])
            judged = no_case if bench.is_random else is_smoe
            timing = time_cases(bench, cases, at, one, num_compiled, judged)
            timings[name] = timing if first is None else after(first, timing)
        workload = ready.workload(settings) | {"workloads": list(timings)}
        rows.about |= {"model": bench.model, "workload": workload, "kind": ready.kind}
    if first is not None:
        for name, holds in first.checks().items():
            rows.checks[f"{name} (the round that chooses)"] = holds
    tell(rows, timings, groups)
    if not settings.layerwise:
        step_s = layerwise_s(bench, ready)
        for work, loads, batch in itertools.product(
            timings, hosts_of(settings), settings.batches
        ):
            at = work, f"{LAYERWISE}, computed", host_name(loads), batch
            rows("systems", *at, tpot_ms=1e3 * step_s)


def no_case(case: Case) -> bool:
    """Whose fidelity is judged in a round that only chooses, and of random weights."""
    return False


def fastest(timing: Timing, cases: Sequence[Case]) -> Case:
    """The case of the shortest step in the first round."""
    return min(cases, key=lambda case: timing[case.key].tpot_s[0])


def after(first: Timing, timing: Timing) -> Timing:
    """A timing behind another one's first round, which has chosen its cases."""
    timed = {
        key: dataclasses.replace(
            one,
            tpot_s=[first[key].tpot_s[0], *one.tpot_s],
            is_same=[first[key].is_same[0], *one.is_same],
        )
        for key, one in timing.timed.items()
    }
    return dataclasses.replace(timing, timed=timed)


def layerwise_s(bench: Bench, ready: Ready) -> float:
    """Seconds of a step of layer-wise offload: the loads of all layers, during which
    all but the last are computed."""
    store = bench.store
    load_s = ready.link.seconds(store.num_experts * store.block_bytes)
    return len(bench.config.moe_layers) * load_s + ready.layer_s


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
            case = fastest(timing, cases)
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
    """Changes; those that rounds do not agree on are no difference. `agreed`: the
    least and the most agreement, nothing where it was not judged."""
    found, systems = tables["against"], tables["systems"]
    found["none"] = (found.change_low <= 0) & (found.change_high >= 0)
    agreed = systems.get("agreement", pd.Series(dtype=float)).dropna()
    ends = [] if agreed.empty else [agreed.min(), agreed.max()]
    return {"changes": found, "agreed": ends}


def check(settings: Fig11Settings) -> None:
    """As `check_inputs`; also refuses files of one name or with too few prompts, and to
    compute what layer-wise offload takes over a link whose rate is not known."""
    check_inputs(settings)
    names = [name_of(source) for source in settings.sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"sources {names} are workloads by name; name each file once")
    if settings.link_factor is None and not settings.layerwise:
        raise ConfigError(
            "layerwise is False next to the machine's own link; its time is computed "
            "for an emulated link: give link_factor"
        )
    check_workloads(settings)


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
